"""Checks every summary while a run is recorded: for the birth of a NaN or Inf, and for the loss.

The rules are those of `tensortap.health`. -Inf in activations does not count: masks are written that way. The first
non-finite record of a step is the birth, because its sources came before it. There is no birth if the step began with
non-finite parameters, or if the model was given a non-finite input. Non-finite float16 gradients may be an overflow of
loss scaling, which a gradient scaler undoes: `may_be_scaling` recognises them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tensortap.core.operator_paths import parse_operator
from tensortap.core.records import Key, Summary, display_name
from tensortap.errors import UsageError

__all__ = ["Alarm", "NonfiniteRecord", "birth_among", "may_be_scaling", "parse_loss"]

_ACTIVATIONS = ("input", "output")


class NonfiniteRecord(NamedTuple):
    """A record with NaN or Inf."""

    key: Key
    seq: int
    cls: str
    dtype: str
    nan: int
    posinf: int
    neginf: int
    elements: int
    operator: str = ""
    """The first operator of its module that had it, in words, if operators are recorded."""

    @property
    def counts(self) -> bool:
        """Whether the record is wrong: it is neither a mask nor part of an evaluation.

        A NaN in an operator alone is not wrong: code may compute a logarithm of zero, and leave it out afterwards.
        """
        is_mask = not self.nan and not self.posinf and self.key.kind in _ACTIVATIONS
        return not is_mask and self.key.phase != "eval" and self.key.kind != "operator"

    def __str__(self) -> str:
        key = self.key
        counts = f"it has {self.nan:,} NaN and {self.posinf + self.neginf:,} Inf among {self.elements:,} elements"
        what = f"{key.kind} {key.path} of {display_name(key.module)} ({self.cls}) in step {key.step}"
        if key.kind == "input":
            return f"NaN or Inf is born in code that runs before {display_name(key.module)}: {what} has it; {counts}"
        first = f"; the first operator with it is {self.operator}" if self.operator else ""
        return f"NaN or Inf is born in {what}: {counts}{first}"


class Alarm:
    """Collects non-finite records and losses, on any thread. `loss` is a module and a path."""

    def __init__(self, loss: tuple[str, str] | None = None) -> None:
        self._loss = loss
        self._lock = threading.Lock()
        self._nonfinite: list[NonfiniteRecord] = []
        self._losses: list[tuple[int, float]] = []

    def saw(self, key: Key, seq: int, cls: str, dtype: str, summary: Summary) -> None:
        """Check one record. This runs for every tensor in host memory."""
        if summary.nan or summary.posinf or summary.neginf:
            counts = summary.nan, summary.posinf, summary.neginf, summary.elements
            with self._lock:
                self._nonfinite.append(NonfiniteRecord(key, seq, cls, dtype, *counts))
        if self._loss is not None and self._is_loss(key.module, key.kind, key.path) and summary.elements == 1:
            self._add_loss(key.step, summary.mean, summary.nan + summary.posinf + summary.neginf)

    def saw_columns(self, columns: Mapping[str, Any]) -> None:
        """Check many records of a device, as columns of the index."""
        bad = np.sum([np.asarray(columns[name]) for name in ("nan", "posinf", "neginf")], axis=0)
        for row in np.flatnonzero(bad).tolist():
            key = Key(*(columns[name][row] for name in Key._fields))
            nan, posinf, neginf, elements = (
                int(columns[name][row]) for name in ("nan", "posinf", "neginf", "elements")
            )
            names = columns["seq"][row], columns["cls"][row], columns["dtype"][row]
            with self._lock:
                self._nonfinite.append(NonfiniteRecord(key, *names, nan, posinf, neginf, elements))
        if self._loss is None:
            return
        for row, place in enumerate(zip(columns["module"], columns["kind"], columns["path"], strict=True)):
            if self._is_loss(*place) and columns["elements"][row] == 1:
                self._add_loss(columns["step"][row], float(columns["mean"][row]), int(bad[row]))

    def take(self, last: int) -> list[NonfiniteRecord]:
        """Return and forget the non-finite records up to a step."""
        with self._lock:
            taken = [each for each in self._nonfinite if each.key.step <= last]
            self._nonfinite = [each for each in self._nonfinite if each.key.step > last]
        return taken

    def take_losses(self, last: int) -> dict[int, float]:
        """Return and forget the losses up to a step: the mean over its micro steps."""
        with self._lock:
            taken = [each for each in self._losses if each[0] <= last]
            self._losses = [each for each in self._losses if each[0] > last]
        steps = dict.fromkeys(step for step, _ in taken)
        return {at: float(np.mean([value for step, value in taken if step == at])) for at in sorted(steps)}

    def add_loss(self, step: int, value: float) -> None:
        """Take note of a loss that the program itself gave."""
        self._add_loss(step, value, 0)

    def _is_loss(self, module: str, kind: str, path: str) -> bool:
        return kind == "output" and self._loss is not None and module == self._loss[0] and self._loss[1] in ("", path)

    def _add_loss(self, step: int, value: float, nonfinite: int) -> None:
        with self._lock:
            self._losses.append((step, float("nan") if nonfinite else float(value)))


def birth_among(records: Iterable[NonfiniteRecord]) -> NonfiniteRecord | None:
    """Return the record of one step in which NaN or Inf was born; None if it came from outside or from before."""
    records = list(records)
    found = sorted((each for each in records if each.counts), key=lambda each: each.seq)
    if not found or any(each.key.kind in ("param", "buffer") and each.key.call == 0 for each in found):
        return None
    forward = [each for each in found if each.key.phase == "forward"]
    first = (forward or found)[0]
    if first.key.kind == "input" and first.key.module == "":
        return None
    operator = _first_operator(records, first)
    return first._replace(operator=operator) if operator else first


def _first_operator(records: Iterable[NonfiniteRecord], birth: NonfiniteRecord) -> str:
    """Return the first operator with NaN or Inf in the call of the birth; empty if none was recorded."""
    call = birth.key._replace(kind="operator", path="")
    inside = [each for each in records if each.key._replace(path="") == call and each.seq < birth.seq]
    first = min(inside, key=lambda each: each.seq, default=None)
    return "" if first is None else parse_operator(first.key.path).in_words


def may_be_scaling(records: Iterable[NonfiniteRecord], birth: NonfiniteRecord) -> bool:
    """Return whether a gradient scaler may have caused the birth, and left the step out."""
    return birth.key.phase != "forward" and any(each.dtype == "float16" for each in records)


def parse_loss(text: Any) -> tuple[str, str]:
    """Return the module and path of `loss=`.

    >>> parse_loss("(root):loss"), parse_loss("criterion")
    (('', 'loss'), ('criterion', ''))
    """
    if not isinstance(text, str) or not text:
        raise UsageError(f'loss: {text!r} is not the output of a module, like "(root):loss" or "criterion"')
    module, _, path = text.partition(":")
    return "" if module == "(root)" else module, path
