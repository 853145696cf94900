"""Two tensors to their difference."""
