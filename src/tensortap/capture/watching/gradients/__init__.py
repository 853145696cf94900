"""Gradients with respect to a module's inputs, taken apart without touching the graph."""
