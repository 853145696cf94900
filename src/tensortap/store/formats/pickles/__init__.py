"""Pickles, read as data. No code in them runs."""
