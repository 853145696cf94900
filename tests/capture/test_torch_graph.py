"""The search of torch's graph, which its own C++ interface does where it is built, and Python elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensortap.frameworks.torch.access import access_build
from tensortap.frameworks.torch.framework import Torch


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):  # type: ignore[no-untyped-def]
        return x + y, x * 2

    @staticmethod
    def backward(ctx, first, second):  # type: ignore[no-untyped-def]
        return first + 2 * second, first


class Branches(nn.Module):
    """Uses its inputs in several operations, one of them a Function of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = Twice.apply(x, self.layer(y))  # type: ignore[no-untyped-call]
        return one * x + torch.cat([z, y], -1)[:, :4], self.layer(other).relu() + y.view(-1).view(3, 4)


def made_by_python(x: torch.Tensor) -> torch.Tensor:
    return Twice.apply(x, x * 3)[1]  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("inputs", ["leaves", "computed", "views", "of Python", "one tensor"])
def test_both_ways_find_the_same_nodes(inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    access_build().build_now()
    if access_build().module() is None:
        pytest.skip("no C++ compiler, or no headers of torch")
    torch.manual_seed(0)
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
    if inputs == "computed":
        leaves = [leaf.exp() for leaf in leaves]
    elif inputs == "views":
        leaves = [leaf.exp().view(12).view(3, 4) for leaf in leaves]
    elif inputs == "of Python":
        leaves = [made_by_python(leaf) for leaf in leaves]
    elif inputs == "one tensor":
        leaves = [leaves[0].exp()] * 3
    framework, module = Torch(), Branches()
    mark = framework.mark()
    edges = [edge for leaf in leaves if (edge := framework.edge(leaf)) is not None]
    outputs = module(*leaves)
    found = framework.consumers(outputs, edges, mark)
    assert not framework.consumers(outputs, edges, framework.mark() + 10**6), "all nodes are older than that"
    monkeypatch.setattr(access_build(), "loaded", None)
    assert [framework.edge(leaf) for leaf in leaves] == edges
    expected_nodes = framework.consumers(outputs, edges, mark)
    assert len(found) >= (2 if inputs == "one tensor" else 5)
    assert {(each.node, each.index, id(each.edge)) for each in found} == {
        (each.node, each.index, id(each.edge)) for each in expected_nodes
    }
    assert len(found) == len(expected_nodes)
    assert not framework.consumers(outputs, edges, framework.mark() + 10**6), "all nodes are older than that"
