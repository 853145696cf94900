"""Runs of two trainings: the settings in which they differ rightly, right pairs, and how a verdict is judged."""
