"""Whether a model is as it was: any change of parameters, hooks or attributes is noticed, in C and in Python."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support import fake_gpu
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.unchanged import WatchedItems, changed_items, identify_values


@pytest.fixture(params=["C", "Python"], autouse=True)
def language(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    fake_gpu.choose_language(monkeypatch, request.param)


def nothing(_: Any) -> None:
    return None


def new_hook(model: nn.Sequential) -> None:
    hooks = model[0].weight._backward_hooks
    number = next(iter(hooks))
    hooks[number + 1] = hooks.pop(number)


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "another parameter": lambda model: setattr(model[1], "weight", nn.Parameter(torch.ones(2, 2))),
    "one less": lambda model: model[1].register_parameter("bias", None),
    "one more": lambda model: model[1].register_parameter("scale", nn.Parameter(torch.ones(2))),
    "swapped": lambda model: model[0]._parameters.update(weight=model[1].weight),
    "a second hook": lambda model: model[0].weight.register_hook(nothing),
    "no hook": lambda model: model[0].weight._backward_hooks.clear(),
    "another hook": new_hook,
    "unfrozen": lambda model: model[1].bias.requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_and_their_hooks(change: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.register_hook(nothing)
    model[1].bias.requires_grad_(False)
    owners = list(model)
    before = identify_values(owners, "_parameters", "_backward_hooks", tensors=True)
    assert before is not None
    assert identify_values(owners, "_parameters", "_backward_hooks", tensors=True) == before
    CHANGES[change](model)
    assert identify_values(owners, "_parameters", "_backward_hooks", tensors=True) != before


def test_objects_move_between_owners() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = identify_values(list(model), "_parameters")
    model[0]._parameters["extra"] = model[1]._parameters.pop("weight")
    assert identify_values(list(model), "_parameters") != before


def test_plain_attributes() -> None:
    modules = [nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5)]
    entries = [WatchedItems(m, vars(m), len(vars(m)), ("p", "training"), (m.p, m.training)) for m in modules]
    loose = WatchedItems(None, vars(modules[0]), -1, ("p",), (modules[0].p,))
    assert changed_items([*entries, loose]) == []
    modules[0].extra = 1  # type: ignore[assignment]
    modules[1].p = float("0.25")
    modules[2].__dict__ = dict(vars(modules[2]))
    del modules[3].__dict__["training"]
    assert changed_items([*entries, loose]) == [0, 1, 2, 3]


def test_what_is_not_a_dictionary_is_refused() -> None:
    with pytest.raises((TypeError, AttributeError)):
        identify_values([object()], "_parameters")


def test_attributes_that_change_together_with_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    with tt.capture(model, kinds="output") as tap:
        for step in range(3):
            if step == 1:
                model.append(nn.Linear(2, 2))
                model[1].p = 1e-9
            model(torch.ones(2, 2)).sum().backward()
            tap.step()
    assert [(each.step, each.value["p"]) for each in tap.run.loop().changes("attributes", "1")] == [(0, 0.0), (1, 1e-9)]


def test_coverage_that_starts_anew_forgets_steps_that_repeated() -> None:
    site: Any = SimpleNamespace(name="a", cls="Linear", base="", callable=True, inside=None)
    book = CoverageBook([site], [], ["output"])
    first = {"a": (1, 0, 0)}
    for _ in range(3):
        book.count_step(first)
    book.restart()
    book.count_step({"a": (2, 0, 0)})
    assert [row.calls for row in book.rows()] == [2]
