"""Measure how far apart each pair is."""
