"""Runs that are not whole, so that a part of the other run has nothing to be compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensortap.compare.matched import Matched
    from tensortap.store import Run

__all__ = ["incomplete_runs"]


def incomplete_runs(matched: Matched) -> str:
    """Name each side whose recording failed, or whose tensors cannot be read, while the other side has records that it
    lacks; return an empty text if there is none.

    >>> incomplete_runs(matched)                                               # doctest: +SKIP
    'the recording of the candidate stopped early (CUDA error: out of memory)'
    """
    alignment = matched.alignment
    sides = (
        ("reference", matched.reference.run, alignment.only_candidate),
        ("candidate", matched.candidate.run, alignment.only_reference),
    )
    return ", and ".join(reason for side, run, lacking in sides if len(lacking) for reason in _reasons(side, run))


def _reasons(side: str, run: Run) -> Iterator[str]:
    if run.failure:
        yield f"the recording of the {side} stopped early ({run.failure.rstrip('.')})"
    if unreadable := run.unreadable:
        first = unreadable[0] if len(unreadable) == 1 else f"{unreadable[0]}, ..."
        yield f"{len(unreadable):,} tensor{'s' * (len(unreadable) > 1)} of the {side} cannot be read ({first})"
