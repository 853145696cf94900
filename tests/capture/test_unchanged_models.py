"""Whether a model is as it was: any change of parameters, hooks or attributes is noticed, in C and in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support import fake_gpu
from tensortap.capture.unchanged import WatchedItems, changed_items, identify_values


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
