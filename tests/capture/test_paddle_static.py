"""Paddle's static programs: `jit.save` inside a tap, and models that `to_static` compiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from support.tapping import coverage, everything

paddle = pytest.importorskip("paddle")
nn = paddle.nn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:paddle")


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return self.second(nn.functional.relu(self.first(x))) * scale


@pytest.fixture(autouse=True)
def no_graph_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """SOT compiles functions of fewer than ten operations only if asked to."""
    monkeypatch.setenv("MIN_GRAPH_SIZE", "0")


def net() -> Any:
    paddle.seed(3)
    return Net()


def batch(seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal((3, 4)), dtype="float32")


def saved(model: Any, path: Path) -> dict[str, bytes]:
    paddle.jit.save(model, str(path / "model"), input_spec=[paddle.static.InputSpec([None, 4], "float32", "x")])
    # Paddle numbers the traces of a process in the names of its scopes.
    return {file.name: re.sub(rb"_\d+/", b"/", file.read_bytes()) for file in path.iterdir()}


def test_jit_save_writes_the_same_files_and_the_tap_continues(tmp_path: Path) -> None:
    model = net()
    plain = saved(model, tmp_path / "plain")
    with tt.capture(model, tmp_path / "run") as tap:
        for step in range(2):
            model(batch(step)).sum().backward()
            if step == 0:
                written = saved(model, tmp_path / "tapped")
            tap.step()
    assert written == plain
    found = paddle.jit.load(str(tmp_path / "tapped" / "model"))(batch(5))
    assert np.array_equal(found.numpy(), model(batch(5)).numpy())
    assert [r.key.step for r in tt.open(tmp_path / "run").records(module="first", kind="output")] == [0, 1]
    assert [(row.status, row.calls, row.reason) for row in tap.coverage] == [("seen", 2, "")] * 3


# --- to_static -----------------------------------------------------------------------------------------------------
both_compilers = pytest.mark.parametrize("full_graph", [False, True], ids=["sot", "ast"])


def trained(model: Any, called: Any, path: Path | None, **options: Any) -> tuple[list[Any], Any]:
    """Two steps under a tap, or under none: losses, gradients and parameters; the tap."""
    tap = None if path is None else tt.capture(model, path, keep="tensors", **options)
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    found = []
    for step in range(2):
        loss = called(batch(step)).square().mean()
        loss.backward()
        found += [loss.numpy(), *(parameter.grad.numpy() for parameter in model.parameters())]
        optimizer.step()
        optimizer.clear_grad()
        if tap is not None:
            tap.step()
    if tap is not None:
        tap.close()
    return found + [parameter.numpy() for parameter in model.parameters()], tap


def same(one: list[Any], two: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@both_compilers
def test_a_compiled_model_is_seen_at_its_boundary(run_path: Path, full_graph: bool) -> None:
    def compiled() -> Any:
        return paddle.jit.to_static(net(), full_graph=full_graph)

    model = compiled()
    found, tap = trained(model, model, run_path)
    plain = compiled()
    assert same(found, trained(plain, plain, None)[0])
    run = tt.open(run_path)
    assert {r.key.module for r in run.records(kind=("input", "output", "grad_output"))} == {""}
    assert {r.key.module for r in run.records(kind="param_grad")} == {"first", "second"}
    assert coverage(tap)["first"] == ("skipped", "runs inside the compiled graph of (root)")
    assert ["2 of 3 modules" in notice and 'compiled="eager"' in notice for notice in run.notices] == [True]


@both_compilers
def test_a_compiled_part_of_a_model(run_path: Path, full_graph: bool) -> None:
    model = nn.Sequential(paddle.jit.to_static(net(), full_graph=full_graph), nn.Linear(2, 2))
    _, tap = trained(model, model, run_path)
    assert {name: status for name, (status, _) in coverage(tap).items()} == {
        "": "seen",
        "0": "seen",
        "0.first": "skipped",
        "0.second": "skipped",
        "1": "seen",
    }


@both_compilers
def test_a_compiled_function_that_calls_the_model_is_reported(run_path: Path, full_graph: bool) -> None:
    def compiled(model: Any) -> Any:
        def function(x: Any) -> Any:
            return model(x) * 2

        return paddle.jit.to_static(function, full_graph=full_graph)

    model, plain = net(), net()
    found, tap = trained(model, compiled(model), run_path)
    assert same(found, trained(plain, compiled(plain), None)[0])
    [notice] = tt.open(run_path).notices
    assert 'compiled="eager"' in notice
    if full_graph:
        assert "no module of the tapped model ran" in notice
    else:  # SOT takes no hooks into its graphs, whatever they do
        assert "hooks break its graph" in notice
        assert [(row.status, row.calls) for row in tap.coverage] == [("seen", 2)] * 3


class Branches(Net):
    """Breaks the graph of SOT, which then runs layer by layer and compiles every frame."""

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        y = self.first(x)
        return self.second(y if float(y.sum()) > 0 else -y)


def test_a_broken_graph_around_model_and_backward(run_path: Path) -> None:
    def losses(path: Path | None) -> tuple[list[Any], Any]:
        paddle.seed(0)
        model = Branches()
        tap = None if path is None else tt.capture(model, path)

        @paddle.jit.to_static(full_graph=False)
        def train(x: Any) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        found = []
        for step in range(3):
            found += [train(batch(step)).numpy(), *(parameter.grad.numpy() for parameter in model.parameters())]
            if tap is not None:
                tap.step()
        if tap is not None:
            tap.close()
        return found, tap

    found, tap = losses(run_path)
    assert same(found, losses(None)[0])
    assert [(row.module, row.status, row.calls) for row in tap.coverage] == [
        ("", "seen", 3),
        ("first", "seen", 3),
        ("second", "seen", 3),
    ]


@both_compilers
def test_eager_sees_everything(tmp_path: Path, full_graph: bool) -> None:
    model = net()
    trained(model, model, tmp_path / "plain")
    model = paddle.jit.to_static(net(), full_graph=full_graph)
    _, tap = trained(model, model, tmp_path / "eager", compiled="eager")
    assert everything(tt.open(tmp_path / "plain")) == everything(tt.open(tmp_path / "eager"))
    assert tap.notices == ["compiled modules ran uncompiled: an error of the compiler cannot show here"]


def translator() -> Any:
    return paddle.jit.dy2static.program_translator.ProgramTranslator.get_instance()


@pytest.mark.parametrize("enabled", [True, False])
def test_eager_leaves_the_users_switch_alone(tmp_path: Path, enabled: bool) -> None:
    paddle.jit.enable_to_static(enabled)
    try:
        first = tt.capture(net(), tmp_path / "first", compiled="eager")
        second = tt.capture(net(), tmp_path / "second", compiled="eager")
        first.close()
        second.close()
        assert translator().enable_to_static is enabled
    finally:
        paddle.jit.enable_to_static(True)


def test_two_eager_taps_leave_in_any_order(tmp_path: Path) -> None:
    model = paddle.jit.to_static(net(), full_graph=True)
    first = tt.capture(net(), tmp_path / "first", compiled="eager")
    second = tt.capture(model, tmp_path / "second", compiled="eager")
    first.close()
    model(batch())
    second.close()
    assert coverage(second)["first"][0] == "no gradient"
    with tt.capture(model, tmp_path / "third") as third:
        model(batch())
    assert coverage(third)["first"][0] == "skipped"


def test_jit_save_under_an_eager_tap(tmp_path: Path) -> None:
    model = net()
    with tt.capture(model, tmp_path / "run", compiled="eager"):
        saved(model, tmp_path / "saved")
    found = paddle.jit.load(str(tmp_path / "saved" / "model"))(batch())
    assert np.array_equal(found.numpy(), model(batch()).numpy())
