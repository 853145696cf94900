"""On the reference's own inputs, what only follows from a mistake is not named beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt

KINDS = ("input", "output", "grad_input", "grad_output", "param_grad", "param", "buffer")


class Net(nn.Module):
    """Two random modules, a norm that keeps statistics, and a table that is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.early, self.late = nn.Dropout(0.2), nn.Dropout(0.2)
        self.table, self.last = nn.Embedding(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(self.first(x))
        y = self.late(self.second(self.norm(x)))
        return self.last(x + y + self.table.weight)


def early_skipped(self: Any, x: Tensor) -> Tensor:
    x = self.first(x)
    y = self.late(self.second(self.norm(x)))
    return self.last(x + y + self.table.weight)


def norm_skipped(self: Any, x: Tensor) -> Tensor:
    x = self.early(self.first(x))
    y = self.late(self.second(x))
    return self.last(x + y + self.table.weight)


def other_tensor_given(self: Any, x: Tensor) -> Tensor:
    first = self.early(self.first(x))
    y = self.late(self.second(self.norm(x)))
    return self.last(first + y + self.table.weight)


def train(model: nn.Module, watch: Callable[[Any], Any], rate: float = 1e-3) -> Any:
    random = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with watch(model) as watching:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 32, generator=random)).square().mean().backward()
            optimizer.step()
            watching.step()
    return watching


@pytest.fixture
def reference(run_path: Path) -> Path:
    train(Net(), lambda model: tt.capture(model, run_path, keep="tensors", kinds=KINDS))
    return run_path


def checked(reference: Path, model: nn.Module, rate: float = 1e-3) -> Any:
    return train(model, lambda each: tt.check(each, reference), rate).result


@pytest.mark.parametrize("forward", [early_skipped, norm_skipped, other_tensor_given])
def test_only_the_code_that_is_wrong_is_named(reference: Path, forward: Callable[..., Tensor]) -> None:
    model = Net()
    model.forward = forward.__get__(model)  # type: ignore[method-assign]
    result = checked(reference, model)
    assert {birth.module for birth in result.births} == {""}, result.sentence


def test_random_numbers_out_of_step_are_found_where_it_began(reference: Path) -> None:
    model = Net()
    model.early.forward = lambda x: nn.functional.dropout(x * (torch.rand(()) >= 0), 0.2)  # type: ignore[method-assign]
    result = checked(reference, model)
    assert [birth.module for birth in result.births] == ["early"], result.sentence


def test_another_rate_of_a_later_dropout_is_named_as_well(reference: Path) -> None:
    model = Net()
    model.early.forward = lambda x: nn.functional.dropout(x * (torch.rand(()) >= 0), 0.2)  # type: ignore[method-assign]
    model.late.p = 0.8
    result = checked(reference, model)
    assert [birth.module for birth in result.births] == ["early", "late"], result.sentence


def test_code_that_reads_a_wrong_parameter_is_not_named(reference: Path) -> None:
    result = checked(reference, Net(), rate=2e-3)
    assert {str(birth.cause) for birth in result.births} <= {"optimizer"}, result.sentence
    assert result.births


def table_detached(self: Any, x: Tensor) -> Tensor:
    x = self.early(self.first(x))
    y = self.late(self.second(self.norm(x)))
    return self.last(x + y + self.table.weight.detach())


@pytest.mark.parametrize(("detached", "module"), [(False, "table"), (True, "")])
def test_a_lost_gradient_of_a_module_that_is_never_called_is_named(
    reference: Path, tmp_path: Path, detached: bool, module: str
) -> None:
    """The module is to blame if its weight is frozen, and the code that reads the weight if that detaches it."""

    def changed() -> Net:
        model = Net()
        if detached:
            model.forward = table_detached.__get__(model)  # type: ignore[method-assign]
        else:
            model.table.requires_grad_(False)
        return model

    result = checked(reference, changed())
    assert [birth.module for birth in result.births] == [module], result.sentence
    train(changed(), lambda model: tt.capture(model, tmp_path / "free", keep="tensors", kinds=KINDS))
    compared = tt.compare(reference, tmp_path / "free")
    assert compared.first is not None and compared.first.module == module, compared.sentence
    assert str(compared.first.cause) == "missing_gradient"


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight


class Handing(nn.Module):
    """Hands a module parts of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.product = nn.Linear(32, 8), Product()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.product(x, self.product.weight[0]) + self.product(x, self.product.weight[1])


def test_code_that_hands_on_a_wrong_parameter_is_not_named(run_path: Path) -> None:
    train(Handing(), lambda model: tt.capture(model, run_path, keep="tensors", kinds=KINDS))
    result = checked(run_path, Handing(), rate=2e-3)
    assert result.births and {str(birth.cause) for birth in result.births} <= {"optimizer"}, result.sentence
