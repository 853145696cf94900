"""Tensors that are looked at where they are: what was found arrives later, and the run is the same as without.

A CPU stands in for the device here: the workshop of plain torch operations works on any.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, everything, hooks_on
from tensortap.errors import CaptureError
from tensortap.frameworks.base import Collected
from tensortap.frameworks.torch import Torch
from tensortap.frameworks.torch_ops import OpsWorkshop


def train(path: Path, keep: Any = "summary") -> Any:
    torch.manual_seed(3)
    model = zoo.Residual()
    optimizer = torch.optim.AdamW(model.parameters())
    with tt.capture(model, path, optimizer=optimizer, kinds=ALL_KINDS, keep=keep):
        for step in range(3):
            model(zoo.batch(seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert hooks_on(model) == 0
    return tt.open(path)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> OpsWorkshop:
    """From now on all tensors are on a device."""
    workshop = OpsWorkshop()
    monkeypatch.setattr(Torch, "workshop", lambda self, tensor: workshop)
    return workshop


@pytest.mark.parametrize("keep", ["summary", "tensors", {"*.0": "tensors", "*": "summary"}])
def test_the_run_is_the_same(tmp_path: Path, keep: Any, request: pytest.FixtureRequest) -> None:
    here = train(tmp_path / "here", keep)
    request.getfixturevalue("there")
    found = train(tmp_path / "there", keep)
    assert everything(found) == everything(here)
    for ours, theirs in zip(found, here, strict=True):
        assert (ours.seq, ours.tensor, ours.cls) == (theirs.seq, theirs.tensor, theirs.cls)
        assert (ours.location is None) == (theirs.location is None)
        if ours.location is not None:
            assert np.array_equal(found.load(ours), here.load(theirs), equal_nan=True)
    assert tt.compare(tmp_path / "here", tmp_path / "there").verdict == "match"


def test_some_tensors_here_and_some_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = train(tmp_path / "here", "tensors")
    workshop = OpsWorkshop()
    monkeypatch.setattr(Torch, "workshop", lambda self, tensor: workshop if tensor.numel() % 2 == 0 else None)
    found = train(tmp_path / "there", "tensors")
    assert everything(found) == everything(here)
    assert [record.seq for record in found] == list(range(len(found)))


def test_what_was_found_can_be_waited_for(tmp_path: Path, there: OpsWorkshop) -> None:
    model = nn.Linear(3, 2)
    with tt.capture(model, tmp_path / "run", kinds=("input", "output")) as tap:
        model(torch.ones(1, 3))
        tap.flush()
        assert len(tt.open(tmp_path / "run")) == 2
        model(torch.ones(1, 3))
        tap.step()
    assert len(tt.open(tmp_path / "run")) == 4


def test_a_change_behind_the_frameworks_back_is_seen_and_said(tmp_path: Path, there: OpsWorkshop) -> None:
    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            between = self.first(x)
            between.data.mul_(2)
            output: torch.Tensor = self.second(between)
            return output

    model = Sly()
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=("input", "output")) as tap:
        model(torch.ones(2, 4))
        tap.step()
    records = {(record.key.module, record.key.kind): record for record in tt.open(tmp_path / "run")}
    before, after = records["first", "output"], records["second", "input"]
    assert after.summary.l2 == pytest.approx(2 * before.summary.l2)
    assert after.tensor != before.tensor
    assert before.location is not None and after.location is None
    assert any("without its framework knowing" in notice for notice in tap.notices)


def test_a_device_that_fails_stops_the_recording_and_not_the_training(tmp_path: Path, there: OpsWorkshop) -> None:
    def collect(tickets: Sequence[Any]) -> Collected:
        raise RuntimeError("an illegal memory access was encountered")

    there.collect = collect  # type: ignore[method-assign]
    model = nn.Linear(3, 2)
    with pytest.raises(CaptureError, match="illegal memory access"):  # noqa: SIM117 - raised at the end of the inner one
        with tt.capture(model, tmp_path / "run") as tap:
            for _ in range(3):
                model(torch.ones(1, 3)).sum().backward()
                tap.step()
    assert hooks_on(model) == 0
    assert len(tt.open(tmp_path / "run")) == 0
