"""Modules in the frameworks' profilers."""
