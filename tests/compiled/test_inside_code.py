"""What taps inside compiled graphs do to the code: compiled again with taps, then without, and nothing remains."""

from __future__ import annotations

import copy
import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import tensortap as tt
from support import zoo
from support.compiling import NONE, compile_layers, differences, graph_breaks, graphs, train, untapped_gradients
from support.tapping import hooks_on
from tensortap.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Sliced(nn.Module):
    """Slices its list of modules in forward, which makes a new list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return x


def built(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return zoo.Checkpointed(None).to(dtype)


def step(model: Any) -> torch.Tensor:
    return zoo.loss_of(model(zoo.batch().to(next(model.parameters()).dtype)))


@pytest.mark.parametrize("how", ["whole", "layers"])
def test_a_tap_that_is_opened_after_the_first_call(how: str) -> None:
    raw = built()
    model = torch.compile(raw, backend="aot_eager") if how == "whole" else compile_layers(raw, backend="aot_eager")
    before = untapped_gradients(model, step)
    attributes = {name: set(vars(module)) for name, module in raw.named_modules()}
    compiled = [module._compiled_call_impl for module in raw.modules()]
    saved = set(raw.state_dict())
    with tt.capture(model, None, compiled="inside") as tap:
        step(model).backward()
        assert set(raw.state_dict()) == saved
        assert not [name for name, _ in raw.named_buffers() if "tensortap" in name]
        twin = copy.deepcopy(raw)
    assert any("compiled again" in notice for notice in tap.notices)
    assert differences(train(built(), step, steps=1), tap) == NONE
    model.zero_grad()
    after = untapped_gradients(model, step)
    assert all(map(torch.equal, before, after)) and len(before) == len(after)
    assert (hooks_on(raw), hooks_on(twin)) == (0, 0)
    assert {name: set(vars(module)) for name, module in raw.named_modules()} == attributes
    assert [module._compiled_call_impl for module in raw.modules()] == compiled
    assert not any("tensortap" in name for module in twin.modules() for name in vars(module))


def test_code_after_the_tap_has_no_taps() -> None:
    found: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(graph.code)
        return graph.forward

    model = torch.compile(built(), backend=backend)
    step(model)
    with tt.capture(model, None, compiled="inside"):
        step(model)
    step(model)
    assert ["tensortap" in code for code in found] == [False, True, False]
    assert found[0] == found[2]


def test_steps_that_are_not_recorded_run_the_same_code() -> None:
    model = torch.compile(built(), backend="aot_eager")
    with tt.capture(model, None, compiled="inside", steps=[1, 3]) as tap:
        for _ in range(4):
            step(model).backward()
            tap.step()
    assert graphs() == 1
    assert {record.key.step for record in tap.run} == {1, 3}
    assert {record.key.module for record in tap.run.records(kind="output")} >= {"", "blocks.0.fc", "head"}


class Routed(nn.Module):
    """Breaks its graph in a loop, so that its modules run one by one, and those of torch uncompiled."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(self.norm(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Routed.Block(), Routed.Block()])
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            rows = (x[:, number] > 0).nonzero()[:, 0]
            x = x.index_add(0, rows, block(x[rows]))
        return self.head(x)


@pytest.mark.parametrize("build", [Routed, Sliced])
def test_taps_add_neither_breaks_nor_graphs(build: Any) -> None:
    def trained(tapped: bool) -> tuple[Any, tuple[int, int]]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = torch.compile(build(), backend="aot_eager")
        found = train(model, step, steps=1, compiled="inside") if tapped else untapped_gradients(model, step)
        return found, (graph_breaks(), graphs())

    _, plain = trained(False)
    inside, tapped = trained(True)
    assert tapped == plain
    torch.manual_seed(0)
    assert differences(train(build(), step, steps=1), inside) == NONE


@pytest.mark.parametrize("compiled", ["boundary", "inside"])
def test_a_forward_that_slices_a_list_of_modules(compiled: str) -> None:
    model = torch.compile(Sliced(), backend="aot_eager", fullgraph=True)
    tap = train(model, step, compiled=compiled)
    assert graph_breaks() == 0
    assert ("layers.1" in {record.key.module for record in tap.run.records(kind="output")}) == (compiled == "inside")


def test_one_tap_at_a_time() -> None:
    model = torch.compile(built(), backend="aot_eager")
    with tt.capture(model, None, compiled="inside"):
        with pytest.raises(UsageError, match="close it first"):
            tt.capture(model, None, compiled="inside")
        assert hooks_on(model) > 0
    assert hooks_on(model) == 0


def test_emulate_casts_needs_taps_inside() -> None:
    with pytest.raises(UsageError, match="inside"):
        tt.capture(built(), None, emulate_casts=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_rounds_alike_with_and_without_taps() -> None:
    from torch._inductor import config

    eager = train(built(torch.bfloat16), step, steps=1)
    with config.patch(emulate_precision_casts=True):
        plain = untapped_gradients(torch.compile(built(torch.bfloat16), fullgraph=True), step)
    torch._dynamo.reset()
    model = torch.compile(built(torch.bfloat16), fullgraph=True)
    inside = train(model, step, steps=1, compiled="inside", emulate_casts=True)
    found = differences(eager, inside)
    assert (found["missing"], found["extra"]) == ([], [])
    assert all(map(torch.equal, plain[1:], [parameter.grad for parameter in model.parameters()]))
    assert any("emulate_precision_casts" in notice for notice in inside.notices)
    assert not config.emulate_precision_casts


def test_programs_that_raise_warnings_as_errors() -> None:
    raw = built()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tap = train(torch.compile(raw, backend="aot_eager"), step, steps=1, compiled="inside")
    assert differences(train(raw, step, steps=1), tap) == NONE
