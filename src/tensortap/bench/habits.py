"""The habit that a tap is compared with: np.save of each leaf module's output, and of its gradient, in hooks."""
# mypy: allow-untyped-calls

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensortap.bench.memory import Meter
from tensortap.bench.steps import Block, timed
from tensortap.bench.trainer import Trainer, is_leaf

__all__ = ["saved"]


def saved(trainer: Trainer, steps: int, folder: Path) -> Block:
    """A file for each tensor, removed once it is written, so that no disk is too small; removing is not counted."""
    folder.mkdir(parents=True)
    saver = _Saver(folder)
    meter = Meter(trainer.device)
    try:
        with ExitStack() as undo:
            for name, module in trainer.model.named_modules():
                if is_leaf(name, module):
                    undo.callback(module.register_forward_hook(saver.hook).remove)
            seconds, each = timed(trainer, steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stats = {"bytes": saver.written, "files": saver.files}
    removing = saver.removing / steps
    return Block(steps, seconds - removing, each - removing, meter.read(), stats)


class _Saver:
    """Saves what the hooks hand to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.written = 0
        self.files = 0
        self.removing = 0.0

    def hook(self, module: Any, args: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            self._save(tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._save)

    def _save(self, tensor: torch.Tensor) -> None:
        path = self._folder / f"{self.files}.npy"
        # NumPy has no bfloat16: whoever saves such a tensor makes it a float32 first.
        np.save(path, (tensor.detach().float() if tensor.is_floating_point() else tensor).cpu().numpy())
        self.files += 1
        self.written += path.stat().st_size
        started = time.perf_counter()
        path.unlink()
        self.removing += time.perf_counter() - started
