"""Inspect single pairs and records element by element."""
