"""CUDA tensors, read where they are."""
