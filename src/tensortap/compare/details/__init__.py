"""Look at single pairs and records element by element."""
