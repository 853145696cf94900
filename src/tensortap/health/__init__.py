"""Examine one run without a reference."""
