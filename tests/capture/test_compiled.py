"""Compiled modules: seen from outside without touching the graph, or run eagerly when asked; never a silent hole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, coverage, everything, hooks_on, tapped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Graphs:
    """A compiler backend that runs the graph as it is and counts how often it was called on."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def test_a_compiled_model_is_seen_at_its_boundary_in_one_graph(run_path: Path) -> None:
    graphs = Graphs()
    model = torch.compile(net(), backend=graphs)
    run, tap = tapped(model, run_path, steps=2)
    assert graphs.count == 1  # not broken at hooks, not compiled again
    assert {r.key.module for r in run.records(kind=("input", "output", "grad_output"))} == {""}
    assert {r.cls for r in run.records(module="")} == {"Sequential"}
    assert coverage(tap)["0"] == ("skipped", "runs inside the compiled graph of (root)")
    assert {r.key.module for r in run.records(kind="param_grad")} == {"0", "2"}
    assert hooks_on(model) == 0


def test_a_model_compiled_and_called_before_the_tap(run_path: Path) -> None:
    model = torch.compile(net(), backend="eager")
    model(zoo.batch())
    run, tap = tapped(model, run_path)
    assert {r.key.module for r in run.records(kind="output")} == {""}
    assert coverage(tap)["2"][0] == "skipped"


@pytest.mark.parametrize("warm", [False, True])
def test_a_submodule_compiled_in_place(run_path: Path, warm: bool) -> None:
    model = nn.Sequential(net(), nn.Linear(4, 4))
    model[0].compile(backend="eager")
    if warm:
        model(zoo.batch())
    compiled = model[0]._compiled_call_impl
    run, tap = tapped(model, run_path)
    assert {r.key.module for r in run.records(kind="output")} == {"", "0", "1"}
    assert {r.key.module for r in run.records(kind="grad_output")} == {"", "0", "1"}
    assert coverage(tap)["0.0"] == ("skipped", "runs inside the compiled graph of 0")
    assert model[0]._compiled_call_impl is compiled


def test_two_taps_on_a_module_compiled_in_place_leave_in_any_order(tmp_path: Path) -> None:
    model = net()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    first, second = tt.capture(model, tmp_path / "first"), tt.capture(model, tmp_path / "second")
    model(zoo.batch())
    first.close()
    model(zoo.batch())
    second.close()
    assert model._compiled_call_impl is compiled
    assert len(tt.open(tmp_path / "first")) < len(tt.open(tmp_path / "second"))


def test_a_compiled_function_around_a_tapped_model_is_not_broken_up(run_path: Path) -> None:
    graphs, model = Graphs(), net()
    function = torch.compile(lambda x: model(x) * 2, backend=graphs)
    with tt.capture(model, run_path) as tap:
        for _ in range(2):
            zoo.loss_of(function(zoo.batch())).backward()
            tap.step()
    assert graphs.count == 1
    assert coverage(tap)["0"][0] == "never called"
    [notice] = tap.notices
    assert "no module of the tapped model ran" in notice and 'compiled="eager"' in notice


def test_eager_sees_everything_and_reports_it(tmp_path: Path) -> None:
    plain, _ = tapped(net(), tmp_path / "plain")
    eager, tap = tapped(torch.compile(net(), backend="eager"), tmp_path / "eager", compiled="eager")
    assert everything(plain) == everything(eager)
    assert any("uncompiled" in notice for notice in tap.notices)
    assert any("uncompiled" in notice for notice in tt.open(tmp_path / "eager").notices)


def test_results_of_a_compiled_model_do_not_move(run_path: Path) -> None:
    def losses(path: Path | None) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = torch.compile(net(), backend="aot_eager")
        tap = None if path is None else tt.capture(model, path, kinds=ALL_KINDS)
        found = []
        for seed in range(2):
            loss = zoo.loss_of(model(zoo.batch(seed=seed)))
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        if tap is not None:
            tap.close()
        return found

    assert all(map(torch.equal, losses(None), losses(run_path)))
