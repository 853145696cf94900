"""Output as files for programs and people."""
