"""Restores the parameters and buffers of the replayed module from the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensortap.capture.modules.tree import Tree
from tensortap.core.records import Key, Record
from tensortap.errors import UsageError
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import ValueWriting
from tensortap.kernels import summarize
from tensortap.replay.recorded_call import RecordedCall

__all__ = ["StateName", "find_state_names", "restore", "state_of"]

StateName = tuple[str, str, str]
"""Module, kind and name under which the run records a parameter or buffer."""


def state_of(framework: Framework, module: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (module, kind, name, tensor) of all parameters and buffers, with module names relative to this module."""
    for site in Tree(framework, module).sites:
        for kind, listed in (("param", framework.parameters), ("buffer", framework.buffers)):
            for name, tensor in listed(site.owner):
                yield site.name, kind, name, tensor


def find_state_names(framework: Framework, root: Any, module: Any) -> list[StateName]:
    """Return the name of each of the module's parameters and buffers; a shared one has its first name in the model."""
    first: dict[int, StateName] = {}
    for owner, kind, name, tensor in state_of(framework, root):
        first.setdefault(id(tensor), (owner, kind, name))
    return [first[id(tensor)] for *_, tensor in state_of(framework, module)]


def restore(
    framework: Framework, module: Any, names: Sequence[StateName], recorded: RecordedCall, built_by: str
) -> list[str]:
    """Copy the recorded parameters and buffers into the module; return notes on the origin of each."""
    writing: ValueWriting = require(framework, ValueWriting, "replaying recorded calls")
    restored, equal, different, unknown = [], [], [], []
    for (*_, tensor), (owner, kind, name) in zip(state_of(framework, module), names, strict=True):
        full = f"{owner}.{name}" if owner else name
        record = recorded.run.get(Key(recorded.step, 0, "state", owner, 0, kind, name), recorded.rank)
        if record is None:
            unknown.append(full)
            continue
        _check_shape(full, record, tensor)
        if record.location is not None:
            writing.fill(tensor, recorded.run.load(record), recast=True)
            restored.append(full)
        elif summarize(framework.host(tensor)).digest == record.summary.digest:
            equal.append(full)
        else:
            different.append(full)
    return list(_notes(restored, equal, different, unknown, built_by, recorded.step))


def _notes(
    restored: Sequence[str],
    equal: Sequence[str],
    different: Sequence[str],
    unknown: Sequence[str],
    built_by: str,
    step: int,
) -> Iterator[str]:
    if restored:
        yield f"parameters and buffers from the run, as they were before step {step}: {_few(restored)}"
    if equal:
        yield f"parameters and buffers from {built_by}, bit for bit equal to the run's: {_few(equal)}"
    if different:
        yield (
            f"parameters and buffers from {built_by}, NOT equal to the run's, which kept only summaries: "
            f'{_few(different)}; load the same weights there, or capture with keep="tensors" for their modules'
        )
    if unknown:
        yield (
            f"parameters and buffers from {built_by}, not recorded by the run: {_few(unknown)}; capture with "
            'kinds=(..., "param", "buffer") to make sure that they are equal'
        )


def _check_shape(name: str, record: Record, tensor: Any) -> None:
    shape = tuple(int(size) for size in tensor.shape)
    if shape != tuple(record.shape):
        raise UsageError(f"{name} has the shape {shape} in the model and {tuple(record.shape)} in the run")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
