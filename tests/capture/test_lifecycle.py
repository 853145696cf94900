"""A tap is removed cleanly in every case; copies, second taps and forgotten taps do no harm."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, coverage, everything, hooks_on, tapped


def open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def test_nothing_is_left_after_the_block(run_path: Path) -> None:
    model = zoo.Structured()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    gc.collect()  # runs of earlier tests may still be mapped
    threads, files = set(threading.enumerate()), open_files()
    tapped(model, run_path, steps=2)
    assert hooks_on(model) == 0
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert open_files() == files
    assert set(threading.enumerate()) <= threads


def test_plain_object_and_close_twice(run_path: Path) -> None:
    model = nn.Linear(4, 4)
    tap = tt.capture(model, run_path)
    zoo.loss_of(model(zoo.batch())).backward()
    tap.step()
    tap.close()
    tap.close()
    assert hooks_on(model) == 0 and tt.open(run_path).finished
    with pytest.raises(tt.TensortapError, match="start a new one"):
        tap.step()


class Failing(nn.Module):
    """Raises in forward or in backward on request."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("in backward")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bad = nn.Linear(4, 4), nn.Module()
        self.bad.forward = self._fail  # type: ignore[assignment]
        self.fail: str = ""

    def _fail(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail == "forward":
            raise ZeroDivisionError("in forward")
        if self.fail == "interrupt":
            raise KeyboardInterrupt
        return Failing.Backward.apply(x) if self.fail == "backward" else x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bad(self.first(x))


@pytest.mark.parametrize(
    ("where", "error"),
    [("forward", ZeroDivisionError), ("backward", ZeroDivisionError), ("interrupt", KeyboardInterrupt)],
)
def test_an_exception_leaves_no_hook_and_a_readable_run(run_path: Path, where: str, error: type[BaseException]) -> None:
    model = Failing()
    with pytest.raises(error), tt.capture(model, run_path, keep="tensors", kinds=ALL_KINDS) as tap:
        zoo.loss_of(model(zoo.batch())).backward()
        tap.step()
        model.fail = where
        zoo.loss_of(model(zoo.batch())).backward()
    assert hooks_on(model) == 0
    run = tt.open(run_path)
    assert run.steps == [0, 1]  # the step that failed is there as far as it went
    assert any(error.__name__ in notice for notice in run.notices)
    assert {r.key.module for r in run.records(step=1)} >= {"", "first"}
    assert all(run.load(record) is not None for record in run)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_caught_exception_does_not_confuse_the_counting(tmp_path: Path, where: str) -> None:
    def run(name: str, trouble: bool) -> dict[object, object]:
        torch.manual_seed(0)
        model = Failing()
        with tt.capture(model, tmp_path / name, kinds=ALL_KINDS) as tap:
            if trouble:
                model.fail = where
                with pytest.raises(ZeroDivisionError):
                    zoo.loss_of(model(zoo.batch())).backward()
                model.fail = ""
            tap.step()
            zoo.loss_of(model(zoo.batch())).backward()
            tap.step()
        return {k: v for k, v in everything(tt.open(tmp_path / name)).items() if k.step == 1}

    assert run("plain", False) == run("troubled", True)


def test_an_exception_caught_inside_forward(run_path: Path) -> None:
    class Retry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing, self.fallback = Failing(), nn.Linear(4, 4)
            self.failing.fail = "forward"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.failing(x)
            except ZeroDivisionError:
                return self.fallback(x)

    run, tap = tapped(Retry(), run_path, steps=2)
    assert {(r.key.step, r.key.micro) for r in run} == {(0, 0), (1, 0)}
    assert coverage(tap)["fallback"][0] == "seen"


def test_closed_before_backward(run_path: Path) -> None:
    model = nn.Linear(4, 4)
    with tt.capture(model, run_path, kinds=ALL_KINDS):
        loss = zoo.loss_of(model(zoo.batch()))
    written = (run_path / "rank_0" / "index.arrows").read_bytes()
    loss.backward()
    assert (run_path / "rank_0" / "index.arrows").read_bytes() == written
    assert {r.key.phase for r in tt.open(run_path)} == {"forward", "state"}
    assert model.weight.grad is not None


def test_a_deep_copy_is_silent(run_path: Path) -> None:
    model = zoo.Shared()
    with tt.capture(model, run_path, kinds=ALL_KINDS) as tap:
        other = copy.deepcopy(model)
        zoo.loss_of(other(zoo.batch())).backward()
        pickled = pickle.loads(pickle.dumps(model))  # noqa: S301  # our own bytes
        zoo.loss_of(pickled(zoo.batch())).backward()
        torch.save(model, io.BytesIO())
        tap.step()
        assert all(row.calls == 0 for row in tap.coverage)
    assert len(tt.open(run_path)) == 0


def test_two_taps_on_one_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.Residual()
    outer = tt.capture(model, tmp_path / "outer", kinds=ALL_KINDS)
    with tt.capture(model, tmp_path / "inner", kinds=ALL_KINDS) as inner:
        zoo.loss_of(model(zoo.batch())).backward()
        outer.step()
        outer.close()
        inner.step()
        zoo.loss_of(model(zoo.batch())).backward()
        inner.step()
    assert hooks_on(model) == 0
    first, second = everything(tt.open(tmp_path / "outer")), everything(tt.open(tmp_path / "inner"))
    assert first == {k: v for k, v in second.items() if k.step == 0}
    assert {k.step for k in second} == {0, 1}


def test_a_forgotten_tap_is_closed_at_exit(run_path: Path) -> None:
    script = f"""
import torch, tensortap as tt
model = torch.nn.Linear(4, 4)
tap = tt.capture(model, {str(run_path)!r}, keep="tensors")
model(torch.ones(2, 4)).sum().backward()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    run = tt.open(run_path)
    assert run.finished and len(run) > 0


def test_a_tap_that_cannot_be_opened_leaves_nothing(run_path: Path) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(tt.TensortapError, match="optimizer"):
        tt.capture(model, run_path, optimizer=object())
    assert hooks_on(model) == 0
    run_path.with_name("file").write_text("in the way")
    with pytest.raises(tt.TensortapError):
        tt.capture(model, run_path.with_name("file"))
    assert hooks_on(model) == 0


def test_an_existing_run_is_not_overwritten(run_path: Path) -> None:
    model = nn.Linear(4, 4)
    tapped(model, run_path)
    before = everything(tt.open(run_path))
    with pytest.raises(FileExistsError, match="overwrite"):
        tt.capture(model, run_path)
    assert everything(tt.open(run_path)) == before and hooks_on(model) == 0
    tapped(model, run_path, overwrite=True, kinds=("output",))
    assert {r.key.kind for r in tt.open(run_path)} == {"output"}


def test_backward_on_another_thread(run_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.Residual()
    with tt.capture(model, run_path, kinds=ALL_KINDS) as tap:
        loss = zoo.loss_of(model(zoo.batch()))
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
        tap.step()
    assert {r.key.kind for r in tt.open(run_path)} >= {"grad_output", "grad_input", "param_grad"}
