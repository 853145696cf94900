"""Deferred reads in a lane give the same records as immediate reads, even if tensors change meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from support import fake_gpu
from support.fake_gpu import Blocks, FakeReader, nothing
from tensortap.capture.recording.deferred import read_order as read_order
from tensortap.capture.recording.recorder import Recorder
from tensortap.frameworks.tensor_kind import TensorKind
from tensortap.frameworks.torch.cuda import lane as torch_lane
from tensortap.frameworks.torch.cuda.waiting import WaitingTensor
from tensortap.frameworks.torch.framework import Torch
from tensortap.kernels import summarize
from tensortap.kernels.cuda.gpu import MOST_TOGETHER, PARTIAL_BYTES, _pieces

Step = Callable[[nn.Module, int, Any], None]


@pytest.fixture
def new_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], FakeReader]:
    return fake_gpu.install(monkeypatch)


def train(model: nn.Module, step: int, tap: Any) -> None:
    model(torch.randn(4, 8)).square().sum().backward()


def alike(
    path: Path,
    new_gpu: Callable[[], FakeReader],
    make: Callable[[], nn.Module],
    step: Step = train,
    least: float = 0.25,
    **options: Any,
) -> FakeReader:
    """Both ways of reading give the same records; returns the device_reader that read together."""
    found = []
    for gather in (False, True):
        gpu = new_gpu()
        torch.manual_seed(0)
        model = make()
        with tt.capture(model, path / str(gather), gather=gather, **options) as tap:
            for number in range(5):
                step(model, number, tap)
                model.zero_grad()
                tap.step()
                tap.flush()
                assert gpu.waiting() == 0
        assert not tap.notices
        found.append([(r.key, r.summary.digest, r.tensor) for r in tt.open(path / str(gather))])
    assert [row[:2] for row in found[0]] == [row[:2] for row in found[1]]
    assert [row[2] for row in found[0]] == [row[2] for row in found[1]], "the same ones are known again"
    assert sum(gpu.gpu.together_) >= least * gpu.gpu.alone
    return gpu


def counted(every: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    return lambda number, x: x.mul_(0.5) if number % every == 0 else x


def unseen(every: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        if number % every == 0:
            x.data.mul_(0.5)
        return x

    return change


@pytest.mark.parametrize("change", [counted, unseen])
@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("kinds", ["output", ("input", "output", "grad_output", "param_grad")])
def test_many_tensors_of_which_some_are_changed(
    tmp_path: Path, new_gpu: Any, change: Any, every: int, kinds: Any
) -> None:
    """More than one launch takes: where one ends must not matter."""
    gpu = alike(tmp_path, new_gpu, lambda: Blocks(140, change(every)), kinds=kinds, classes="Linear")
    assert max(gpu.gpu.together_) == MOST_TOGETHER


def test_activations_that_work_in_place(tmp_path: Path, new_gpu: Any) -> None:
    def make() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(inplace=True)) for _ in range(20)]
        return nn.Sequential(*layers)

    alike(tmp_path, new_gpu, make)


@pytest.mark.parametrize("nbytes", [0, 128, 500, 1500])
@pytest.mark.parametrize("distance", [1, 2, 5, 9])
def test_a_change_some_tensors_later(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, nbytes: int, distance: int
) -> None:
    earlier: list[torch.Tensor] = []

    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 0:
            earlier.clear()
        earlier.append(x.detach())
        if number >= distance and number % 3 == 0:
            earlier[number - distance].mul_(0.5)
        return x

    with fake_gpu.window(monkeypatch, nbytes):
        alike(tmp_path, new_gpu, lambda: Blocks(24, change), no_backward, kinds="output", classes="Linear")


def no_backward(model: nn.Module, step: int, tap: Any) -> None:
    model(torch.randn(4, 8))


def test_only_the_second_micro_step_changes_something(tmp_path: Path, new_gpu: Any) -> None:
    micro = [0]

    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        if micro[0] == 1 and number == 3:
            x.data.mul_(0.5)
        return x

    def step(model: nn.Module, number: int, tap: Any) -> None:
        for micro[0] in range(3):
            train(model, number, tap)

    alike(tmp_path, new_gpu, lambda: Blocks(6, change), step)


def test_more_tensors_than_a_batch_has_room_for(tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_lane, "SLOTS", 150)
    alike(tmp_path, new_gpu, lambda: Blocks(30, counted(4)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(tmp_path: Path, new_gpu: Any, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=reentrant)
            return x

    alike(tmp_path, new_gpu, Checkpointed)


def test_two_backwards_and_a_flush_in_the_middle(tmp_path: Path, new_gpu: Any) -> None:
    def step(model: nn.Module, number: int, tap: Any) -> None:
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward(retain_graph=True)
        tap.flush()
        loss.backward()

    alike(tmp_path, new_gpu, lambda: Blocks(8, counted(3)), step)


def test_nothing_waits_longer_than_its_forward_or_backward(tmp_path: Path, new_gpu: Any) -> None:
    gpu = new_gpu()
    model = Blocks(8, nothing)
    with tt.capture(model, tmp_path / "run") as tap:
        for _ in range(4):
            loss = model(torch.randn(4, 8)).square().sum()
            assert gpu.waiting() == 0
            loss.backward()
            assert gpu.waiting() == 0
            tap.step()
            tap.flush()
    assert gpu.gpu.together_


def test_large_tensors_are_neither_deferred_nor_read_twice(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("lane", "reader"):
        monkeypatch.setattr(f"tensortap.frameworks.torch.cuda.{module}.TOO_LARGE", 100)
    gpu = new_gpu()
    model = Blocks(4, nothing)
    with tt.capture(model, tmp_path / "run", kinds="output") as tap:
        for _ in range(4):
            train(model, 0, tap)
            tap.step()
            tap.flush()
    assert not gpu.gpu.together_
    assert gpu.gpu.alone == len({r.tensor for r in tt.open(tmp_path / "run")})


def test_a_launch_that_fails_at_the_end_of_backward_breaks_the_tap_only(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_gpu()
    model = Blocks(4, nothing)
    tap = tt.capture(model, tmp_path / "run", on_error="raise")
    loss = model(torch.randn(4, 8)).square().sum()

    def fail(self: Any, tensors: Any) -> None:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(fake_gpu.FakeKernel, "_launch", fail)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(tt.TensortapError, match="launch failed"):
        tap.step()
    tap.close()


def test_an_unexpected_change_is_reported_and_not_recorded(tmp_path: Path, new_gpu: Any) -> None:
    now = [0]

    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5) if now[0] >= 3 and number == 2 else x

    digests = []
    for gather in (False, True):
        new_gpu()
        torch.manual_seed(0)
        model = Blocks(6, change)
        with tt.capture(model, tmp_path / str(gather), gather=gather, kinds="output", classes="Linear") as tap:
            for now[0] in range(6):
                train(model, now[0], tap)
                tap.step()
                tap.flush()
        digests.append({r.key: r.summary.digest for r in tt.open(tmp_path / str(gather))})
    once, together = digests
    assert [(key.step, key.module) for key in once if key not in together] == [(3, "parts.2")]
    assert all(once[key] == digest for key, digest in together.items())
    assert len(tap.notices) == 1 and "parts.2: output 0 was changed in place" in tap.notices[0]


@pytest.mark.parametrize("fails", ["end_step", "collect", "close"])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_notices_are_reported_although_the_device_fails_at_the_end(
    tmp_path: Path,
    new_gpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails: str,
    on_error: str,
) -> None:
    now = [0]

    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5) if now[0] == 3 and number == 2 else x

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    new_gpu()
    model = Blocks(6, change)
    tap = tt.capture(model, tmp_path / "run", kinds="output", classes="Linear", on_error=on_error)
    for now[0] in range(4):
        train(model, now[0], tap)
        if now[0] < 3:
            tap.step()
            tap.flush()
    monkeypatch.setattr(FakeReader, fails, fail)
    with pytest.raises(tt.TensortapError, match="the device is lost") if on_error == "raise" else nullcontext():
        tap.close()
    assert ("the device is lost" in capsys.readouterr().err) == (on_error == "warn")
    run = tt.open(tmp_path / "run")
    assert not run.finished and {r.key.step for r in run} >= {0, 1, 2}
    failed, told = run.notices
    assert "it failed: " in failed and "the device is lost" in failed
    assert "parts.2: output 0 was changed in place" in told


def test_results_from_before_a_device_failure_are_awaited(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of the last whole step are still on their way when the device fails."""
    monkeypatch.setattr(read_order, "_RETRIED_AFTER", 4)
    failed = threading.Event()
    collect = FakeReader.collect

    def late(self: Any, *tickets: Any) -> Any:
        failed.wait()
        return collect(self, *tickets)

    def fail(*_: Any) -> None:
        failed.set()
        raise RuntimeError("the device is lost")

    now, last = [0], 6  # in which the first place is tried again
    new_gpu()
    model = Blocks(2, lambda number, x: unseen(2)(number, x) if now[0] == last else x)
    tap = tt.capture(model, tmp_path / "run", kinds="output", classes="Linear", on_error="raise")
    for now[0] in range(last + 1):
        tap.flush()
        train(model, now[0], tap)
        if now[0] == last:
            monkeypatch.setattr(FakeReader, "collect", late)
        tap.step()
    monkeypatch.setattr(FakeReader, "end_step", fail)
    with pytest.raises(tt.TensortapError, match="the device is lost"):
        tap.close()
    assert any("parts.0: output 0 was changed without" in notice for notice in tt.open(tmp_path / "run").notices)


