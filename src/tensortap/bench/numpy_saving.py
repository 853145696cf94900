"""The baseline of the benchmark: np.save of each leaf module's output and of its gradient, in hooks."""
# mypy: allow-untyped-calls

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensortap.bench.memory import MemoryMeter
from tensortap.bench.steps import TimedBlock, timed
from tensortap.bench.trainer import Trainer, is_leaf

__all__ = ["TIME_LIMIT", "save_in_hooks"]

TIME_LIMIT = 20.0


def save_in_hooks(trainer: Trainer, folder: Path, bound: float = TIME_LIMIT) -> TimedBlock:
    """Run one step and save each tensor to a file of its own.

    Files are removed right after they are written, so that any disk is large enough; removing is not counted. After
    `bound` seconds, saving stops, and the time is extrapolated to all tensors.
    """
    folder.mkdir(parents=True)
    saver = _Saver(folder, bound)
    meter = MemoryMeter(trainer.device)
    try:
        with ExitStack() as undo:
            for name, module in trainer.model.named_modules():
                if is_leaf(name, module):
                    undo.callback(module.register_forward_hook(saver.hook).remove)
            times = timed(trainer, 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stats = {"bytes": saver.written, "bytes_of_all": saver.seen, "files": saver.files}
    seconds, each, launching = map(saver.projected, times)
    return TimedBlock(1, seconds, each, launching, meter.read(), stats=stats)


class _Saver:
    """Saves the tensors that its hooks receive."""

    def __init__(self, folder: Path, bound: float) -> None:
        self._folder = folder
        self._bound = bound
        self.seen = 0
        """Bytes of all tensors that were seen."""
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
        """Return a step's time, extrapolated to all tensors and without the time of removing."""
        return seconds - self.removing + self.saving * (self.seen / self.written - 1)

    def _save(self, tensor: torch.Tensor) -> None:
        # NumPy has no bfloat16: such a tensor is converted to float32 first.
        floats = tensor.is_floating_point()
        nbytes = tensor.numel() * (4 if floats else tensor.element_size())
        self.seen += nbytes
        if self.files and self.saving > self._bound:
            return
        path = self._folder / f"{self.files}.npy"
        if tensor.is_cuda:
            torch.cuda.synchronize()  # saving begins when the tensor is computed
        started = time.perf_counter()
        np.save(path, (tensor.detach().float() if floats else tensor).cpu().numpy())
        done = time.perf_counter()
        path.unlink()
        self.files += 1
        self.written += nbytes
        self.saving += done - started
        self.removing += time.perf_counter() - done
