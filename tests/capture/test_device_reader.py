"""Device readers: summaries arrive later, and the run is the same as one of tensors in host memory.

The CPU acts as the device: the reader of plain torch operations works on any.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support import fake_gpu, zoo
from support.tapping import ALL_KINDS, everything, hooks_on
from tensortap.errors import CaptureError
from tensortap.frameworks.base import Identity
from tensortap.frameworks.device_reader import CollectedSummaries
from tensortap.frameworks.torch.framework import Torch
from tensortap.frameworks.torch.memory import StorageHold
from tensortap.frameworks.torch.ops_reader import OpsReader
from tensortap.kernels.cuda.results import RESULT, columns
from tensortap.store import memory


def train(path: Path | None, keep: Any = "summary", **options: Any) -> Any:
    torch.manual_seed(3)
    model = zoo.Residual()
    optimizer = torch.optim.AdamW(model.parameters())
    with tt.capture(model, path, optimizer=optimizer, kinds=ALL_KINDS, keep=keep, **options) as tap:
        for step in range(3):
            model(zoo.batch(seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert hooks_on(model) == 0
    return tap.run


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> OpsReader:
    """From now on all tensors are on a device."""
    device_reader = OpsReader()
    monkeypatch.setattr(Torch, "device_reader", lambda self, tensor: device_reader)
    return device_reader


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


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_a_run_in_memory_is_the_same(tmp_path: Path, keep: str, there: OpsReader) -> None:
    disk, held = train(tmp_path / "run", keep), train(None, keep)
    assert everything(held) == everything(disk) and held.finished
    for ours, theirs in zip(held, disk, strict=True):
        assert (ours.location is None) == (theirs.location is None)
        if ours.location is not None:
            assert np.array_equal(held.load(ours), disk.load(theirs), equal_nan=True)


def test_a_run_in_memory_keeps_summaries_beyond_the_bound(
    there: OpsReader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "RECORD_BYTES", 1)  # the tensors are small compared with their summaries
    monkeypatch.setattr(memory.MemoryWriter, "loop_fact", lambda *_: None)
    whole = train(None, "tensors")
    tensors = {record.tensor: record.location.nbytes for record in whole if record.location is not None}
    part = train(None, "tensors", max_memory=len(whole) + sum(tensors.values()) // 2)
    assert "no room for more tensors" in capsys.readouterr().err
    kept = [record.location is not None for record in part]
    assert everything(part) == everything(whole) and any(kept) and not all(kept)
    assert all(np.array_equal(part.load(r), whole.load(whole.get(r.key))) for r in part.records(kept=True))


def test_some_tensors_here_and_some_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = train(tmp_path / "here", "tensors")
    device_reader = OpsReader()
    monkeypatch.setattr(Torch, "device_reader", lambda self, tensor: device_reader if tensor.numel() % 2 == 0 else None)
    found = train(tmp_path / "there", "tensors")
    assert everything(found) == everything(here)
    assert [record.seq for record in found] == list(range(len(found)))


def test_results_can_be_awaited(tmp_path: Path, there: OpsReader) -> None:
    model = nn.Linear(3, 2)
    with tt.capture(model, tmp_path / "run", kinds=("input", "output")) as tap:
        model(torch.ones(1, 3))
        tap.flush()
        assert len(tt.open(tmp_path / "run")) == 2
        model(torch.ones(1, 3))
        tap.step()
    assert len(tt.open(tmp_path / "run")) == 4


def test_a_change_without_the_frameworks_knowledge_is_reported(tmp_path: Path, there: OpsReader) -> None:
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


def test_little_grows_old_while_a_step_lasts(tmp_path: Path, there: OpsReader) -> None:
    """Objects that live until the step ends make the garbage collector go through the whole program, again and again.
    The count covers objects that capture itself keeps, not the device's tickets."""
    there.submit = lambda tensor, known=None, later=None, flat=None: None  # type: ignore[assignment, method-assign]
    there.collect = lambda *groups: CollectedSummaries(  # type: ignore[method-assign]
        columns(np.zeros(sum(map(len, groups)), RESULT), np.zeros(sum(map(len, groups)), np.int64)),
        [False] * sum(map(len, groups)),
    )
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(50)))
    kinds = ("input", "output", "grad_output", "param_grad")
    with tt.capture(model, tmp_path / "run", kinds=kinds) as tap:
        for _ in range(2):
            gc.collect()
            gc.disable()  # temporary objects must be counted, not collected
            try:
                before = len(gc.get_objects())
                model(torch.ones(2, 4)).sum().backward()
                gc.collect(0)  # lets go of plain tuples
                left = len(gc.get_objects()) - before
            finally:
                gc.enable()
            tap.step()
            tap.flush()
    records = len(tt.open(tmp_path / "run")) / 2
    assert records > 200
    assert left / records < 3


def test_no_memory_is_watched_longer_than_the_step(tmp_path: Path, there: OpsReader) -> None:
    watches: list[StorageHold] = []

    def watch() -> StorageHold:
        watches.append(StorageHold())
        return watches[-1]

    def watched() -> int:
        return sum(map(len, watches))

    there.hold_tokens = watch  # type: ignore[method-assign, assignment]

    model = nn.Linear(3, 2)
    with tt.capture(model, tmp_path / "run") as tap:
        model(torch.ones(1, 3)).sum().backward()
        assert watched() > 0
        tap.step()
        assert watched() == 0
        model(torch.ones(1, 3))
    assert watched() == 0


