"""Evaluation between training steps is neither recorded nor counted; a run that never trains is recorded whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from support.tapping import everything


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield
    model.train()


def by_mode(model: nn.Module, x: torch.Tensor) -> None:
    with in_eval_mode(model):
        model(x)


def by_no_grad(model: nn.Module, x: torch.Tensor) -> None:
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}  # training mode moves batch norm's
    random = torch.get_rng_state()
    with torch.no_grad():
        model(x)
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])
    torch.set_rng_state(random)


def by_inference_mode(model: nn.Module, x: torch.Tensor) -> None:
    with in_eval_mode(model), torch.inference_mode():
        for _ in range(3):
            model(x)


def by_part(model: nn.Module, x: torch.Tensor) -> None:
    """A part of the model is called, not its root."""
    with in_eval_mode(model), torch.no_grad():
        model[0](x)


def interrupted(model: nn.Module, x: torch.Tensor) -> None:
    """The evaluation fails between two modules, and the loop goes on."""
    hook = model[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with in_eval_mode(model), torch.no_grad():
        try:
            model(x)
        except KeyboardInterrupt:
            hook.remove()


Evaluate = Callable[[nn.Module, torch.Tensor], None]
EVALUATIONS: list[Evaluate] = [by_mode, by_no_grad, by_inference_mode, by_part, interrupted]


def train(
    path: Path | None,
    evaluate: Evaluate | None,
    counted: str,
    micro_steps: int = 2,
    before: Evaluate | None = None,
    **options: Any,
) -> Any:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    given = optimizer if counted == "optimizer=" else None
    with tt.capture(model, path, optimizer=given, **options) as tap:
        if before is not None:
            before(model, torch.ones(5, 4))
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(micro_steps):
                model(torch.randn(6, 4, generator=data)).square().sum().backward()
            optimizer.step()
            if counted == "tap.step()":
                tap.step()
            if evaluate is not None:
                evaluate(model, torch.ones(5, 4))
    return tap


@pytest.mark.parametrize("counted", ["tap.step()", "optimizer="])
@pytest.mark.parametrize("evaluate", EVALUATIONS)
def test_with_and_without_evaluation_the_same_is_recorded(tmp_path: Path, evaluate: Evaluate, counted: str) -> None:
    train(tmp_path / "plain", None, counted)
    tap = train(tmp_path / "evaluated", evaluate, counted)
    plain, evaluated = tt.open(tmp_path / "plain"), tt.open(tmp_path / "evaluated")
    assert everything(plain) == everything(evaluated)
    assert evaluated.steps == [0, 1, 2]  # no fourth one after the last evaluation
    assert tt.compare(plain, evaluated).verdict == "match"
    assert any("of an evaluation" in notice for notice in tap.notices)


@pytest.mark.parametrize("counted", ["tap.step()", "optimizer="])
@pytest.mark.parametrize("evaluate", EVALUATIONS)
def test_evaluation_before_the_training_is_no_part_of_it(tmp_path: Path, evaluate: Evaluate, counted: str) -> None:
    """A baseline or a sanity check. Without an optimizer, it shows only at the first training forward."""
    alone = train(tmp_path / "plain", None, counted, keep="tensors")
    tap = train(tmp_path / "evaluated", None, counted, before=evaluate, keep="tensors")
    plain, evaluated = tt.open(tmp_path / "plain"), tt.open(tmp_path / "evaluated")
    assert everything(plain) == everything(evaluated)
    assert list(plain.loop()) == list(evaluated.loop()) or evaluate is interrupted
    assert [(row.module, row.calls) for row in alone.coverage] == [(row.module, row.calls) for row in tap.coverage]
    assert any("of an evaluation" in notice for notice in evaluated.notices)
    assert tt.compare(plain, evaluated).verdict == "match"
    assert not list((tmp_path / "evaluated").glob("**/*.partial"))


def test_evaluation_before_the_training_in_memory_and_with_recorded_evaluation() -> None:
    plain = train(None, None, "tap.step()").run
    tap = train(None, by_no_grad, "tap.step()", before=by_no_grad, evaluation=True)
    assert everything(plain) == {key: value for key, value in everything(tap.run).items() if key.phase != "eval"}
    assert any("1 forward before the training began not recorded" in notice for notice in tap.notices)


def test_training_in_eval_mode_is_no_trial(tmp_path: Path) -> None:
    model = net().eval()
    with tt.capture(model, tmp_path / "a") as tap:
        model(torch.ones(2, 4)).sum().backward()
        model.train()
        model(torch.ones(2, 4)).sum().backward()
        tap.step()
    assert {r.key.micro for r in tt.open(tmp_path / "a").records(kind="output")} == {0, 1}


def test_evaluation_inside_a_step_is_not_a_micro_step(tmp_path: Path) -> None:
    """The model computes its own targets without autograd in each step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, tmp_path / "a", optimizer=optimizer):
        for _ in range(2):
            with torch.no_grad():
                target = model(torch.ones(3, 4))
            (model(torch.ones(3, 4)) - target).square().sum().backward()
            optimizer.step()
    assert {r.key.micro for r in tt.open(tmp_path / "a")} == {0}


