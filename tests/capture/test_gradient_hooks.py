"""Hooks on gradients of outputs. In a planned step, torch's own C++ interface places them where it is built."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.fake_gpu import choose_language


class Doubled(nn.Module):
    """Doubles the gradient of what it returns, by a hook of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 3
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x


class Views(nn.Module):
    """Changes outputs that are views: a linear layer with a bias returns one for three dimensions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True) if how == "by a module" else nn.Tanh()
        self.others = nn.ModuleList(nn.Linear(4, 4) for _ in range(20 if how == "among many" else 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        how, y = self.how, self.first(x)
        assert y._is_view()
        before = y * 2 if how == "used before" else y
        for other in self.others:
            y = y + other(x)
        if how in ("by code", "used before"):
            y += 1
        elif how == "in part":
            y[:, :1].mul_(2)
        elif how == "twice":
            y += 1
            self.last(x)
            y *= 3
        elif how == "among many":
            made = [other(x) for other in self.others]
            for each in made:
                each.mul_(2)
            y = y + sum(made)
        elif how == "never used":
            y = self.last(x)
            self.first(x).add_(1)
        y = self.act(y)
        result = self.last(y)
        return result + before if how == "used before" else result  # type: ignore[no-any-return]


HOW = ["not at all", "by a module", "by code", "used before", "in part", "twice", "among many", "never used"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), Doubled(), nn.Linear(4, 4, bias=False), nn.Tanh())


@pytest.fixture(params=["C++", "C", "Python"])
def language(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    choose_language(monkeypatch, request.param)
    return str(request.param)


def gradients(run: Any, step: int) -> dict[tuple[str, str], int]:
    return {
        (record.key.module, record.key.path): record.summary.digest
        for record in run.records()
        if record.key.step == step and record.key.kind == "grad_output"
    }


def test_hooks_of_the_user_keep_their_order_and_effect(language: str, tmp_path: Path) -> None:
    tapped, plain = model(), model()
    x = torch.randn(3, 4)
    with tt.capture(tapped, tmp_path / "run") as tap:
        for _ in range(5):
            outputs = [each(x) for each in (tapped, plain)]
            seen: list[torch.Tensor] = []
            outputs[0].register_hook(lambda gradient, seen=seen: seen.append(gradient) or 4 * gradient)  # type: ignore[misc]
            outputs[1].register_hook(lambda gradient: 4 * gradient)
            for each in outputs:
                each.sum().backward()
            tap.step()
            assert len(seen) == 1
    for one, other in zip(tapped.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    run = tt.open(tmp_path / "run")
    first, *others = (gradients(run, step) for step in range(5))
    assert set(first) == {("", "0")} | {(str(number), "0") for number in range(5)}
    assert all(each == first for each in others), "planned steps see what the first one saw"


def test_a_graph_that_outlives_its_step_reports_nothing_and_keeps_nothing(language: str, tmp_path: Path) -> None:
    tapped, x = model(), torch.randn(3, 4)
    kept = []
    with tt.capture(tapped, tmp_path / "run") as tap:
        for step in range(6):
            loss = tapped(x).sum()
            loss.backward(retain_graph=True)
            kept.append(loss)
            tap.step()
            if step == 4:
                kept[3].backward()  # a step that is over; its graph goes with that
        known = weakref.ref(tap)
    kept[-1].backward()
    run = tt.open(tmp_path / "run")
    assert all(gradients(run, step) == gradients(run, 0) for step in range(4))
    assert len([record for record in run.records() if record.key.kind == "grad_output"]) == 6 * 6
    del tap
    gc.collect()
    assert known() is None, "graphs that are kept do not keep the tap"


def test_an_exception_in_a_hook_of_the_user_ends_the_backward(language: str, tmp_path: Path) -> None:
    tapped, x = model(), torch.randn(3, 4)

    def fail(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tt.capture(tapped, tmp_path / "run") as tap:
        for step in range(4):
            output = tapped(x)
            if step == 3:
                output.register_hook(fail)
            output.sum().backward()
            tap.step()
    assert gradients(tt.open(tmp_path / "run"), 2) == gradients(tt.open(tmp_path / "run"), 0)


def run_with_compiled_autograd(tapped: nn.Module, loss_of: Callable[[], torch.Tensor], path: Path) -> Any:
    """Record five steps, of which the last two have a compiled backward."""
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    with tt.capture(tapped, path) as tap:
        for step in range(5):
            loss = loss_of()
            if step < 3:
                loss.backward()
            else:
                with compiled_autograd._enable(torch.compile(backend="eager")):
                    loss.backward()
            tap.step()
    return tt.open(path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of hooks that its compiler runs outside of the graph
@pytest.mark.parametrize("language", ["C++", "Python"], indirect=True)
def test_compiled_autograd_calls_the_hooks(language: str, tmp_path: Path) -> None:
    tapped, x = model(), torch.randn(3, 4)
    run = run_with_compiled_autograd(tapped, lambda: tapped(x).sum(), tmp_path / "run")
    assert len(gradients(run, 0)) == 6
    assert all(gradients(run, step) == gradients(run, 0) for step in range(1, 5))


def sequence(run: Any, step: int) -> list[tuple[Any, ...]]:
    """The gradients of a step in the order in which they came."""
    found = [record for record in run.records() if record.key.step == step and record.key.kind == "grad_output"]
    found.sort(key=lambda record: record.seq)
    return [(*record.key[3:], record.shape, record.summary.digest) for record in found]


@pytest.mark.parametrize("how", HOW)
def test_views_that_change_in_place(language: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain, tapped = Views(how), Views(how)
    tapped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 4, requires_grad=True)
    with tt.capture(tapped, tmp_path / "run", kinds=("output", "grad_output")) as tap:
        for _ in range(6):
            for each in (plain, tapped):
                each.zero_grad()
                each(x).square().sum().backward()
            tap.step()
    for one, other in zip(tapped.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    run = tt.open(tmp_path / "run")
    first = sequence(run, 0)
    assert len(first) == (40 if how == "among many" else 4), "only the newest views are looked at"
    assert "first" in {row[0] for row in first} or how == "never used"
    for step in range(1, 6):
        assert sequence(run, step) == first, f"step {step}"


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of hooks that its compiler runs outside of the graph
@pytest.mark.parametrize("language", ["C++", "Python"], indirect=True)
@pytest.mark.parametrize("how", ["not at all", "by a module", "used before"])
def test_compiled_autograd_calls_the_hooks_of_views(language: str, how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tapped, x = Views(how), torch.randn(2, 3, 4)
    run = run_with_compiled_autograd(tapped, lambda: tapped(x).square().sum(), tmp_path / "run")
    assert len(gradients(run, 0)) == 4
    for step in range(1, 5):
        assert gradients(run, step) == gradients(run, 0), f"step {step}"
