"""Recordings that stopped early, so that a part of the other run has nothing to be compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensortap.compare.matching import Matched

__all__ = ["stopped_recordings"]


def stopped_recordings(matched: Matched) -> str:
    """Name each side whose recording failed while the other one has records that it lacks; empty if there is none.

    >>> stopped_recordings(matched)                                            # doctest: +SKIP
    'the recording of the candidate stopped early (CUDA error: out of memory)'
    """
    alignment = matched.alignment
    sides = (
        ("reference", matched.reference.run.failure, alignment.only_candidate),
        ("candidate", matched.candidate.run.failure, alignment.only_reference),
    )
    return ", and ".join(
        f"the recording of the {side} stopped early ({reason.rstrip('.')})"
        for side, reason, lacking in sides
        if reason and len(lacking)
    )
