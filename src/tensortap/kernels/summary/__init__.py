"""Summaries of tensors."""
