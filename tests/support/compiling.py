"""Helpers that compile models whole or layer by layer, and compare what taps inside them see with the eager run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from support.tapping import everything

KINDS = ("input", "output", "grad_output", "param_grad")
Step = Callable[[Any], torch.Tensor]
"""Runs a model, compiled or not, and returns the loss."""


def compile_whole(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, **options)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a model has in lists, or else the blocks that it has in sequences."""
    listed = [layer for parent in model.modules() if isinstance(parent, nn.ModuleList) for layer in parent]
    sequences = [parent for parent in model.modules() if isinstance(parent, nn.Sequential)]
    return listed or [block for parent in sequences for block in parent if any(True for _ in block.children())]


def compile_layers(model: nn.Module, **options: Any) -> nn.Module:
    """Compile every layer of a model by itself, in place."""
    for layer in layers_of(model):
        layer.compile(**options)
    return model


def checkpoint_layers(model: nn.Module) -> nn.Module:
    """Let every call of an outermost layer be recomputed in backward, as transformers' layers do it."""
    layers = layers_of(model)
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    for layer in layers:
        if id(layer) not in inner:
            layer.__class__ = _checkpointed(type(layer))
    return model


@cache
def _checkpointed(layer: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(layer.__call__, self, **kwargs), *args, use_reentrant=False)

    return type(layer.__name__, (layer,), {"__call__": call, "__module__": layer.__module__})


def train(model: Any, step: Step, steps: int = 2, micros: int = 1, settled: bool = False, **options: Any) -> Any:
    """Train under a tap in memory, and return the closed tap.

    settled: wait after each step until its summaries are known. Otherwise a busy machine decides in which step the
    trials of deferred reads are evaluated.
    """
    options = {"kinds": KINDS, "on_error": "raise"} | options
    with tt.capture(model, None, **options) as tap:
        for _ in range(steps):
            for _ in range(micros):
                step(model).backward()
            tap.step()
            if settled:
                tap.flush()
    return tap


def untapped_gradients(model: Any, step: Step) -> list[torch.Tensor]:
    """Return loss and gradients of one step without a tap."""
    loss = step(model)
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def differences(eager: Any, inside: Any) -> dict[str, list[str]]:
    """Return how the records of two taps differ: missing, extra, and of other dtype, shape or bits."""
    ours, theirs = everything(eager.run), everything(inside.run)
    assert len(theirs) == len(list(inside.run))
    return {
        "missing": sorted(map(str, ours.keys() - theirs.keys())),
        "extra": sorted(map(str, theirs.keys() - ours.keys())),
        "other": sorted(str(key) for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]),
    }


NONE: dict[str, list[str]] = {"missing": [], "extra": [], "other": []}


def seen_of(tap: Any) -> dict[str, tuple[str, str, int]]:
    return {row.module: (row.status, row.reason, row.calls) for row in tap.coverage}


def graph_breaks() -> int:
    return sum(counters["graph_break"].values())


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])
