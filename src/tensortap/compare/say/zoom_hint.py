"""The command that names the line inside the module of a verdict, where the reference kept the module's inputs."""

from __future__ import annotations

from tensortap.core.causes import OUTSIDE_CAUSES, PARAMETER_CAUSES
from tensortap.core.records import Comparison, display_name
from tensortap.store import Run

__all__ = ["zoom_hint"]


def zoom_hint(comparison: Comparison, reference: Run, candidate: str | None = None) -> list[str]:
    """Return a note with the command, or nothing if it would not run.

    candidate: the candidate's run in the command, if it is not the one that was compared; empty for none.
    """
    first = comparison.first
    if first is None or comparison.verdict != "diverged" or first.key.phase not in ("forward", "backward"):
        return []
    if first.cause in OUTSIDE_CAUSES | PARAMETER_CAUSES:  # no code of a module made it
        return []
    if len({side.get("framework") for side in comparison.info.values()}) != 1:
        return []
    kept = reference.records(rank=first.rank, module={first.module}, step=first.key.step, kind="input", kept=True)
    if not any(record.location is not None for record in kept):
        return []
    sides = " ".join(filter(None, (comparison.reference, comparison.candidate if candidate is None else candidate)))
    renamed = f" --candidate-module '{display_name(first.counterpart)}'" if first.counterpart else ""
    return [
        f"to find the line: tensortap zoom {sides} --module '{display_name(first.module)}'{renamed} "
        "--model FILE.py:FUNC --candidate-model FILE.py:FUNC"
    ]
