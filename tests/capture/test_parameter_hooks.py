"""Hooks on parameters stay from step to step, and are moved when they are no longer where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import hooks_on
from tensortap.capture.modules import own_tensors
from tensortap.frameworks.torch.framework import Torch
from tensortap.kernels import summarize


def hooks_of(parameter: torch.Tensor) -> list[Any]:
    return list(parameter._backward_hooks or ())


def step(model: nn.Module, tap: Any) -> dict[str, torch.Tensor]:
    """The gradients that the optimizer would get."""
    model.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    tap.step()
    return found


def recorded(path: Path, number: int) -> dict[str, int]:
    records = [r for r in tt.open(path) if r.key.step == number and r.key.kind == "param_grad"]
    return {f"{r.key.module}.{r.key.path}": int(r.summary.digest) for r in records}


def digests(gradients: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: int(summarize(gradient.numpy()).digest) for name, gradient in gradients.items()}


def model_of_two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def test_they_stay_and_come_off(tmp_path: Path) -> None:
    model = model_of_two()
    seen = []
    with tt.capture(model, tmp_path / "a") as tap:
        for _ in range(3):
            step(model, tap)
            seen.append([hooks_of(p) for p in model.parameters()])
    assert seen[0] == seen[1] == seen[2] and all(len(hooks) == 1 for hooks in seen[0])
    assert hooks_on(model) == 0


def test_a_parameter_that_was_replaced(tmp_path: Path) -> None:
    model = model_of_two()
    old = model[0].weight
    with tt.capture(model, tmp_path / "a") as tap:
        step(model, tap)
        model[0].weight = nn.Parameter(torch.randn(8, 8))
        gradients = step(model, tap)
        assert not hooks_of(old) and hooks_of(model[0].weight)
    assert recorded(tmp_path / "a", 1) == digests(gradients)


def test_a_parameter_that_was_taken_away(tmp_path: Path) -> None:
    model = model_of_two()
    bias = model[1].bias
    with tt.capture(model, tmp_path / "a") as tap:
        step(model, tap)
        model[1].bias = None
        gradients = step(model, tap)
        assert not hooks_of(bias)
    assert recorded(tmp_path / "a", 1) == digests(gradients) and "1.bias" not in gradients


def test_a_gradient_replaced_by_a_users_hook_is_recorded(tmp_path: Path) -> None:
    model = model_of_two()
    gradients = []
    with tt.capture(model, tmp_path / "a") as tap:
        gradients.append(step(model, tap))
        handle = model[0].weight.register_hook(lambda gradient: gradient * 2)
        gradients.append(step(model, tap))
        gradients.append(step(model, tap))
        handle.remove()
        gradients.append(step(model, tap))
    for number, each in enumerate(gradients):
        assert recorded(tmp_path / "a", number) == digests(each)


def test_one_that_is_frozen_for_a_while(tmp_path: Path) -> None:
    model = model_of_two()
    model[0].weight.requires_grad_(False)
    gradients = []
    with tt.capture(model, tmp_path / "a") as tap:
        for frozen in (True, False, True, False):
            model[0].weight.requires_grad_(not frozen)
            model[0].weight.grad = None
            gradients.append(step(model, tap))
            assert ("0.weight" in gradients[-1]) != frozen
    for number, each in enumerate(gradients):
        assert recorded(tmp_path / "a", number) == digests(each)


def test_there_are_no_hooks_in_an_unrecorded_step(tmp_path: Path) -> None:
    model = model_of_two()
    seen = []
    with tt.capture(model, tmp_path / "a", steps=[0, 2]) as tap:
        for _ in range(4):
            step(model, tap)
            seen.append([len(hooks_of(p)) for p in model.parameters()])
    assert seen == [[0] * 4, [0] * 4, [0] * 4, [0] * 4], "after each step the next one decides"
    assert {r.key.step for r in tt.open(tmp_path / "a") if r.key.kind == "param_grad"} == {0, 2}


def test_a_backward_after_its_step_belongs_to_no_step(tmp_path: Path) -> None:
    model = model_of_two()
    with tt.capture(model, tmp_path / "a") as tap:
        step(model, tap)
        loss = model(torch.randn(4, 8)).sum()
        tap.step()
        loss.backward()
        tap.step()
        gradients = step(model, tap)
    assert not recorded(tmp_path / "a", 1) and not recorded(tmp_path / "a", 2)
    assert recorded(tmp_path / "a", 3) == digests(gradients)


@pytest.mark.parametrize("kinds", ["param_grad", ("output", "param_grad")])
def test_two_taps_do_not_push_each_other_off(tmp_path: Path, kinds: Any) -> None:
    model = model_of_two()
    gradients = []
    with tt.capture(model, tmp_path / "a", kinds=kinds) as one, tt.capture(model, tmp_path / "b", kinds=kinds) as other:
        for _ in range(3):
            gradients.append(step(model, one))
            other.step()
    for number, each in enumerate(gradients):
        assert recorded(tmp_path / "a", number) == recorded(tmp_path / "b", number) == digests(each)
    assert hooks_on(model) == 0


def test_an_error_half_way_leaves_no_hook_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with tt.capture(model, tmp_path / "a", on_error="warn") as tap:
        step(model, tap)
        model[2].weight = nn.Parameter(torch.randn(8, 8))

        def fail(self: Any, parameter: Any, seen: Any) -> Any:
            raise ValueError("no hooks here")

        monkeypatch.setattr(Torch, "on_parameter_gradient", fail)
        step(model, tap)
        assert "no hooks here" in capsys.readouterr().err
    assert hooks_on(model) == 0


def test_an_interrupt_half_way_has_nothing_recorded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    stays = Torch.hook_is_current
    asked: list[None] = []

    def interrupted(self: Torch, parameter: Any, remove: Any) -> bool:
        asked.append(None)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return stays(self, parameter, remove)

    monkeypatch.setattr(Torch, "hook_is_current", interrupted)
    monkeypatch.setattr(own_tensors, "identify_hooks", lambda *_: None)  # so each hook is looked for
    with tt.capture(model, tmp_path / "a") as tap:
        step(model, tap)
        with pytest.raises(KeyboardInterrupt):
            step(model, tap)
        tap.step()
        gradients = step(model, tap)
    assert recorded(tmp_path / "a", 2) == digests(gradients)
    assert hooks_on(model) == 0


def test_no_empty_table_of_hooks_remains(tmp_path: Path) -> None:
    """Torch would enter Python for it at every gradient. A table that others use stays."""
    model = model_of_two()
    handle = model[1].weight.register_hook(lambda gradient: None)
    with tt.capture(model, tmp_path / "a", steps=[0]) as tap:
        step(model, tap)
        assert model[0].weight._backward_hooks is None  # from the first step on that is not recorded
    assert model[0].weight._backward_hooks is None and hooks_of(model[1].weight) == [handle.id]
