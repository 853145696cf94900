"""Compares the values of a recomputation with those of the first forward, by a few elements of each tensor.

Activation checkpointing runs a region again in backward. If the random state or a mode such as autocast was lost, the
region then computes other values, and the gradients belong to a forward that never ran. No record shows it, because
values of a recomputation are not recorded. In the first recorded step, a sample of every input and output is kept until
the step ends. In the second and in every 64th step, only modules that were recomputed before are sampled. The first
difference of a region becomes the loop fact `recomputation` of the module whose code made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.capture.modules.tree import Site
from tensortap.capture.watching.clock import Clock, ModuleCall
from tensortap.capture.watching.flatten import Opened
from tensortap.core import dtypes
from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.base import Framework
from tensortap.kernels.summary.probe import probe

__all__ = ["Recomputations"]

WriteFact = Callable[[int, str, str, Mapping[str, Any]], None]
Array = npt.NDArray[Any]

_SAMPLED_EVERY = 64
_EPSILONS = 64.0
"""Kernels that sum in any order may differ by this much; a lost mask of dropout differs by far more."""
_SHORT = 2.0**-4
"""The same in bfloat16, float16 and shorter dtypes."""


class Recomputations:
    """Samples calls, and compares the samples of a call with those of its recomputation."""

    def __init__(self, framework: Framework, clock: Clock, write: WriteFact) -> None:
        self._framework = framework
        self._clock = clock
        self._write = write
        self._recomputed: set[str] = set()
        """Modules that were recomputed in a step before."""
        self._steps = 0
        """Recorded steps so far."""
        self._waiting: list[tuple[ModuleCall, str, str, str, Any, Any]] = []
        """Call, kind, path, the module whose code made it, and two samples on a device, in the order of time."""
        self._reported: set[str] = set()

    @property
    def samples(self) -> bool:
        """Whether this step is sampled. Not all are: the samples take longer than the records."""
        return self._steps < 2 or self._steps % _SAMPLED_EVERY == 0

    def seen(self, site: Site, call: ModuleCall, kind: str, opened: Opened) -> None:
        """Sample the inputs or outputs of a call; compare them if it is a recomputation."""
        if not self.samples:
            return
        if call.recomputed:
            self._recomputed.add(site.name)
            first = call.repeats
            if first is not None and first.samples:
                self._compare(site, call, first, kind, opened)
        elif not self._steps or site.name in self._recomputed:
            samples = dict(call.samples)
            for path, tensor in opened.tensors:
                if (sample := self._sample(tensor)) is not None:
                    samples[kind, path] = sample
            call.samples = samples
            if kind == "input" and (calling := self._clock.calling) is not None:
                call.caller = calling.module

    def end_step(self, step: int) -> None:
        """Write the first difference of each recomputed region."""
        self._steps += 1
        order, found = -1, False
        for call, kind, path, blamed, ours, theirs in self._waiting:
            if kind == "input":  # regions are recomputed in reverse, and the calls of one begin in order
                found, order = found and call.order >= order, call.order
            if found or not (off := self._difference(ours, theirs)):
                continue
            found = True
            if blamed not in self._reported:
                self._reported.add(blamed)
                value = {"module": call.module, "micro": call.micro, "call": call.number}
                self._write(step, "recomputation", blamed, {**value, "kind": kind, "path": path, "rel_l2": off})
        self._waiting.clear()

    def _compare(self, site: Site, call: ModuleCall, first: ModuleCall, kind: str, opened: Opened) -> None:
        blamed = site.name
        if kind == "input":
            # A region that is a part of a module's code runs again without a call of that module.
            calling = self._clock.calling
            blamed = calling.module if calling is not None else first.caller or site.name
        for path, tensor in opened.tensors:
            if (before := first.samples.get((kind, path))) is not None and (now := self._sample(tensor)) is not None:
                self._waiting.append((call, kind, path, blamed, before, now))

    def _sample(self, tensor: Any) -> Any | None:
        """Return a few elements: of a tensor in host memory as an array, else as a small tensor on its device."""
        framework = self._framework
        with suppress_errors():
            if framework.unreadable(tensor):
                return None
            if framework.device_reader(tensor) is not None:
                sampled = getattr(framework, "sampled", None)
                return None if sampled is None else sampled(tensor)
            array = framework.host(tensor)
            return np.frombuffer(probe(array), array.dtype) if array.dtype.kind not in "biu" else None
        return None

    def _difference(self, ours: Any, theirs: Any) -> float:
        """Return the distance of two samples; 0 if it is within rounding."""
        with suppress_errors():
            left, right = (
                each if isinstance(each, np.ndarray) else self._framework.host(each) for each in (ours, theirs)
            )
            if left.dtype != right.dtype or left.shape != right.shape:
                return 1.0
            return _relative(left, right)
        return 0.0


def _relative(left: Array, right: Array) -> float:
    with np.errstate(all="ignore"):
        wide = [np.nan_to_num(each.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0) for each in (left, right)]
        size = float(np.linalg.norm(wide[0])) or 1.0
        off = float(np.linalg.norm(wide[1] - wide[0])) / size
    long = dtypes.name_of(left.dtype) in ("float32", "float64")
    allowed = _EPSILONS * float(np.finfo(np.float32).eps) if long else _SHORT
    return off if off > allowed else 0.0
