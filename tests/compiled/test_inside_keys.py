"""Modules inside compiled graphs are recorded as in eager mode: the same identities, each once, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support import zoo
from support.compiling import (
    KINDS,
    NONE,
    compile_layers,
    compile_whole,
    differences,
    graph_breaks,
    graphs,
    seen_of,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "changes in place": zoo.InPlaceModule,
    "changed afterwards": zoo.InPlaceAfter,
    "changed unseen": zoo.BehindAutograd,
    "views": zoo.Views,
    "nested outputs": zoo.Structured,
    "shared": zoo.Shared,
    "passed through": zoo.PassThrough,
    "residual": zoo.Residual,
    "checkpointed": partial(zoo.Checkpointed, "non_reentrant"),
}
COMPILE = {"whole": compile_whole, "layers": compile_layers}


def step(model: Any) -> torch.Tensor:
    return zoo.loss_of(model(zoo.batch()))


def pair(build: Callable[[], nn.Module], how: str = "whole", step: Any = step, **options: Any) -> tuple[Any, Any]:
    """Return the closed taps of an eager run and of a compiled one."""
    taps = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = build()
        inside = {}
        if compiled:
            model = COMPILE[how](model, backend="aot_eager", fullgraph=True)
            inside = {"compiled": "inside"}
        taps.append(train(model, step, micros=2, **options, **inside))
    return taps[0], taps[1]


@pytest.mark.parametrize("name", MODELS)
def test_awkward_models(name: str) -> None:
    eager, inside = pair(MODELS[name])
    assert differences(eager, inside) == NONE
    assert seen_of(eager) == seen_of(inside)
    assert (graphs(), graph_breaks()) == (1, 0)


@pytest.mark.parametrize("mode", [None, "non_reentrant"])
def test_layer_by_layer(mode: str | None) -> None:
    eager, inside = pair(partial(zoo.Checkpointed, mode), "layers")
    assert differences(eager, inside) == NONE
    assert seen_of(eager) == seen_of(inside)
    assert graph_breaks() == 0


class Layers(nn.Module):
    """Equal layers."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    def __init__(self, count: int = 2, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layers.Layer() for _ in range(count)])
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


@pytest.mark.parametrize("checkpointed", [False, True])
def test_ten_equal_layers_share_their_graphs(checkpointed: bool) -> None:
    eager, inside = pair(partial(Layers, 10, checkpointed), "layers")
    assert differences(eager, inside) == NONE
    assert graphs() <= 2  # the first layer's input needs no gradient


class NormalisedLayers(nn.Module):
    """Layers whose output is that of a module inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("how", COMPILE)
@pytest.mark.parametrize("build", [Layers, NormalisedLayers])
def test_gradients_of_inputs(how: str, build: Any) -> None:
    eager, inside = pair(build, how, kinds=(*KINDS, "grad_input"))
    found = differences(eager, inside)
    assert (found["missing"], found["extra"]) == ([], [])


class OutputAlsoUsed(nn.Module):
    """Returns a tensor that it also uses: its gradient is the sum over both uses."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = self.linear(x)
            weights = scores.softmax(-1)
            return x * weights, scores

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([OutputAlsoUsed.Gate(), OutputAlsoUsed.Gate()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, first = self.gates[0](x)
        x, _ = self.gates[1](x)
        return x + first.square().mean()


@pytest.mark.parametrize("how", COMPILE)
def test_an_output_that_its_module_also_uses(how: str) -> None:
    eager, inside = pair(OutputAlsoUsed, how)
    assert differences(eager, inside) == NONE


class Broken(nn.Module):
    """Breaks its graph in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = zoo.InPlaceModule(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_graph_that_the_user_breaks() -> None:
    torch.manual_seed(0)
    eager = train(Broken(), step)
    torch.manual_seed(0)
    inside = train(torch.compile(Broken(), backend="aot_eager"), step, compiled="inside")
    assert differences(eager, inside) == NONE
    assert graph_breaks() > 0


def test_a_compiled_function_that_calls_the_model() -> None:
    torch.manual_seed(0)
    eager = train(Layers(), step)
    torch.manual_seed(0)
    model = Layers()
    compiled = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    inside = train(model, lambda _: zoo.loss_of(compiled(zoo.batch())), compiled="inside")
    assert differences(eager, inside) == NONE


def test_evaluation_between_steps_is_recorded_if_asked() -> None:
    def evaluated(model: Any) -> torch.Tensor:
        loss = step(model)
        model.eval()
        with torch.no_grad():
            model(zoo.batch(seed=3))
        model.train()
        return loss

    eager, inside = pair(zoo.Shared, step=evaluated, evaluation=True)
    assert differences(eager, inside) == NONE
    assert any(record.key.phase == "eval" for record in inside.run)
    assert differences(*pair(zoo.Shared, step=evaluated)) == NONE
