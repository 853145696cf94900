"""Deferred reads: the keys, the order and the rows of their tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support import fake_gpu
from support.fake_gpu import Blocks, FakeReader, nothing
from tensortap.capture.recording import device_recorder
from tensortap.capture.recording.recorder import Recorder

OUTPUT_BYTES = 4 * 8 * 4


@pytest.fixture(params=["C", "Python"])
def new_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[], FakeReader]:
    fake_gpu.choose_language(monkeypatch, request.param)
    return fake_gpu.install(monkeypatch)


def both_ways(
    path: Path,
    new_gpu: Any,
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, int], None],
    count: int,
    kinds: Any,
) -> tuple[list[Any], list[Any], Any]:
    """Return the rows of immediate and of deferred reads, and the tap of the latter."""
    found = []
    for gather in (False, True):
        new_gpu()
        torch.manual_seed(0)
        model = make()
        with tt.capture(model, path / str(gather), gather=gather, kinds=kinds, classes="Linear") as tap:
            for number in range(count):
                step(model, number)
                model.zero_grad()
                tap.step()
                tap.flush()
        found.append([(r.key, r.summary.digest) for r in tt.open(path / str(gather))])
    return found[0], found[1], tap


class Failing(torch.autograd.Function):
    """A backward that runs out of memory, say."""

    now = False

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Failing.now:
            raise RuntimeError("out of memory")
        return gradient


def test_keys_stay_unique_if_a_second_backward_fails(tmp_path: Path, new_gpu: Any) -> None:
    def step(model: nn.Module, number: int) -> None:
        loss = model(torch.randn(4, 8)).square().sum()
        Failing.now = False
        loss.backward(retain_graph=True)
        Failing.now = number >= 4
        try:
            loss.backward()
        except RuntimeError:
            assert number >= 4

    def make() -> nn.Module:
        return Blocks(6, lambda number, x: Failing.apply(x) if number == 1 else x)

    once, later, _ = both_ways(tmp_path, new_gpu, make, step, 6, ("output", "grad_output", "param_grad"))
    assert once == later
    assert len({key for key, _ in later}) == len(later)


def test_one_that_is_lost_has_used_its_key_up(tmp_path: Path, new_gpu: Any) -> None:
    """Its gradient is changed in place while it waits; that of a second backward keeps its own name."""
    now, done = [0], [False]

    def clip(parameter: torch.Tensor) -> None:
        if now[0] == 3 and not done[0] and parameter.grad is not None:
            done[0] = True
            parameter.grad.mul_(0.5)

    def make() -> nn.Module:
        done[0] = False
        model = Blocks(3, nothing)
        model.parts[1].weight.register_post_accumulate_grad_hook(clip)
        return model

    def step(model: nn.Module, number: int) -> None:
        now[0] = number
        output = model(torch.randn(4, 8))
        output.square().sum().backward(retain_graph=True)
        (3 * output).sum().backward()

    once, later, tap = both_ways(tmp_path, new_gpu, make, step, 4, "param_grad")
    (notice,) = tap.notices
    assert "parts.1: param_grad weight was changed in place" in notice
    missing = [row for row in once if row not in later]
    assert [(key.step, key.module, key.path) for key, _ in missing] == [(3, "parts.1", "weight")]
    assert [row for row in once if row in later] == later


@pytest.mark.parametrize("lost", [(2,), (2, 3), (6, 7), (8,)])
def test_others_wait_no_longer_because_one_was_lost(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...]
) -> None:
    """Every output is changed, uncounted, right after the window in which its trial was made."""
    distance, now, earlier = 5, [0], list[torch.Tensor]()

    def between(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 0:
            earlier.clear()
        earlier.append(x)
        if number >= distance:
            earlier[number - distance].data.mul_(2)
        if now[0] == 5 and number in lost:
            x.detach().mul_(1.0)  # counted, and in this step alone
        return x

    def step(model: nn.Module, number: int) -> None:
        now[0] = number
        model(torch.randn(4, 8))

    with fake_gpu.window(monkeypatch, distance * OUTPUT_BYTES):
        once, later, _ = both_ways(tmp_path, new_gpu, lambda: Blocks(16, between), step, 7, "output")
    missing = {(key.step, key.module) for key, _ in once} - {(key.step, key.module) for key, _ in later}
    assert missing <= {(5, f"parts.{number}") for number in lost}
    assert [row for row in once if row in later] == later, "all that is there is right"


def test_c_code_reads_what_is_not_unusual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.choose_language(monkeypatch, "C")
    gpu, carefully = fake_gpu.install(monkeypatch)(), list[int]()
    record = Recorder._record_later
    monkeypatch.setattr(Recorder, "_record_later", lambda self, *given: carefully.append(1) or record(self, *given))
    model = Blocks(12, nothing)
    with tt.capture(model, tmp_path / "run", kinds=("input", "output", "grad_output", "param_grad")) as tap:
        for _ in range(24):
            model(torch.randn(4, 8)).square().sum().backward()
            model.zero_grad()
            tap.step()
    assert gpu.waited > len(tap.run) / 2 and len(carefully) < gpu.waited / 10


def test_a_tensor_that_must_be_copied_first_is_not_deferred(new_gpu: Any) -> None:
    gpu = new_gpu()
    gpu.submit(torch.zeros(8))
    whole = torch.randn(8, 8)
    peculiar = [
        whole.t(),
        whole[:, 1:],
        whole.view(-1)[1:],
        torch._neg_view(whole),
        torch.zeros(8, dtype=torch.complex64),
    ]
    assert not any(gpu.deferrable(tensor, None) for tensor in peculiar)
    kind = gpu.deferrable(whole, None)
    assert kind is not None and (kind.name, kind.shape, kind.nbytes) == ("float32", (8, 8), 256)
    assert not any(gpu.deferrable(tensor, kind) for tensor in peculiar), "also where a plain one was before"


def test_two_runs_try_the_same_tensors_without_waiting_for_rows(tmp_path: Path, new_gpu: Any) -> None:
    for name in ("a", "b"):
        gpu = new_gpu()
        torch.manual_seed(0)
        model = Blocks(60, nothing)
        tried = []
        with tt.capture(model, tmp_path / name) as tap:
            for _ in range(5):
                before = gpu.tried
                model(torch.randn(4, 8)).square().sum().backward()
                model.zero_grad()
                tap.step()
                if not tried:
                    tap.flush()  # a device that is not there is faster than the thread that writes
                tried.append(gpu.tried - before)
        assert tried[0] > 300 and tried[1] == 0 and max(tried[2:]) <= 12


def test_a_device_that_fails_takes_nothing_of_the_step_before_along(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed, arrived = [False], threading.Semaphore(0)

    class Event(fake_gpu.FakeEvent):
        def synchronize(self) -> None:
            if failed[0]:
                raise RuntimeError("CUDA error: device-side assert triggered")
            arrived.release()

    new_gpu()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    model = Blocks(6, nothing)
    tap = tt.capture(model, tmp_path / "a", kinds="output", classes="Linear", on_error="warn")
    for _ in range(5):
        model(torch.randn(4, 8))
        tap.step()
        assert arrived.acquire(timeout=20), "nobody waits for the step to be written, but it is fetched"
    model(torch.randn(4, 8))
    failed[0] = True
    tap.close("failed", "CUDA error")
    assert "device-side assert" in capsys.readouterr().err
    assert {r.key.step for r in tt.open(tmp_path / "a")} == {0, 1, 2, 3, 4}


def test_a_trial_that_is_cut_short_proves_nothing(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output is changed, uncounted, in the second of two micro steps; rows go out before it is read again there."""
    monkeypatch.setattr(device_recorder, "MOST_PENDING", 10)
    micro, earlier = [0], list[torch.Tensor]()

    def between(number: int, x: torch.Tensor) -> torch.Tensor:
        earlier.append(x)
        if micro[0] == 1 and number == 3:
            earlier[-3].data.mul_(2)
        return x

    def step(model: nn.Module, number: int) -> None:
        for micro[0] in range(2):
            earlier.clear()
            model(torch.randn(4, 8))

    once, later, tap = both_ways(tmp_path, new_gpu, lambda: Blocks(6, between), step, 6, "output")
    assert once == later and not tap.notices
