"""Annotation of modules in the frameworks' profilers, and times by module."""
