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

__all__ = ["PATIENCE", "saved"]

PATIENCE = 20.0


def saved(trainer: Trainer, folder: Path, bound: float = PATIENCE) -> Block:
    """One step, a file for each tensor, removed once it is written, so that no disk is too small; removing is not
    counted. After `bound` seconds of saving no more is saved, and the time is what all of it would have taken."""
    folder.mkdir(parents=True)
    saver = _Saver(folder, bound)
    meter = Meter(trainer.device)
    try:
        with ExitStack() as undo:
            for name, module in trainer.model.named_modules():
                if is_leaf(name, module):
                    undo.callback(module.register_forward_hook(saver.hook).remove)
            times = timed(trainer, 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stats = {"bytes": saver.written, "bytes_of_all": saver.met, "files": saver.files}
    seconds, each, launching = map(saver.projected, times)
    return Block(1, seconds, each, launching, meter.read(), stats=stats)


class _Saver:
    """Saves what the hooks hand to it."""

    def __init__(self, folder: Path, bound: float) -> None:
        self._folder = folder
        self._bound = bound
        self.met = 0
        """Bytes that there were to save."""
        self.written = 0
        self.files = 0
        self.saving = 0.0
        self.removing = 0.0

    def hook(self, module: Any, args: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            self._save(tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._save)

    def projected(self, seconds: float) -> float:
        """A step's time, as if all had been saved and nothing removed."""
        return seconds - self.removing + self.saving * (self.met / self.written - 1)

    def _save(self, tensor: torch.Tensor) -> None:
        # NumPy has no bfloat16: whoever saves such a tensor makes it a float32 first.
        floats = tensor.is_floating_point()
        nbytes = tensor.numel() * (4 if floats else tensor.element_size())
        self.met += nbytes
        if self.files and self.saving > self._bound:
            return
        path = self._folder / f"{self.files}.npy"
        if tensor.is_cuda:
            torch.cuda.synchronize()  # saving begins when the tensor is there
        started = time.perf_counter()
        np.save(path, (tensor.detach().float() if floats else tensor).cpu().numpy())
        done = time.perf_counter()
        path.unlink()
        self.files += 1
        self.written += nbytes
        self.saving += done - started
        self.removing += time.perf_counter() - done