def test_a_tap_that_has_stopped_holds_no_tensor(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = new_gpu()

    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 6:
            monkeypatch.setattr(fake_gpu.FakePlan, "read", fail)
        return x

    def fail(*_: Any) -> None:
        raise RuntimeError("launch failed")

    model = Blocks(8, change)
    tap = tt.capture(model, tmp_path / "run", on_error="warn")
    train(model, 0, tap)
    assert gpu.waiting() == 0
    tap.step()
    assert "launch failed" in capsys.readouterr().err
    tap.close()
    assert {r.key.module for r in tt.open(tmp_path / "run")} <= {"", *(f"parts.{n}" for n in range(7))}


@pytest.mark.parametrize("change", ["counted", "unseen"])
def test_a_first_batch_that_is_larger_than_the_others(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The same bytes are then more tensors: none waits for more of them than it was tried with."""
    earlier: list[torch.Tensor] = []

    def change_an_earlier_one(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 0:
            earlier.clear()
        earlier.append(x)
        if number >= 8:
            old = earlier[number - 8].detach() if change == "counted" else earlier[number - 8].data
            old.mul_(0.5)
        return x

    def step(model: nn.Module, number: int, tap: Any) -> None:
        model(torch.randn(64 if number == 0 else 8, 8))

    with fake_gpu.window(monkeypatch, 4 * 64 * 8 * 4):
        alike(tmp_path, new_gpu, lambda: Blocks(24, change_an_earlier_one), step, kinds="output", classes="Linear")


def test_slots_that_are_not_in_every_step_are_tried_again(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_order, "_RETRIED_AFTER", 4)
    now = [0]

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, part in enumerate(self.parts):
                if number < 2 or now[0] % 2 == 0:
                    x = part(x)
                    if now[0] >= 10:
                        x.data.mul_(0.5)
            return x

    new_gpu()
    model = Sometimes()
    with tt.capture(model, tmp_path / "run", kinds="output", classes="Linear") as tap:
        for now[0] in range(24):
            train(model, now[0], tap)
            tap.step()
            tap.flush()
    told = {notice.partition(":")[0] for notice in tap.notices}
    assert told == {f"parts.{number}" for number in range(6)}


def test_many_small_tensors_are_read_together(tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full batch cuts trials short; they are repeated later."""
    monkeypatch.setattr(torch_lane, "SLOTS", 64)
    gpu = new_gpu()
    model = Blocks(100, nothing)
    with tt.capture(model, tmp_path / "run", kinds="output", classes="Linear") as tap:
        for number in range(12):
            train(model, number, tap)
            tap.step()
            tap.flush()
            if number == 9:
                gpu.gpu.alone, gpu.gpu.together_ = 0, []
    assert sum(gpu.gpu.together_) > 150 and gpu.gpu.alone < 60


def test_a_step_that_never_ends_is_not_read_twice_for_ever(tmp_path: Path, new_gpu: Any) -> None:
    gpu = new_gpu()
    model = Blocks(3, nothing)
    with tt.capture(model, tmp_path / "run", kinds="output", classes="Linear"):
        for number in range(200):
            train(model, number, None)
    assert gpu.gpu.alone == 600 and sum(gpu.gpu.together_) == 3 * 64


@pytest.mark.parametrize("seed", range(12))
def test_any_program_that_does_the_same_in_every_step(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    count, micros = dice.randint(5, 40), dice.randint(1, 3)
    changes = {
        (dice.randrange(micros), dice.randrange(count)): (dice.randint(0, 9), dice.random() < 0.5)
        for _ in range(dice.randint(0, 8))
    }
    monkeypatch.setattr(torch_lane, "SLOTS", dice.choice([40, 100, 1024]))
    kinds = dice.choice(["output", ("input", "output"), ("input", "output", "grad_output", "param_grad")])
    micro, earlier = [0], list[torch.Tensor]()

    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 0:
            earlier.clear()
        earlier.append(x)
        if (found := changes.get((micro[0], number))) is not None:
            distance, seen = found
            old = earlier[max(0, number - distance)]
            (old.detach() if seen else old.data).mul_(0.5)
        return x

    def step(model: nn.Module, number: int, tap: Any) -> None:
        for micro[0] in range(micros):
            output = model(torch.randn(4 if number % 2 else 16, 8))
            if not changes:  # autograd would refuse the changed tensor
                output.square().sum().backward()

    with fake_gpu.window(monkeypatch, dice.choice([0, 300, 2000, 10_000])):
        alike(tmp_path, new_gpu, lambda: Blocks(count, change), step, least=0, kinds=kinds, classes="Linear")


@pytest.mark.parametrize("change", [nothing, counted(1), unseen(1)])
def test_a_tensor_that_waits_and_is_then_kept_whole(tmp_path: Path, new_gpu: Any, change: Any) -> None:
    """It is seen again as the next module's input, whose tensors are kept, and changed only after that."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.second = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for first, second in zip(self.first, self.second, strict=True):
                y = first(x)
                x = second(y).detach()
                change(0, y.detach())
            return x

    keep = {"second.*": "tensors", "*": "summary"}
    alike(tmp_path, new_gpu, Pairs, no_backward, least=0, kinds=("input", "output"), classes="Linear", keep=keep)
    for gather in (False, True):
        kept = [r for r in tt.open(tmp_path / str(gather)) if r.location is not None]
        assert {r.key.module for r in kept} == {f"second.{n}" for n in range(4)} and len(kept) == 5 * 8


def test_an_interrupt_leaves_no_unread_row(tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    new_gpu()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    torch.manual_seed(0)
    batches = [torch.randn(4, 8) for _ in range(6)]
    looked = WaitingTensor.unchanged
    interrupts = [KeyboardInterrupt()]

    def interrupted(waiting: Any) -> bool:
        if tap.stats()["steps"] == 4 and interrupts:
            raise interrupts.pop()
        return looked(waiting)

    monkeypatch.setattr(WaitingTensor, "unchanged", interrupted)
    with tt.capture(model, tmp_path / "a", kinds="output", classes="Linear") as tap:
        for batch in batches:
            try:
                model(batch)
            except KeyboardInterrupt:
                continue  # as in a notebook
            finally:
                tap.step()
                tap.flush()
    assert not interrupts
    true = {(step, str(at)): model[: at + 1](batch) for step, batch in enumerate(batches) for at in range(6)}
    for record in tt.open(tmp_path / "a"):
        output = true[record.key.step, record.key.module].detach().numpy()
        assert record.summary.digest == summarize(output).digest, record.key


def test_nothing_waits_on_once_there_is_a_second_stream(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = new_gpu()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    seen: list[int] = []

    def to_another_stream(*_: Any) -> None:
        if tap.stats()["steps"] == 4:
            seen.append(gpu.waiting())
            monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 8, raising=False)

    with tt.capture(model, tmp_path / "a", kinds="output") as tap:
        model[3].register_forward_pre_hook(to_another_stream)
        model[4].register_forward_pre_hook(lambda *_: seen.append(gpu.waiting()))
        for _ in range(5):
            seen.clear()
            model(torch.randn(4, 8))
            tap.step()
    assert seen[0] > 0 and seen[1] == 0


def test_nothing_is_launched_into_a_graph_that_is_being_captured(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = new_gpu()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    launched: list[int] = []

    def unreadable(self: Any, tensor: torch.Tensor) -> str:  # as for tensors on a GPU
        return "captured" if torch.cuda.is_current_stream_capturing() else ""

    monkeypatch.setattr(Torch, "unreadable", unreadable)

    def begins(*_: Any) -> None:
        if tap.stats()["steps"] == 4:
            assert gpu.waiting() > 0
            fake_gpu.capture(monkeypatch, True)
            launched.append(len(gpu.gpu.together_) + gpu.gpu.alone)

    with tt.capture(model, tmp_path / "a", kinds="output", classes="Linear") as tap:
        model[3].register_forward_pre_hook(begins)
        for number in range(6):
            model(torch.randn(4, 8))
            if number == 4:
                launched.append(len(gpu.gpu.together_) + gpu.gpu.alone)
                fake_gpu.capture(monkeypatch, False)
            tap.step()
            tap.flush()
    assert launched[0] == launched[1]
    assert "output 0 is not recorded: captured" in " ".join(row.reason for row in tap.coverage)
    seen = {number: [r.key.module for r in tt.open(tmp_path / "a") if r.key.step == number] for number in (3, 4, 5)}
    assert seen == {3: list("012345"), 4: list("012"), 5: list("012345")}


def test_immediate_reads_come_after_earlier_deferred_ones(tmp_path: Path, new_gpu: Any) -> None:
    """Tensors without gradient never wait; those around them do."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
            for part in list(self.parts)[1::3]:
                part.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, part in enumerate(self.parts):
                x = torch.tanh(part(x.detach() if number % 3 == 1 else x))
            return x

    gpu = alike(tmp_path, new_gpu, Mixed, kinds=("input", "output", "param_grad"), classes="Linear")
    assert gpu.waited and gpu.gpu.alone
    order = [(r.key.module, r.key.kind) for r in tt.open(tmp_path / "True") if r.key.step == 4][:18]
    assert order == [(f"parts.{number}", kind) for number in range(9) for kind in ("input", "output")]


def test_a_tensor_seen_again_waits_with_the_others(tmp_path: Path, new_gpu: Any) -> None:
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return torch.stack([part(x) for part in self.parts]).sum(0)

    alike(tmp_path, new_gpu, Fan, kinds=("input", "output"), classes="Linear")
    gpu, model = new_gpu(), Fan()
    with tt.capture(model, tmp_path / "more", kinds=("input", "output"), classes="Linear") as tap:
        for number in range(6):
            alone, launches = gpu.gpu.alone, len(gpu.gpu.together_)
            train(model, number, tap)
            tap.step()
            tap.flush()
    assert gpu.gpu.together_[launches:] == [6, 1], "one launch for all outputs, one for what is tried again"
    assert gpu.gpu.alone - alone == 1, "the first input needs no gradient; no other input is read again"


def test_an_interrupt_while_a_tensor_is_recorded_leaves_the_earlier_ones(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.choose_language(monkeypatch, "Python")  # a signal's handler runs between lines of Python alone
    new_gpu()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    record = Recorder._record_later
    interrupts = [KeyboardInterrupt()]

    def interrupted(self: Recorder, *given: Any) -> bool:
        *_, slot, step = given
        if step == 9 and slot.module == "2" and interrupts:
            raise interrupts.pop()
        return record(self, *given)

    monkeypatch.setattr(Recorder, "_record_later", interrupted)
    with tt.capture(model, tmp_path / "a", kinds="output", classes="Linear") as tap:
        for number in range(11):  # when no place is tried again
            try:
                model(torch.randn(4, 8))
            except KeyboardInterrupt:
                assert number == 9
            tap.step()
            tap.flush()
    assert not interrupts
    seen = {number: [r.key.module for r in tt.open(tmp_path / "a") if r.key.step == number] for number in (8, 9, 10)}
    assert seen == {8: list("012345"), 9: list("01"), 10: list("012345")}


def test_reads_at_the_end_of_a_backward_hold_the_taps_lock(tmp_path: Path, new_gpu: Any) -> None:
    """It may end in another thread than the one in which something else is being recorded."""
    gpu = new_gpu()
    model = Blocks(6, nothing)
    with tt.capture(model, tmp_path / "a", classes="Linear") as tap:
        for number in range(4):
            train(model, number, tap)
            tap.step()
        loss = model(torch.randn(4, 8)).sum()
        assert gpu.lock is tap._lock
        backward = threading.Thread(target=loss.backward)
        with tap._lock:
            backward.start()
            backward.join(0.2)
            assert backward.is_alive()
        backward.join()
        assert gpu.waiting() == 0
    assert not tap.notices


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("processors", [132, 160])
def test_the_largest_deferred_batch_fits_its_buffers(itemsize: int, processors: int) -> None:
    most = min(torch_lane._MOST_WAITING + torch_lane.TOO_LARGE, MOST_TOGETHER * torch_lane.TOO_LARGE)
    for megabytes in range(1, torch_lane.TOO_LARGE >> 20):
        count = min(MOST_TOGETHER, most // (megabytes << 20))
        pieces = _pieces((megabytes << 20) // itemsize, 2 * processors)
        assert count * pieces * PARTIAL_BYTES <= torch_lane._PARTIALS, f"{count} tensors of {megabytes} MB"


@pytest.mark.parametrize(("gigabytes", "waiting"), [(24, 128 << 20), (150, 800 << 20), (1000, 9 << 28)])
def test_how_long_tensors_wait_depends_on_the_devices_memory(new_gpu: Any, gigabytes: int, waiting: int) -> None:
    gpu: Any = fake_gpu.FakeGpu()
    lane = torch_lane.Lane(gpu, torch.zeros(256), torch.device("cpu"), 0, gigabytes << 30, 0)
    tensor, forever = torch.zeros(8), fake_gpu.Forever()
    lane.submit_deferred(tensor, TensorKind(torch.float32, (8,), "float32", 8, 32), forever, None)
    assert lane._waiting.bounds()[1] == 32 + waiting


@pytest.mark.parametrize("language", ["Python", "C", "C++"])
def test_how_long_tensors_wait_depends_on_free_memory(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    fake_gpu.choose_language(monkeypatch, language)
    gpu, model = new_gpu(), Blocks(4, nothing)
    gpu.free = 100 << 30
    waiting = []
    with tt.capture(model, tmp_path / "run") as tap:
        for free in [100, 100, 20, 1, 100]:
            gpu.free = free << 30
            model(torch.ones(2, 8)).square().sum().backward()
            waiting.append(gpu._opened[0]._waiting.most)
            tap.step()
    least = (64 << 30) // 192
    most = torch_lane._MOST_WAITING
    assert waiting == [most, most, 20 << 26, least, most]
    assert not tap.notices


@pytest.mark.parametrize("language", ["Python", "C", "C++"])
@pytest.mark.parametrize("how", ["freed", "moved"])
def test_a_tensor_whose_memory_is_freed_or_moved_while_it_waits_is_not_read(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, language: str, how: str
) -> None:
    """Offloading and sharding do that, and no version counts it."""
    fake_gpu.choose_language(monkeypatch, language)
    kept: list[torch.Tensor] = []
    read: list[int] = []
    before: list[int] = []
    summary_at = fake_gpu.summary_at
    monkeypatch.setattr(fake_gpu, "summary_at", lambda at, *rest: read.append(at) or summary_at(at, *rest))  # type: ignore[func-returns-value]

    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        if now < 4 or number != 7:
            return x
        copied, storage = x.detach().clone(), x.untyped_storage()
        size = storage.nbytes()
        before.append(x.data_ptr())
        storage.resize_(0)
        kept.append(torch.full((4, 8), 7.0))  # takes the memory
        if how == "freed":
            return copied
        storage.resize_(size)
        x.data.copy_(copied)
        return x

    new_gpu()
    torch.manual_seed(0)
    model, x = Blocks(12, change), torch.randn(4, 8)
    with tt.capture(model, tmp_path / "run", kinds=("output",), classes="Linear") as tap:
        for now in range(6):
            read.clear()
            model(x)
            tap.step()
            tap.flush()
            assert now != 4 or before[0] not in read
    found = {record.key.step: record.summary.digest for record in tt.open(tmp_path / "run").records(module="parts.7")}
    assert found.keys() == {0, 1, 2, 3, 5}
    assert len({*found.values()}) == 1
    assert any("parts.7" in notice for notice in tap.notices)


class Taught(Blocks):
    """Changes an output in place, and runs another part in inference mode while it waits."""

    def __init__(self, change: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(12, change)
        self.teacher = nn.ModuleList(nn.Linear(8, 8) for _ in range(70))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        with torch.inference_mode():
            y = torch.ones(4, 8)
            for part in self.teacher:
                y = torch.tanh(part(y))
        return result + y.sum().item()


@pytest.mark.parametrize("language", ["Python", "C", "C++"])
def test_tensors_that_wait_may_be_read_in_inference_mode(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    fake_gpu.choose_language(monkeypatch, language)

    def change(number: int, x: torch.Tensor) -> torch.Tensor:
        return x.add_(0.0) if now >= 4 and number == 7 else x

    with fake_gpu.window(monkeypatch, 3000):
        new_gpu()
        model = Taught(change)
        with tt.capture(model, tmp_path / "run", kinds=("output",)) as tap:
            for now in range(8):  # noqa: B007  # `change` reads it
                model(torch.randn(4, 8)).sum().backward()
                tap.step()
    assert {record.key.step for record in tt.open(tmp_path / "run").records()} == set(range(8))


@pytest.mark.parametrize("language", ["Python", "C", "C++"])
def test_free_memory_is_looked_at_without_gradients_too(
    tmp_path: Path, new_gpu: Any, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    fake_gpu.choose_language(monkeypatch, language)
    monkeypatch.setattr(torch_lane, "_SHARE_WAITING", (64 << 30) // 512)  # at least four outputs may wait
    gpu, most = new_gpu(), 0

    def look(number: int, x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, gpu.waiting())
        return x

    gpu.free = 1 << 30
    model = Blocks(20, look)
    with tt.capture(model, tmp_path / "run", kinds=("output",), classes="Linear") as tap:
        for step in range(60):
            gpu.free = 1 << 30 if step < 30 else 0
            most = 0
            model(torch.randn(4, 8)).sum().backward()
            tap.step()
            assert step < 5 or step >= 30 or most > 15, "all that are there"
    assert 0 < most <= 5
