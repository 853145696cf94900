""".npz archives."""
