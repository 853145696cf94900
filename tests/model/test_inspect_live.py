"""The order of backward, clearing and step, as it happens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensortap.model.inspect import inspect

paddle = pytest.importorskip("paddle")


class Loop:
    """The same three calls in both frameworks."""

    def __init__(self, name: str) -> None:
        if name == "torch":
            self.model = nn.Linear(3, 2)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.clear = self.optimizer.zero_grad
            self.ones = torch.ones
        else:
            self.model = paddle.nn.Linear(3, 2)
            self.optimizer = paddle.optimizer.SGD(0.1, parameters=self.model.parameters())
            self.clear = self.optimizer.clear_grad
            self.ones = lambda *shape: paddle.ones(shape)

    def backward(self) -> None:
        self.model(self.ones(2, 3)).sum().backward()

    def run(self, moves: str) -> list[str]:
        """b: backward, c: clear, s: step."""
        with inspect(self.model, self.optimizer).watch() as live:
            for move in moves:
                if move == "b":
                    self.backward()
                elif move == "c":
                    # Looked up anew, as a script does.
                    getattr(self.optimizer, self.clear.__name__)()
                else:
                    self.optimizer.step()
        self.live = live
        return [warning.code for warning in live.warnings]


@pytest.fixture(params=["torch", "paddle"])
def loop(request: pytest.FixtureRequest) -> Loop:
    return Loop(request.param)


@pytest.mark.parametrize("moves", ["cbscbscbs", "bscbsc", "bbscbbs", "bcbs", "b", ""])
def test_usual_loops_are_fine(loop: Loop, moves: str) -> None:
    assert loop.run(moves) == []


@pytest.mark.parametrize(
    ("moves", "code"),
    [
        ("bcs", "cleared-before-step"),
        ("cs", "step-without-backward"),
        ("bsbs", "not-cleared"),
        ("bss", "step-without-backward"),
    ],
)
def test_mistakes_are_noticed(loop: Loop, moves: str, code: str) -> None:
    assert loop.run(moves) == [code]


def test_texts_of_warnings(loop: Loop) -> None:
    loop.run("bcs")
    name = "zero_grad" if isinstance(loop.model, nn.Module) else "clear_grad"
    text = " ".join(str(loop.live).split())
    assert f"optimizer.{name}() came between backward and step and cleared 2 of 2 gradients" in text
    assert "(step 0)" in str(loop.live)


def test_the_model_may_clear_gradients_too() -> None:
    loop = Loop("torch")
    with inspect(loop.model, loop.optimizer).watch() as live:
        loop.backward()
        loop.model.zero_grad(set_to_none=False)
        loop.optimizer.step()
    assert "model.zero_grad() came between" in str(live)


def test_a_closure_clears_and_computes_inside_the_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum() ** 2
        loss.backward()
        return loss

    with inspect(model, optimizer).watch() as live:
        optimizer.step(closure)
        optimizer.step(closure)
    assert live.warnings == [] and live.steps == 2


def test_an_unused_parameter_is_named() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inspect(model, optimizer).watch() as live:
        model[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [(w.code, w.names) for w in live.warnings] == [("no-gradient", ("1.weight", "1.bias"))]


def test_watching_leaves_no_hook_and_is_bit_identical(loop: Loop) -> None:
    own = [dict(vars(thing)) for thing in (loop.model, loop.optimizer)]
    with pytest.raises(KeyError), inspect(loop.model, loop.optimizer).watch():
        loop.backward()
        raise KeyError
    for thing, before in zip((loop.model, loop.optimizer), own, strict=True):
        assert set(vars(thing)) == set(before)
    if isinstance(loop.model, nn.Module):
        assert not loop.model.weight._backward_hooks
        assert not loop.optimizer._optimizer_step_pre_hooks and not loop.optimizer._optimizer_step_post_hooks


def test_a_schedule_made_inside_still_works() -> None:
    loop = Loop("torch")
    with inspect(loop.model, loop.optimizer).watch() as live:
        schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
        loop.backward()
        loop.optimizer.step()
        schedule.step()
    assert live.warnings == []
