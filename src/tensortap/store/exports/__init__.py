"""Exports of a run to other formats, one tensor at a time."""

from __future__ import annotations
