"""Families and mistakes that were written after the rules were changed for the sixth trial, and run once."""
