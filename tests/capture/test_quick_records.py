"""Whatever a step does, the quick way records the same as the careful one: every row, in the same order.

The careful way reads each tensor at once. The quick way copies small tensors, and makes their rows after the step.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from support.tapping import ALL_KINDS
from tensortap.capture import recorder

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
CAUSES = ("plain", "shape", "branch", "skip", "error", "in place", "unseen", "checkpoint", "hook", "again", "evaluate")
STEPS = 24


class Restless(nn.Module):
    """A model that does something else in every step, as `todo` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Identity())
        self.wide = nn.Linear(6, 9000)  # its output is too large to be copied
        self.todo = "plain"

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        y = self.second(self.first(x)) if self.todo != "branch" else self.first(self.second(x))
        if self.todo == "in place":
            y += 1
        if self.todo == "unseen":
            y.data.mul_(2)
        if self.todo == "error":
            raise ZeroDivisionError
        if self.todo == "checkpoint":
            y = checkpoint(self.inner, y, use_reentrant=False)
        elif self.todo != "skip":
            y = self.inner(y)
        y = self.norm(self.third(y) + x) * scale
        return {"y": y, "wide": self.wide(y[:, :1])}


def record(path: Path, device: str, seed: int) -> list[Any]:
    """Train with one cause after the other at random, and return what the run holds."""
    torch.manual_seed(seed)
    choose = random.Random(seed)
    model = Restless().to(device)
    hook = model.third.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    with tt.capture(model, path, kinds=(*ALL_KINDS, "step_grad"), optimizer=optimizer) as tap:
        for _ in range(STEPS):
            model.todo = choose.choice(CAUSES)
            x = torch.randn(3 if model.todo == "shape" else 2, 4, 6, device=device)
            if model.todo == "hook":
                hook.remove()
            if model.todo == "evaluate":
                with torch.no_grad():
                    model(x)
            try:
                output = model(x, scale=choose.choice((1.0, 0.5)))
                loss = output["y"].square().sum() + output["wide"].sum()
                loss.backward(retain_graph=model.todo == "again")
                if model.todo == "again":
                    loss.backward()
            except ZeroDivisionError:
                pass
            optimizer.step()
            optimizer.zero_grad()
    assert tap.run.finished and not tap.run.failure
    return [row_of(each) for each in tt.open(path)]


def row_of(record: Any) -> tuple[Any, ...]:
    statistics = tuple(repr(record.summary[name]) for name in ("elements", "mean", "std", "min", "max", "l1", "l2"))
    summary = record.summary.digest, record.summary.sketch.tobytes(), *statistics
    return record.key, record.seq, record.cls, record.dtype, record.shape, record.tensor, summary


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 1])
def test_steps_that_differ_are_recorded_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, seed: int
) -> None:
    quick = record(tmp_path / "quick", device, seed)
    monkeypatch.setattr(recorder.Recorder, "take", lambda *_: False)
    monkeypatch.setattr(recorder, "MOST_COPIED", -1)
    careful = record(tmp_path / "careful", device, seed)
    assert len(quick) > 20 * STEPS and {row[0].step for row in quick} >= set(range(STEPS - 1))
    assert [row[0] for row in quick] == [row[0] for row in careful]
    for ours, theirs in zip(quick, careful, strict=True):
        assert ours == theirs
