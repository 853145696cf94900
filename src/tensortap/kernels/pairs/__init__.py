"""Differences of pairs of tensors."""