def test_a_tensor_is_known_again_while_its_memory_and_version_last() -> None:
    framework = Torch()

    def identity(tensor: torch.Tensor) -> Identity:
        found = framework.identity(tensor)
        assert found is not None
        return found

    tensor = torch.ones(4, 6)
    first = identity(tensor)
    assert first == identity(tensor) == identity(tensor.detach())
    others = tensor.view(6, 4), tensor[:3], tensor.t(), tensor.view(torch.int32), torch.ones(4, 6)
    assert all(identity(other) != first for other in others)
    tensor.add_(1)
    assert identity(tensor) != first
    view = tensor[0]
    del tensor, others
    assert first.alive()  # a part of it is still in use
    del view
    assert not first.alive()


def test_a_token_is_that_of_one_tensor_while_its_memory_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu.install(monkeypatch)()
    base = torch.ones(4, 8)
    first, *_, flat = gpu.describe(base)
    assert flat and first == gpu.describe(base.detach())[0]
    whole = base.view(2, 16), base[:2], base.view(torch.int32), torch.ones(4, 8)
    parts = base[:, ::2], base.t(), base[0, 1:], base[:0].view(0, 8, 2), base.flatten()[::2], torch._neg_view(base)
    assert len({gpu.describe(other)[0] for other in (base, *whole, *parts)}) == 11
    assert all(gpu.describe(other)[2] for other in whole) and not any(gpu.describe(p)[2] for p in parts if p.numel())
    base.add_(1)
    assert gpu.describe(base)[0] != first
    with torch.inference_mode():
        assert gpu.describe(torch.ones(4, 8))[0] is None

    watch = gpu.hold_tokens()
    watch.add(base)
    address = base.untyped_storage()._cdata
    del base, whole, parts
    others = [torch.ones(4, 8) for _ in range(100)]
    assert all(other.untyped_storage()._cdata != address for other in others)
    watch.clear()
    watch.clear()
    assert len(watch) == 0


class Marked(torch.Tensor):
    """A tensor subclass, as some libraries define."""


def test_a_tensor_of_another_class_has_the_token_of_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu.install(monkeypatch)()
    base = torch.ones(4, 8)
    parts = base, base.view(2, 16), base[:2], base[:, ::2], base.t(), base[0, 1:]
    plain = [gpu.describe(part)[:2] for part in parts]
    marked = [gpu.describe(part.as_subclass(Marked)) for part in parts]
    assert [found[:2] for found in marked] == plain and len(set(plain)) == len(parts)
    assert not any(found[2] for found in marked), "it may work otherwise: it is not read as it lies"
    base.add_(1)
    assert gpu.describe(base.as_subclass(Marked))[0] == gpu.describe(base)[0] != plain[0][0]
    with torch.inference_mode():
        token, kind, flat = gpu.describe(torch.ones(4, 8).as_subclass(Marked))
        assert (token, kind.name, kind.shape, flat) == (None, "float32", (4, 8), False)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("change", [True, False])
def test_a_tensor_seen_under_another_class_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gather: bool, change: bool
) -> None:
    fake_gpu.install(monkeypatch)()

    class Marking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            marked = x.as_subclass(Marked)
            if change:
                x.data.mul_(2)
            return self.second(marked)

    model = Marking()
    with tt.capture(model, tmp_path / "run", kinds=("input", "output"), classes="Linear", gather=gather) as tap:
        for _ in range(4):
            model(torch.randn(4, 8, requires_grad=True))
            tap.step()
            tap.flush()
    found = {(r.key.step, r.key.module, r.key.kind): r for r in tt.open(tmp_path / "run")}
    for step in range(4):
        pair = found[step, "first", "output"], found[step, "second", "input"]
        assert (pair[0].tensor == pair[1].tensor) == (pair[0].summary.digest == pair[1].summary.digest) == (not change)


def test_a_device_that_fails_at_once_is_named_as_the_reason(tmp_path: Path, there: OpsReader) -> None:
    def submit(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    there.submit = submit  # type: ignore[method-assign]
    model = nn.Linear(3, 2)
    with (
        pytest.raises(CaptureError, match="out of memory"),
        tt.capture(model, tmp_path / "run", on_error="raise"),
    ):
        model(torch.ones(1, 3))
    about = json.loads((tmp_path / "run" / "rank_0" / "rank.json").read_text())
    assert (about["status"], about["reason"]) == ("failed", "out of memory")


def test_a_device_that_fails_stops_the_recording_and_not_the_training(tmp_path: Path, there: OpsReader) -> None:
    def collect(*tickets: Sequence[Any]) -> CollectedSummaries:
        raise RuntimeError("an illegal memory access was encountered")

    there.collect = collect  # type: ignore[method-assign]
    model = nn.Linear(3, 2)
    with pytest.raises(CaptureError, match="illegal memory access"):  # noqa: SIM117 - raised at the end of the inner one
        with tt.capture(model, tmp_path / "run", on_error="raise") as tap:
            for _ in range(3):
                model(torch.ones(1, 3)).sum().backward()
                tap.step()
    assert hooks_on(model) == 0
    assert len(tt.open(tmp_path / "run")) == 0
