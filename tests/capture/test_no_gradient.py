"""A node that runs in backward without a gradient for one of its outputs: noted, never an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import ALL_KINDS, coverage


class TwoOutputs(torch.autograd.Function):
    """Returns twice and three times its input; requests no zeros for unused outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
        return None if first is None else 2 * first


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return TwoOutputs.apply(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), Inner()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.inner(self.linear(x))
        return first.square().mean(), second


def trained(path: Path | None, used: int, compiled: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = Net()
    if compiled:
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4))[used].sum().backward()
            optimizer.step()

    if path is None:
        loop()
    else:
        with tt.capture(model, path, kinds=ALL_KINDS, optimizer=optimizer, on_error="raise"):
            loop()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_the_loss_does_not_use(run_path: Path, used: int, compiled: bool) -> None:
    plain, tapped = trained(None, used, compiled), trained(run_path, used, compiled)
    assert all(map(torch.equal, plain, tapped))
    run = tt.open(run_path)
    assert run.finished and run.steps == [0, 1]
    if not compiled:
        assert {r.key.path for r in run.records(kind="grad_output", module="inner")} == {str(used)}


def test_coverage_names_the_output_without_a_gradient(run_path: Path) -> None:
    model = Net()
    with tt.capture(model, run_path) as tap:
        model(torch.ones(2, 4))[0].backward()
    status, reason = coverage(tap)["inner"]
    assert status == "seen" and "grad_output 1: no gradient" in reason


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_check_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()

    def step() -> None:
        model(torch.ones(2, 4))[0].backward()

    with tt.capture(model, tmp_path / "reference", keep="tensors", kinds=ALL_KINDS):
        step()
    with tt.check(model, tmp_path / "reference") as check:
        step()
    assert check.result.verdict == "match"


class Apart(torch.autograd.Function):
    """Returns twice its first and three times its second input; sends no gradient for unused outputs."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return 2 * first, 3 * second

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> Any:
        return None if first is None else 2 * first, None if second is None else 3 * second


class Both(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Apart.apply(first, second)


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(4, 4), nn.Linear(4, 4), Both()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(self.left(x), self.right(x))[0].square().mean()


@pytest.mark.parametrize("isolate", [True, False])
def test_a_check_sends_no_zeros_to_parameters_without_gradient(tmp_path: Path, isolate: bool) -> None:
    torch.manual_seed(0)
    model = TwoWays()
    with tt.capture(model, tmp_path / "reference", keep="tensors", kinds=ALL_KINDS):
        model(torch.ones(2, 4)).backward()
    model.zero_grad()
    with tt.check(model, tmp_path / "reference", isolate=isolate) as check:
        model(torch.ones(2, 4)).backward()
    assert check.result.verdict == "match", check.result.sentence
    assert model.right.weight.grad is None and model.left.weight.grad is not None


@pytest.mark.parametrize("isolate", [True, False])
def test_a_check_sends_no_zeros_in_paddle(tmp_path: Path, isolate: bool) -> None:
    paddle = pytest.importorskip("paddle")

    class PaddleApart(paddle.autograd.PyLayer):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, first: Any, second: Any) -> Any:
            ctx.set_materialize_grads(False)
            return 2 * first, 3 * second

        @staticmethod
        def backward(ctx: Any, first: Any, second: Any) -> Any:
            return None if first is None else 2 * first, None if second is None else 3 * second

    class PaddleBoth(paddle.nn.Layer):  # type: ignore[misc]
        def forward(self, first: Any, second: Any) -> Any:
            return PaddleApart.apply(first, second)

    class PaddleTwoWays(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.both = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4), PaddleBoth()

        def forward(self, x: Any) -> Any:
            return self.both(self.left(x), self.right(x))[0].square().mean()  # a scalar, which stays one

    model = PaddleTwoWays()
    with tt.capture(model, tmp_path / "reference", keep="tensors", kinds=ALL_KINDS):
        model(paddle.ones([2, 4])).backward()
    with tt.check(model, tmp_path / "reference", isolate=isolate) as check:
        loss = model(paddle.ones([2, 4]))
        assert tuple(loss.shape) == ()
        loss.backward()
    assert check.result.verdict == "match", check.result.sentence


def test_paddle_indices_of_a_topk_take_none(run_path: Path) -> None:
    paddle = pytest.importorskip("paddle")

    class Best(paddle.nn.Layer):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return paddle.topk(x, 2)

    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), Best())
    with tt.capture(model, run_path, kinds=ALL_KINDS, on_error="raise"):
        model(paddle.ones([2, 4]))[0].sum().backward()
    assert tt.open(run_path).finished