def test_a_step_that_is_chosen_late_knows_that_the_run_trains(tmp_path: Path) -> None:
    train(tmp_path / "plain", None, "tap.step()", steps=[2])
    train(tmp_path / "evaluated", by_inference_mode, "tap.step()", steps=[2])
    assert everything(tt.open(tmp_path / "plain")) == everything(tt.open(tmp_path / "evaluated"))


@pytest.mark.parametrize("autograd", [False, True])
def test_a_run_that_never_trains_is_recorded_whole(tmp_path: Path, autograd: bool) -> None:
    model = net().eval()
    with tt.capture(model, tmp_path / "a") as tap, torch.set_grad_enabled(autograd):
        for _ in range(3):
            model(torch.ones(2, 4))
    assert {r.key.micro for r in tt.open(tmp_path / "a")} == {0, 1, 2}
    assert not tap.notices


def test_a_model_that_is_trained_in_eval_mode(tmp_path: Path) -> None:
    model = net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, tmp_path / "a", optimizer=optimizer):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert tt.open(tmp_path / "a").steps == [0, 1]


def test_a_model_that_changes_to_eval_mode_and_is_trained_on(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, tmp_path / "a", optimizer=optimizer) as tap:
        for step in range(4):
            model.train(step == 0)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert {r.key.step for r in tt.open(tmp_path / "a").records(kind="output")} == {0, 2, 3}
    assert any("count as training" in notice for notice in tap.notices)


def test_the_first_forward_of_a_reentrant_checkpoint_is_training(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, tmp_path / "a", optimizer=optimizer):
        for _ in range(2):
            x = torch.ones(2, 4, requires_grad=True)
            checkpoint(model, x, use_reentrant=True).sum().backward()
            optimizer.step()
    run = tt.open(tmp_path / "a")
    assert run.steps == [0, 1] and len(list(run.records(step=1, module="4", kind="output"))) == 1


def test_a_check_ignores_evaluation_too(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.linspace(-1, 1, 24).reshape(6, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def new() -> tuple[nn.Module, Any]:
        model = net()
        model[3].p = 0.0
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    model, optimizer = new()
    with tt.capture(model, tmp_path / "reference", keep="tensors", optimizer=optimizer):
        for _ in range(2):
            step(model, optimizer)
    model, optimizer = new()
    with tt.check(model, tmp_path / "reference", optimizer=optimizer) as check:
        for _ in range(2):
            step(model, optimizer)
            by_inference_mode(model, torch.ones(5, 4))
    assert check.result.verdict == "match" and not check.result.unmatched


def test_paddle(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    for name in ("plain", "evaluated"):
        paddle.seed(0)
        model = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 2))
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        with tt.capture(model, tmp_path / name, optimizer=optimizer):
            for _ in range(2):
                model(paddle.ones([3, 4])).sum().backward()
                optimizer.step()
                optimizer.clear_grad()
                if name == "evaluated":
                    model.eval()
                    with paddle.no_grad():
                        model(paddle.ones([2, 4]))
                    model.train()
    assert everything(tt.open(tmp_path / "plain")) == everything(tt.open(tmp_path / "evaluated"))
