"""Code that uses a value of another module otherwise is named alone, though gradients of others are lost or come."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt

KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")
Change = Callable[[Any], None]


def train(model: nn.Module) -> None:
    model(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()


def compared(build: Callable[[], nn.Module], change: Change, folder: Path) -> tuple[list[str], str | None]:
    """Return the modules that a check names, and the first one that a comparison names."""
    torch.manual_seed(0)
    model = build()
    wrong = copy.deepcopy(model)
    change(wrong)
    for name, each in (("a", model), ("b", wrong)):
        with tt.capture(each, folder / name, keep="tensors", kinds=KINDS):
            train(each)
    torch.manual_seed(0)
    model = build()
    change(model)
    with tt.check(model, folder / "a") as check:
        train(model)
    first = tt.compare(folder / "a", folder / "b").first
    assert first is not None
    return list(dict.fromkeys(birth.module for birth in check.result.births)), first.module


def replaces(module: str, forward: Callable[..., Any]) -> Change:
    def change(model: nn.Module) -> None:
        target = model.get_submodule(module)
        target.forward = forward.__get__(target)  # type: ignore[method-assign]

    return change


# --- a series and its trend -------------------------------------------------------------------------------------------


class Split(nn.Module):
    """Returns what is left of a series without its trend, and the trend."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        trend = x.cumsum(1) / 8
        return x - trend, trend


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.split, self.project = nn.Linear(8, 8), Split(), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, trend = self.split(self.mix(x))
        return x, self.project(trend.transpose(1, 2).transpose(1, 2).contiguous() + x.sin()).mul(1.0)


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        trend = torch.zeros_like(x)
        for layer in self.layers:
            x, more = layer(x)
            trend = trend + more
        return x, trend


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.series, self.head = nn.Linear(8, 8), Series(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, trend = self.series(self.start(x))
        return self.head(x + trend)


def trend_left_out(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x, _ = self.split(self.mix(x))
    return x, self.project(x.sin()).mul(1.0)


def trend_not_summed(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    for layer in self.layers:
        x, trend = layer(x)
    return x, trend


def trend_not_added(self: Any, x: Tensor) -> Tensor:
    return self.head(self.series(self.start(x))[0])


@pytest.mark.parametrize(
    ("module", "forward"),
    [("series.layers.0", trend_left_out), ("series", trend_not_summed), ("", trend_not_added)],
)
def test_values_that_are_not_used_any_more(tmp_path: Path, module: str, forward: Callable[..., Any]) -> None:
    assert compared(Forecast, replaces(module, forward), tmp_path) == ([module], module)


# --- adapters, of which one layer has each ----------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self, own: int) -> None:
        super().__init__()
        self.base, self.adapters = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.adapters[self.own](x)).tanh()


class Sharing(nn.Module):
    """Two layers with the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Adapted(0), Adapted(1), nn.Linear(8, 1)
        self.second.base.weight, self.second.base.bias = self.first.base.weight, self.first.base.bias
        for ours, theirs in zip(self.second.adapters, self.first.adapters, strict=True):
            ours.weight = theirs.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def test_another_of_several_shared_adapters(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model.second.own = 0

    assert compared(Sharing, change, tmp_path)[0] == ["second"]


# --- gradients that are cut off ---------------------------------------------------------------------------------------


class Refined(nn.Module):
    """Scales states by points, which get no gradient."""

    def __init__(self, cut: bool = True) -> None:
        super().__init__()
        self.body, self.move, self.cut = nn.Linear(8, 8), nn.Linear(8, 8), cut

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        points = self.move(x).sigmoid()
        return x * (points.detach() if self.cut else points)


class Detecting(nn.Module):
    """The model uses a module of its decoder, too, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.body, self.move = Refined(), nn.Linear(8, 8), nn.Linear(8, 8)
        self.move.weight, self.move.bias = self.decoder.move.weight, self.decoder.move.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.move(self.body(self.decoder(x)))


def test_a_gradient_that_the_reference_cuts_off(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model.decoder.cut = False

    checked, first = compared(Detecting, change, tmp_path)
    assert first == "decoder" and "decoder.move" not in checked
    found = tt.compare(tmp_path / "a", tmp_path / "b").first
    assert found is not None and str(found.cause) == "extra_gradient_in_container"


class Merger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x.view(4, 3, 16)))


class Tower(nn.Module):
    """Returns what its last module makes beside features of an earlier layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.early, self.last = Merger(), Merger()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers[0](x)
        early = self.early(x)
        return self.last(self.layers[1](x)), early


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        last, early = self.tower(x)
        return self.head(torch.cat(last.split(2)) + early)


def features_detached(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = self.layers[0](x)
    early = self.early(x.detach())
    return self.last(self.layers[1](x)), early


def last_detached(self: Any, x: Tensor) -> Tensor:
    last, early = self.tower(x)
    return self.head(torch.cat([part.detach() for part in last.split(2)]) + early)


@pytest.mark.parametrize(("module", "forward"), [("tower", features_detached), ("", last_detached)])
def test_values_that_are_cut_off(tmp_path: Path, module: str, forward: Callable[..., Any]) -> None:
    assert compared(Seeing, replaces(module, forward), tmp_path) == ([module], module)


class Refining(nn.Module):
    """Returns frames before and after a refinement of them."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.out, self.refine, self.cut = nn.Linear(8, 8), nn.Linear(6, 6), cut

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.out(x).view(4, 6, 8)
        return before, before.detach() + self.more(before.detach()) if self.cut else before + self.more(before)

    def more(self, x: Tensor) -> Tensor:
        return self.refine(x.transpose(1, 2)).transpose(1, 2)


class Speaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Refining()

    def forward(self, x: Tensor) -> Tensor:
        before, after = self.net(x)
        return before.abs() + after.abs()


def test_an_output_that_its_module_cuts_off_inside(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model.net.cut = True

    assert compared(Speaking, change, tmp_path)[0] == ["net"]


# --- values that a later layer takes from a collection ----------------------------------------------------------------


class Mix(nn.Module):
    """Puts its values into a collection, or takes them from there."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.uses_own = nn.Linear(8, 8), nn.Linear(8, 8), True

    def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
        if "value" not in shared:
            shared["value"] = self.value(x).transpose(0, 1)
            if not self.uses_own:
                return self.query(x)
        return self.query(x).sin() * shared["value"].transpose(0, 1)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = Mix(), nn.Linear(8, 8)

    def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
        return x + self.out(self.mix(x, shared))


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shared() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, shared)
        return x


def values_detached(self: Any, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
    return self.query(x).sin() * shared["value"].detach().transpose(0, 1)


@pytest.mark.parametrize("uses_own", [True, False])
def test_a_value_of_a_collection_is_detached(tmp_path: Path, uses_own: bool) -> None:
    def build() -> nn.Module:
        model = Collecting()
        for layer in model.layers:
            layer.mix.uses_own = uses_own  # type: ignore[union-attr]
        return model

    expected = "layers.1.mix"
    checked, first = compared(build, replaces(expected, values_detached), tmp_path)
    assert checked == [expected]
    assert uses_own or first == expected


# --- states that a model returns, and another uses --------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
            x = x.tanh()
        return states


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack, self.first = Stack(), 0

    def forward(self, x: Tensor) -> Tensor:
        states = self.stack(x)
        return torch.cat([states[self.first], states[-1]], -1)


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader, self.head = Reader(), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reader(x))


def test_another_of_several_states_is_used(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model.reader.first = 1

    assert compared(Answers, change, tmp_path)[0] == ["reader"]
