"""Hooks around paddle's layers: with post-hooks that run when a layer raises (3.3), and without them (3.0 to 3.2)."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from support.tapping import coverage, values

paddle = pytest.importorskip("paddle")
nn = paddle.nn
paddle_calls = pytest.importorskip("tensortap.frameworks.paddle.calls")


@pytest.fixture(params=["always called", "not called when raising"], autouse=True)
def post_hooks(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "not called when raising":
        monkeypatch.setattr(paddle_calls, "_ALWAYS_CALLS", False)
    elif not paddle_calls._ALWAYS_CALLS:
        pytest.skip("this version of paddle has no always_call")


class Fails(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Any, *, fail: bool = False, again: int = 0) -> Any:
        x = self.fc(x)
        if fail:
            raise ZeroDivisionError
        return self(x, again=again - 1) if again else x


class Forgives(nn.Layer):
    """Catches the exception of its child, and calls the child again."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Fails()

    def forward(self, x: Any) -> Any:
        try:
            return self.part(x, fail=True)
        except ZeroDivisionError:
            return self.part(x)


def batch() -> Any:
    return paddle.to_tensor(np.arange(8, dtype=np.float32).reshape(2, 4))


def test_a_forward_that_raised_is_over(run_path: Path) -> None:
    model = Fails()
    before = {name: set(vars(layer)) for name, layer in model.named_sublayers(include_self=True)}
    with tt.capture(model, run_path, keep="tensors") as tap:
        with pytest.raises(ZeroDivisionError):
            model(batch(), fail=True)
        model(batch()).sum().backward()
        tap.step()
    assert {name: set(vars(layer)) for name, layer in model.named_sublayers(include_self=True)} == before
    run = tt.open(run_path)
    assert [r.key.micro for r in run.records(module="", kind="input")] == [0, 1]
    assert [(r.key.micro, r.key.call) for r in run.records(module="", kind="output")] == [(1, 0)]
    assert coverage(tap)[""][0] == "seen"


def test_an_error_that_the_model_catches_itself(run_path: Path) -> None:
    model = Forgives()
    with tt.capture(model, run_path, keep="tensors") as tap:
        out = model(batch())
        out.sum().backward()
        tap.step()
    run = tt.open(run_path)
    outputs = values(run, "output")
    assert [key for key in outputs if key[0] in ("", "part")] == [("part", 1, "0"), ("", 0, "0")]
    assert np.array_equal(outputs["part", 1, "0"], out.numpy())
    assert {r.key.micro for r in run} == {0}


def test_a_layer_that_calls_itself_with_keywords(run_path: Path) -> None:
    model = Fails()
    with tt.capture(model, run_path, keep="tensors") as tap:
        model(batch(), again=2).sum().backward()
        tap.step()
    run = tt.open(run_path)
    assert sorted(r.key.call for r in run.records(module="", kind="output")) == [0, 1, 2]
    assert [run.arguments(r)["again"] for r in run.records(module="", kind="input")] == [2, 1, 0]


def test_copies_of_a_tapped_model_are_silent_and_work(run_path: Path) -> None:
    model = Forgives()
    with tt.capture(model, run_path) as tap:
        twin = copy.deepcopy(model)
        assert twin.part._dygraph_call_func.__self__ is twin.part
        found = twin(batch()).numpy()
        assert coverage(tap)[""][0] == "never called"
    assert np.array_equal(found, model(batch()).numpy())


def test_a_layer_without_parameters_is_pickled_without_the_tap(run_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Softmax())
    with tt.capture(model, run_path) as tap:
        twin = pickle.loads(pickle.dumps(model))  # noqa: S301
        twin(batch())
        assert coverage(tap)[""][0] == "never called"
