"""Which of two masks a call lacks: that of a self-attention, which may do without, or that of a cross-attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tensortap.compare.judge.lost_masks import LostMask, innermost_without, outermost_without
from tensortap.core.causes import Cause

CAUSAL, CROSS, PADDING = ((2, 1, 8, 8), 56), ((2, 1, 8, 5), 16), ((2, 5), 2)
"""Masks by shape and number of hidden elements; the last one is the second one, as the model is given it."""


def call(name: str, *children: Any) -> Any:
    found = SimpleNamespace(spot=((0, 0, 0), name, 0), parent=None, children=children)
    for child in children:
        child.parent = found
    return found


def decoder() -> dict[str, Any]:
    """Return the calls of a decoder by name."""
    layers = [call(f"layers.{n}", call(f"layers.{n}.self"), call(f"layers.{n}.cross")) for n in range(2)]
    root = call("model", call("decoder", *layers))
    calls, found = [root], {}
    while calls:
        each = calls.pop()
        found[each.spot[1]] = each
        calls.extend(each.children)
    return found


def lost(calls: dict[str, Any], **masks: Any) -> dict[Any, LostMask]:
    names = {name.replace(".", "_"): name for name in calls}
    return {calls[names[name]].spot: LostMask("mask", Cause.LOST_MASK, content) for name, content in masks.items()}


def test_a_layer_drops_one_mask_and_was_never_given_the_other() -> None:
    calls = decoder()
    masks = lost(
        calls, layers_0=CAUSAL, layers_0_self=CAUSAL, layers_1=CAUSAL, layers_1_self=CAUSAL, layers_1_cross=CROSS
    )
    assert outermost_without(calls["layers.1.cross"], masks) is calls["layers.1.cross"], "its layer was given that mask"
    assert outermost_without(calls["layers.1.self"], masks) is calls["layers.1"]
    assert innermost_without(calls["layers.1"], masks) == [calls["layers.1.self"]]


def test_a_mask_that_no_part_was_given_has_another_shape_outside() -> None:
    calls = decoder()
    inside = {f"layers_{n}{part}": CROSS for n in range(2) for part in ("", "_cross")}
    masks = lost(calls, decoder=PADDING, **inside, layers_0_self=CAUSAL)
    assert outermost_without(calls["layers.0.cross"], masks) is calls["decoder"]
    assert innermost_without(calls["layers.0"], masks) == [calls["layers.0.cross"]], "not the one that does without"
