"""A run in the formats that others read: one file a format, all of them fed one tensor at a time."""

from __future__ import annotations
