"""Trees of .npy files, as saving hooks write them."""
