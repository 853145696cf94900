"""The parameters and buffers that a module is replayed with: the run's own where it has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensortap.capture.tree import Tree
from tensortap.core.records import Key, Record
from tensortap.errors import UsageError
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import ValueWriting
from tensortap.kernels import summarize
from tensortap.replay.excerpt import Excerpt

__all__ = ["Home", "homes_of", "restore", "state_of"]

Home = tuple[str, str, str]
"""Module, kind and name."""


def state_of(framework: Framework, module: Any) -> Iterator[tuple[str, str, str, Any]]:
    """(module, kind, name, tensor) of all parameters and buffers, a module's name as seen from this one."""
    for site in Tree(framework, module).sites:
        for kind, listed in (("param", framework.parameters), ("buffer", framework.buffers)):
            for name, tensor in listed(site.owner):
                yield site.name, kind, name, tensor


def homes_of(framework: Framework, root: Any, module: Any) -> list[Home]:
    """Where the run has each of the module's parameters and buffers: a shared one under its first name in the model."""
    first: dict[int, Home] = {}
    for owner, kind, name, tensor in state_of(framework, root):
        first.setdefault(id(tensor), (owner, kind, name))
    return [first[id(tensor)] for *_, tensor in state_of(framework, module)]


def restore(framework: Framework, module: Any, homes: Sequence[Home], part: Excerpt, built_by: str) -> list[str]:
    """Put what the run has into the module; what a reader should know of it."""
    writing: ValueWriting = require(framework, ValueWriting, "replaying recorded calls")
    filled, alike, unlike, unknown = [], [], [], []
    for (*_, tensor), (owner, kind, name) in zip(state_of(framework, module), homes, strict=True):
        full = f"{owner}.{name}" if owner else name
        record = part.run.get(Key(part.step, 0, "state", owner, 0, kind, name), part.rank)
        if record is None:
            unknown.append(full)
            continue
        _check_shape(full, record, tensor)
        if record.location is not None:
            writing.fill(tensor, part.run.load(record), recast=True)
            filled.append(full)
        elif summarize(framework.host(tensor)).digest == record.summary.digest:
            alike.append(full)
        else:
            unlike.append(full)
    return list(_told(filled, alike, unlike, unknown, built_by, part.step))


def _told(
    filled: Sequence[str], alike: Sequence[str], unlike: Sequence[str], unknown: Sequence[str], built_by: str, step: int
) -> Iterator[str]:
    if filled:
        yield f"parameters and buffers are the run's own, as they were before step {step}: {_few(filled)}"
    if alike:
        yield f"of {built_by}, and bit for bit what the run had: {_few(alike)}"
    if unlike:
        yield (
            f"of {built_by}, and NOT what the run had, of which only summaries were kept: {_few(unlike)}; load the "
            'same weights there, or capture with keep="tensors" for this module'
        )
    if unknown:
        yield (
            f"of {built_by}, not recorded by the run: {_few(unknown)}; capture with "
            'kinds=(..., "param", "buffer") to be sure that they are the same'
        )


def _check_shape(name: str, record: Record, tensor: Any) -> None:
    shape = tuple(int(size) for size in tensor.shape)
    if shape != tuple(record.shape):
        raise UsageError(f"{name} has the shape {shape} in the model and {tuple(record.shape)} in the run")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
