"""Tools for one live model: audit, inspect, peek, annotate and transfer."""
