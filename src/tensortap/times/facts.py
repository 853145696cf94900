"""Profiles and their rows as plain data for reports and programs. docs/profiler.md documents the keys."""

from __future__ import annotations

from typing import Any

from tensortap.times.ledger import TimeLedger
from tensortap.times.table import Row, Table

__all__ = ["FORMAT", "VERSION", "facts_of", "head_of"]

FORMAT = "tensortap-times"
VERSION = 1


def facts_of(ledger: TimeLedger, chosen: Table) -> dict[str, Any]:
    """Return the shown part of one profile. Times in microseconds, memory in bytes, shares from 0 to 1."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **head_of(ledger),
        "by": chosen.by,
        "sort": chosen.sort,
        "rows": [_row_facts(row) for row in chosen.rows],
        "rows_left_out": chosen.left_out,
        "cpu_own_left_out": chosen.rest,
    }


def head_of(ledger: TimeLedger) -> dict[str, Any]:
    """Return the figures of a profile as a whole."""
    return {
        "framework": ledger.framework,
        "backward_calls": ledger.backward_calls,
        "span": ledger.span / 1000,
        "steps": ledger.steps,
        "cpu_own": sum(entry.host for entry in ledger.entries) / 1000,
        "device": {
            "kernels": ledger.kernels,
            "time": ledger.kernel_time / 1000,
            "busy": ledger.device_busy / 1000,
            "unlinked": ledger.unlinked,
        },
    }


def _row_facts(row: Row) -> dict[str, Any]:
    return {
        "module": row.module,
        "class": row.cls,
        "phase": row.phase,
        "calls": row.calls,
        "cpu_own": row.own,
        "cpu_own_share": row.own_share,
        "cpu_total": row.total,
        "cpu_total_share": row.total_share,
        "device_own": row.device_own,
        "device_own_share": row.device_own_share,
        "device_total": row.device_total,
        "device_total_share": row.device_total_share,
        "memory": row.memory,
        "device_memory": row.device_memory,
    }
