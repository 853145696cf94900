"""Reads that may wait: which tensors, for how long, and the rows that wait for their results."""
