"""Reads CUDA tensors on their device."""
