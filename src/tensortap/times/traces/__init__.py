"""Readers of profiles: a live profiler or an exported trace becomes a timeline."""
