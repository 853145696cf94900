"""The cause of a finding, decided here once. `core.causes` has the list and the wording."""

from __future__ import annotations

from tensortap.compare.judge.attribution import Attribution
from tensortap.compare.judge.structure import Structure
from tensortap.core.causes import Cause

__all__ = ["cause_of", "is_within"]


def cause_of(
    row: int,
    attribution: Attribution,
    container: str | None,
    structure: Structure,
    *,
    isolated: bool = False,
    checkpoints: bool = False,
) -> Cause:
    """Decide the cause of a wrong row.

    container: the module to blame, if it is another than the record's own.
    isolated: every module ran on the reference's own inputs.
    checkpoints: both sides are checkpoints, which hold values and nothing that computes them.
    """
    kind, module = structure.kind[row], structure.module[row]
    if checkpoints and not isolated:
        return Cause.CHECKPOINT
    if kind in ("param", "buffer"):
        return _cause_of_state(kind, at_start=structure.is_at_start(row), after_step=structure.number[row] > 0)
    if kind == "input" and container is None:
        return Cause.INPUT if isolated or not module else Cause.UNRECORDED_INPUT
    if kind == "input":
        return Cause.HANDED_ON if attribution.hands_on else Cause.CONTAINER_CODE
    if kind == "output":
        return Cause.OUTPUT if attribution.inputs_matched else Cause.OUTPUT_ON_UNKNOWN_INPUTS
    if kind == "step_grad":
        return Cause.STEP_GRADIENT
    if kind == "param_grad":
        return Cause.PARAMETER_GRADIENT
    if attribution.from_outside:
        return Cause.LOSS if isolated or structure.has_forward(row) else Cause.UNRECORDED_GRADIENT
    between = container is not None and is_within(module, container)
    return Cause.CONTAINER_BACKWARD if between else Cause.SENT_GRADIENT


def _cause_of_state(kind: str, *, at_start: bool, after_step: bool) -> Cause:
    if kind == "param":
        if after_step:
            return Cause.OPTIMIZER
        return Cause.PARAMETER_AT_START if at_start else Cause.PARAMETER_CHANGED
    if after_step:
        return Cause.BUFFER
    return Cause.BUFFER_AT_START if at_start else Cause.BUFFER_CHANGED


def is_within(module: str, container: str) -> bool:
    """Whether a module is a part of another one.

    >>> is_within("block.fc", "block"), is_within("block", "block"), is_within("block", "")
    (True, False, True)
    """
    return module.startswith(f"{container}.") if container else bool(module)
