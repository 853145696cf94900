"""The training step that is measured."""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

from tensortap.bench.model import Llama, ModelSize
from tensortap.errors import UsageError

__all__ = ["Trainer", "device_of", "is_leaf"]


def device_of(wanted: str) -> str:
    """Return cpu or cuda. Raise UsageError if cuda is wanted and missing."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: torch finds no CUDA device here; try --device cpu")
    return wanted


def is_leaf(name: str, module: Any) -> bool:
    """Return whether a module has no children; for the `modules` of a capture."""
    return not any(True for _ in module.children())


class Trainer:
    """A model, its optimizer and one batch, always from the same seed."""

    def __init__(self, size: ModelSize, device: str) -> None:
        self.device = device
        with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            self.model = Llama(size).to(getattr(torch, size.dtype))
            self._tokens = torch.randint(0, size.words, (size.batch, size.length + 1))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")

    def step(self) -> None:
        """Run forward, backward and optimizer; on a GPU, only launch them."""
        logits = self.model(self._tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), self._tokens[:, 1:].flatten()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def leaves(self) -> int:
        return sum(is_leaf(name, module) for name, module in self.model.named_modules())
