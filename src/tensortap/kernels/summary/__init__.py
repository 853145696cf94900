"""Tensor to summary."""
