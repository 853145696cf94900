"""Helpers that tap a model in a test and read the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tensortap as tt
from support.zoo import batch, loss_of
from tensortap.core.records import Key

ALL_KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "buffer")


def tapped(model: torch.nn.Module, path: Path, *inputs: torch.Tensor, steps: int = 1, **options: Any) -> Any:
    """Train a few steps under a tap that keeps everything; the run and the closed tap."""
    options = {"keep": "tensors", "kinds": ALL_KINDS} | options
    inputs = inputs or (batch(),)
    with tt.capture(model, path, **options) as tap:
        for _ in range(steps):
            loss_of(model(*inputs)).backward()
            tap.step()
    return tt.open(path), tap


def values(run: Any, kind: str, step: int | None = 0) -> dict[tuple[str, int, str], Any]:
    """(module, call, path) → array, of one kind."""
    found = run.records(kind=kind) if step is None else run.records(kind=kind, step=step)
    return {(r.key.module, r.key.call, r.key.path): run.load(r) for r in found}


def coverage(tap: Any) -> dict[str, tuple[str, str]]:
    return {row.module: (row.status, row.reason) for row in tap.coverage}


def everything(run: Any) -> dict[Key, tuple[Any, ...]]:
    """Return everything that a run records of each tensor, to compare runs bit for bit."""
    return {r.key: (r.dtype, r.shape, r.summary.digest) for r in run}


def hooks_on(model: torch.nn.Module) -> int:
    """How many hooks of any sort are on a model and its parameters."""
    count = 0
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            count += len(getattr(module, name))
        count += sum(len(getattr(module, n)) for n in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"))
    for parameter in model.parameters():
        count += len(parameter._backward_hooks or ())
        count += len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
    return count
