"""Pair the records of two runs."""
