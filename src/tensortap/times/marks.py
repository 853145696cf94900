"""Names of spans: those that `tensortap.annotate` writes, and those of frameworks that attribution uses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "AFTER",
    "ANNOTATING",
    "BEFORE",
    "CALIBRATION",
    "IDLE",
    "NO_MODULE",
    "PHASES",
    "SpanKind",
    "SpanMeaning",
    "meaning_of",
]

BEFORE = "tensortap before"
"""Covers the work of a hook up to the module span that follows it."""
AFTER = "tensortap after"
"""Covers the work of a hook since the module span that ended right before it."""
CALIBRATION = "tensortap calibration"
"""Encloses a few calls of a module that does nothing; they measure the cost of annotating a call."""
IDLE = "tensortap (idle)"
"""The span of one call inside a calibration."""

PHASES = ("forward", "backward", "recompute", "other")
ANNOTATING = "(annotating)"
NO_MODULE = "(no module)"

_MODULE = re.compile(r"(forward|backward|recompute) (.+) \(([^()]+)\)")
_MOMENT = re.compile(r"backward (begins|ends) (.+) \(([^()]+)\)")
_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#(.+)\.\1")
_PADDLE_NODE = re.compile(r"Global_(\w+)")
_PADDLE_CREATES = re.compile(r"(\w+) node_creation")


class SpanKind(IntEnum):
    """The role of a span."""

    MODULE = 0
    BEFORE = 1
    AFTER = 2
    CALIBRATION = 3
    NODE = 4
    """A graph node that backward runs."""
    NAMED = 5
    """Has its own row: the optimizer, a data loader, AccumulateGrad."""
    STEP = 6
    """A step of the profiler."""
    BEGINS = 7
    """Gradient has reached the outputs of a module (paddle)."""
    ENDS = 8
    """The gradients of the module's inputs are complete (paddle)."""
    CREATES = 9
    """Forward creates a graph node (paddle)."""
    BACKWARD = 10
    """A whole call of backward (paddle)."""
    IDLE = 11
    """A call inside a calibration."""


@dataclass(frozen=True, slots=True)
class SpanMeaning:
    """The parsed name of a span."""

    kind: SpanKind
    phase: str = "other"
    module: str = ""
    """The module's name. For a graph node and its creation, the type of the node."""
    cls: str = ""


def meaning_of(name: str) -> SpanMeaning | None:
    """Return the meaning of a span's name; None for an operator or any other name.

    >>> meaning_of("forward layers.0.fc1 (Linear)")
    SpanMeaning(kind=<SpanKind.MODULE: 0>, phase='forward', module='layers.0.fc1', cls='Linear')
    >>> meaning_of("Optimizer.step#AdamW.step").module
    '(optimizer)'
    """
    if (plain := _PLAIN.get(name)) is not None:
        return plain
    if name.startswith(("forward ", "backward ", "recompute ")):
        return _of_module(name)
    if name.startswith(_NODE):
        if name.endswith("AccumulateGrad"):
            return _ACCUMULATES
        return SpanMeaning(SpanKind.NODE, "backward", name[len(_NODE) :])
    if found := _OPTIMIZER.fullmatch(name):
        return SpanMeaning(SpanKind.NAMED, "other", "(optimizer)" if found[1] == "step" else "(zero_grad)", found[2])
    if name.startswith("enumerate(DataLoader)#"):
        return SpanMeaning(SpanKind.NAMED, "other", "(data loader)", "DataLoader")
    if name.startswith(("ProfilerStep#", "ProfileStep#")):
        return SpanMeaning(SpanKind.STEP)
    return _of_paddle(name)


_ACCUMULATES = SpanMeaning(SpanKind.NAMED, "backward", "(AccumulateGrad)", "AccumulateGrad")
_PLAIN = {
    BEFORE: SpanMeaning(SpanKind.BEFORE),
    AFTER: SpanMeaning(SpanKind.AFTER),
    CALIBRATION: SpanMeaning(SpanKind.CALIBRATION),
    IDLE: SpanMeaning(SpanKind.IDLE),
    "Gradient Backward": SpanMeaning(SpanKind.BACKWARD, "backward"),
    "Optimization Step": SpanMeaning(SpanKind.NAMED, "other", "(optimizer)", "Optimizer"),
    "Global_GradNodeAccumulation": _ACCUMULATES,
}


def _of_module(name: str) -> SpanMeaning | None:
    if found := _MOMENT.fullmatch(name):
        kind = SpanKind.BEGINS if found[1] == "begins" else SpanKind.ENDS
        return SpanMeaning(kind, "backward", found[2], found[3])
    if found := _MODULE.fullmatch(name):
        return SpanMeaning(SpanKind.MODULE, found[1], found[2], found[3])
    return None


def _of_paddle(name: str) -> SpanMeaning | None:
    if found := _PADDLE_NODE.fullmatch(name):
        return SpanMeaning(SpanKind.NODE, "backward", _plain_type(found[1].removesuffix("GradNode")))
    if found := _PADDLE_CREATES.fullmatch(name):
        return SpanMeaning(SpanKind.CREATES, "forward", _plain_type(found[1]))
    return None


def _plain_type(name: str) -> str:
    """Return one word for creation and node: `layer_norm` creates a `LayerNormGradNode`, `add_` an `AddGradNode`."""
    return name.replace("_", "").lower()
