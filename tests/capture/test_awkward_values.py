"""Arguments and outputs whose own code fails: the rest is recorded, the training goes on, and the coverage says so."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import coverage


@dataclasses.dataclass
class Output:
    logits: Any
    cache: Any = None
    hidden: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name == "cache":
            raise RuntimeError("not computed")
        return object.__getattribute__(self, name)


class LazyMapping(dict[str, Any]):
    def items(self) -> Any:
        raise KeyError("no items")


class Proxy:
    """An object outside of whose context everything raises, as Werkzeug's."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of its context")


class Net(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.wrap = wrap

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return self.wrap(self.linear(x))


def test_the_fields_beside_one_that_raises_are_recorded() -> None:
    model = Net(lambda x: Output(x, hidden=x * 2))
    with tt.capture(model) as tap:
        output = model(torch.ones(2, 4))
        (output.logits + output.hidden).sum().backward()
    assert {r.key.path for r in tap.run.records(module="", kind=("output", "grad_output"))} == {"logits", "hidden"}
    assert "Output.cache (reading it raised RuntimeError)" in coverage(tap)[""][1]


def test_a_mapping_that_cannot_be_iterated() -> None:
    model = Net(lambda x: LazyMapping(logits=x))
    with tt.capture(model) as tap:
        model(torch.ones(2, 4))["logits"].sum().backward()
    assert {r.key.kind for r in tap.run.records(module="linear")} == {"input", "output", "grad_output", "param_grad"}
    assert "LazyMapping (reading it raised KeyError)" in coverage(tap)[""][1]


@pytest.mark.parametrize("make", [lambda: partial(print, 1), Proxy, lambda: print, object])
def test_an_argument_that_is_no_tensor(make: Any) -> None:
    extra = make()
    model = Net(lambda x: x)
    with tt.capture(model, on_error="raise") as tap:
        model(torch.ones(2, 4), extra).sum().backward()
    assert [r.key.path for r in tap.run.records(module="", kind="input")] == ["0"]
    assert type(extra).__qualname__ in coverage(tap)[""][1]
