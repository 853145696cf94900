"""A model in another dtype than its reference: additive masks hold the lowest number of their own dtype, and agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest
import torch
from torch import nn

import tensortap as tt


class Masked(nn.Module):
    """Attention with an additive mask, which it passes on."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.part is not None:
            x = x + self.part(x, mask)
        scores = x @ self.linear(x).transpose(1, 2) / 8 + mask
        return torch.softmax(scores, -1) @ x


class Model(nn.Module):
    def __init__(self, hidden: int = 3) -> None:
        super().__init__()
        self.block = Masked(Masked())
        self._hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(x.shape[0], x.shape[1], x.shape[1], dtype=x.dtype)
        mask[1, :2] = torch.finfo(x.dtype).min  # all keys of two queries: -inf there would become NaN
        mask[:, :, -self._hidden :] = torch.finfo(x.dtype).min
        return self.block(x, mask)


def stepped(model: nn.Module, dtype: torch.dtype) -> None:
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    model.to(dtype)(x).float().square().sum().backward()


def seeded(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("masks") / "reference"
    model = seeded()
    with tt.capture(model, path, keep="tensors"):
        stepped(model, torch.float32)
    return path


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_mask_of_another_dtype_agrees(reference: Path, dtype: torch.dtype, isolate: bool) -> None:
    model = seeded()
    with tt.check(model, reference, isolate=isolate) as check:
        stepped(model, dtype)
    assert check.result.verdict == "match", check.result.sentence
    assert not check.result.counts.get("unjudged")


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_that_hides_other_positions_is_found(reference: Path, dtype: torch.dtype, isolate: bool) -> None:
    model = seeded(hidden=2)
    with tt.check(model, reference, isolate=isolate) as check:
        stepped(model, dtype)
    assert check.result.first is not None and check.result.first.module == ""
    assert check.result.first.key.path == "1" and "hides other elements" in check.result.sentence


class PaddleMasked(paddle.nn.Layer):  # type: ignore[misc]  # paddle is untyped to us
    def __init__(self, part: Any = None) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Any, mask: Any) -> Any:
        if self.part is not None:
            x = x + self.part(x, mask)
        return paddle.nn.functional.softmax(x @ x.transpose([1, 0]) + mask, -1) @ x


class PaddleModel(paddle.nn.Layer):  # type: ignore[misc]  # paddle is untyped to us
    def __init__(self) -> None:
        super().__init__()
        self.block = PaddleMasked(PaddleMasked())

    def forward(self, x: Any) -> Any:
        hidden = paddle.to_tensor([[1.0] * 6] * 2 + [[0.0] * 4 + [1.0] * 2] * 4).astype(x.dtype)
        return self.block(x, hidden * paddle.finfo(x.dtype).min)


def test_a_mask_of_another_dtype_agrees_in_paddle(tmp_path: Path) -> None:
    x = paddle.to_tensor(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).numpy())
    model = PaddleModel()
    with tt.capture(model, tmp_path / "a", keep="tensors"):
        model(x.astype("float64"))
    model = PaddleModel()
    with tt.check(model, tmp_path / "a") as check:
        model(x)
    assert check.result.verdict == "match", check.result.sentence
