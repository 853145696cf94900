"""A tap on the raw model sees its compiled self as a tap on the compiled model does, whenever it was compiled."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import coverage, everything, hooks_on

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A class of the user's own: the compiler runs hooks of such a root outside of the graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.down(torch.tanh(self.up(x)))
        return logits, logits.square().mean()


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Plain(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class Graphs:
    """A backend that counts the graphs that it compiles."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def loss_of(output: Any) -> torch.Tensor:
    return output[1] if isinstance(output, tuple) else output.square().mean()


def losses(called: Any, optimizer: Any, steps: int = 3) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        loss = loss_of(called(torch.arange(12.0).reshape(3, 4) / 7 + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def compiled_before(model: nn.Module, backend: Any) -> Callable[[], Any]:
    compiled = torch.compile(model, backend=backend)
    return lambda: compiled


def compiled_after(model: nn.Module, backend: Any) -> Callable[[], Any]:
    return lambda: torch.compile(model, backend=backend)


def compiled_and_called_before(model: nn.Module, backend: Any) -> Callable[[], Any]:
    compiled = torch.compile(model, backend=backend)
    loss_of(compiled(torch.zeros(3, 4))).backward()
    model.zero_grad()
    return lambda: compiled


def in_place(model: nn.Module, backend: Any) -> Callable[[], Any]:
    def compiled() -> Any:
        model.compile(backend=backend)
        return model

    return compiled


WAYS = [compiled_before, compiled_after, compiled_and_called_before, in_place]


@pytest.mark.parametrize("cls", [Net, Plain])
@pytest.mark.parametrize("way", WAYS)
def test_the_raw_model_is_tapped_and_its_compiled_self_called(way: Any, cls: type[nn.Module]) -> None:
    plain, graphs = cls(), Graphs()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = losses(way(plain, graphs)(), optimizer)
    alone, graphs = graphs.count, Graphs()
    torch._dynamo.reset()
    compiled = torch.compile(cls(), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with tt.capture(compiled, optimizer=optimizer) as reference:
        losses(compiled, optimizer)
    torch._dynamo.reset()

    model = cls()
    get = way(model, graphs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, optimizer=optimizer, on_error="raise") as tap:
        called = get()
        found = losses(called, optimizer)
    losses(called, optimizer)
    assert graphs.count == alone <= 1  # neither broken nor compiled again, also after the tap was closed
    assert all(map(torch.equal, expected, found))
    assert everything(tap.run) == everything(reference.run) and len(tap.run)
    inner = [row for row in tap.coverage if row.module]
    assert all(row.status == "skipped" and "compiled graph of (root)" in row.reason for row in inner)
    assert any("compiled graphs" in notice for notice in tap.notices)
    assert hooks_on(model) == hooks_on(called) == 0


def test_steps_before_compiling_are_seen_inside() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, optimizer=optimizer, kinds="output") as tap:
        losses(model, optimizer, 2)
        losses(torch.compile(model, backend="eager"), optimizer, 2)
    seen = {(r.key.step, r.key.module) for r in tap.run}
    assert seen == {(s, m) for s in (0, 1) for m in ("", "up", "down")} | {(2, ""), (3, "")}
    assert "compiled at step 2" in coverage(tap)[""][1]
    assert coverage(tap)["up"] == ("seen", "in a compiled graph since step 2")


def test_a_step_that_is_not_recorded_moves_the_hooks_too() -> None:
    model, graphs = Plain(), Graphs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, optimizer=optimizer, steps=[2]) as tap:
        losses(torch.compile(model, backend=graphs), optimizer, 4)
    assert graphs.count == 1 and {r.key.module for r in tap.run.records(kind="output")} == {""}
    assert {r.key.step for r in tap.run} == {2}


@pytest.mark.parametrize("way", ["replaced", "in place", "kept outside"])
def test_a_part_that_is_compiled_while_tapped(way: str) -> None:
    model, graphs = Net(), Graphs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, optimizer=optimizer, kinds="output") as tap:
        losses(model, optimizer, 1)
        model.up = Up()
        if way == "replaced":
            model.up = torch.compile(model.up, backend=graphs)
        elif way == "in place":
            model.up.compile(backend=graphs)
        else:
            compiled = torch.compile(model.up, backend=graphs)
            model.__dict__["forward"] = lambda x: (y := model.down(compiled(x)), y.square().mean())
        losses(model, optimizer, 2)
    later = {r.key.module for r in tap.run if r.key.step}
    assert later == {"", "up", "down"} and graphs.count == 1


def test_two_compiled_selves_of_one_model() -> None:
    model = Plain()
    first, second = (torch.compile(model, backend=Graphs()) for _ in range(2))
    with tt.capture(model, kinds="output") as tap:
        first(torch.ones(2, 4)).sum().backward()
        second(torch.ones(2, 4)).sum().backward()
    assert {r.key.micro for r in tap.run} == {0, 1}


def test_eager_still_sees_everything() -> None:
    model = Net()
    with tt.capture(model, compiled="eager", kinds="output") as tap:
        torch.compile(model, backend="eager")(torch.ones(2, 4))[1].backward()
    assert {r.key.module for r in tap.run} == {"", "up", "down"}


def test_torch_is_as_before_afterwards() -> None:
    from torch._dynamo.eval_frame import OptimizedModule

    gc.collect()  # a saving hook of another test may still be there
    listening = set(torch.nn.modules.module._global_module_registration_hooks)
    before = torch.compile, nn.Module.compile, OptimizedModule.__init__
    model = Plain()
    first, second = tt.capture(model), tt.capture(model)
    first.close()
    called = torch.compile(model, backend="eager")
    called(torch.ones(2, 4))
    second.close()
    assert len(second.run)
    assert (torch.compile, nn.Module.compile, OptimizedModule.__init__) == before
    assert torch.nn.modules.module._global_module_registration_hooks.keys() == listening
