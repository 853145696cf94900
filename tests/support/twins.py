"""Runs of the same model in torch and in paddle, and what to feed them with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import torch

import tensortap as tt
from support import twins_paddle, twins_torch
from tensortap.core.records import Comparison

KINDS = ("input", "output", "grad_output", "param", "param_grad", "buffer")

_SHAPES: dict[str, tuple[int, ...]] = {
    "Mlp": (4, 5, 6),
    "Cnn": (4, 3, 12, 12),
    "ResNet": (4, 3, 10, 10),
    "Packed": (3, 5, 6),
    "PackedByHand": (3, 5, 6),
    "SequenceFirst": (3, 5, 6),
    "AutoEncoder": (2, 3, 8, 8),
}
"""The others take tokens."""
NAMES = (*_SHAPES, "Encoder", "Decoder", "Recurrent", "Tied")


def models(name: str) -> tuple[Any, Any]:
    """The model in torch and in paddle, each with weights of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ours = getattr(twins_torch, name.removesuffix("ByHand"))()
    paddle.seed(1)
    return ours, getattr(twins_paddle, name)()


def batch(name: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    if name in _SHAPES:
        return rng.standard_normal(_SHAPES[name]).astype(np.float32)
    return rng.integers(0, 20, (3, 7))


def train(model: Any, data: np.ndarray[Any, Any], path: Path, steps: int = 1, **options: Any) -> Path:
    """Forward and backward under a tap. No element of the output has the same weight in the loss."""
    torches = isinstance(model, torch.nn.Module)
    framework: Any = torch if torches else paddle
    given = torch.from_numpy(data) if torches else paddle.to_tensor(data)
    with tt.capture(model, path, **({"keep": "tensors", "kinds": KINDS} | options)) as tap:
        for _ in range(steps):
            out = model(given)
            weights = framework.linspace(-1.0, 1.0, out.numel() if torches else out.size).reshape(out.shape)
            (out * weights + 0.3 * out.square()).sum().backward()
            tap.step()
    return path


def compared(
    name: str, folder: Path, change: Callable[[Any], None] | None = None, back: bool = False, **options: Any
) -> Comparison:
    """Both trained on the same batch after a transfer; `change` plants something in paddle's."""
    ours, theirs = models(name)
    report = tt.transfer(ours, theirs)
    assert report.complete, str(report)
    if change is not None:
        change(theirs)
    runs = train(ours, batch(name), folder / "torch"), train(theirs, batch(name), folder / "paddle")
    return tt.compare(*(runs[::-1] if back else runs), **options)
