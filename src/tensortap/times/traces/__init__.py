"""Read profiles into a timeline."""
