"""Judge whole steps at once: what their records have in common is worked out in columns, and once for equal steps."""
