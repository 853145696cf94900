"""Writes a run to disk while it is recorded."""
