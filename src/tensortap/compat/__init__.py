"""The interfaces that users already have in their scripts, as thin layers over capture, store and compare."""
