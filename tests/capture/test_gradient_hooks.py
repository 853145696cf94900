"""Hooks on gradients of outputs. In a planned step, torch's own C++ interface places them where it is built."""

from __future__ import annotations

import gc
import weakref
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


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of hooks that its compiler runs outside of the graph
@pytest.mark.parametrize("language", ["C++", "Python"], indirect=True)
def test_compiled_autograd_calls_the_hooks(language: str, tmp_path: Path) -> None:
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    tapped, x = model(), torch.randn(3, 4)
    with tt.capture(tapped, tmp_path / "run") as tap:
        for step in range(5):
            loss = tapped(x).sum()
            if step < 3:
                loss.backward()
            else:
                with compiled_autograd._enable(torch.compile(backend="eager")):
                    loss.backward()
            tap.step()
    run = tt.open(tmp_path / "run")
    assert len(gradients(run, 0)) == 6
    assert all(gradients(run, step) == gradients(run, 0) for step in range(1, 5))
