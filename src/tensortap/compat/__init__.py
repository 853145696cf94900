"""Interfaces that existing scripts use, as thin layers over capture, store and compare."""
