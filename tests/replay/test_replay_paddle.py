"""Replay of paddle layers on their recorded inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from support.tapping import ALL_KINDS
from tensortap.errors import UsageError

paddle = pytest.importorskip("paddle")
nn = paddle.nn


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        y = self.first(x) * scale
        z = self.act(self.norm(y))
        return y, z + x


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(4, 4), Block()

    def forward(self, x: Any) -> Any:
        y, z = self.block(self.stem(x), scale=0.5)
        return y.sum() + (z * z).sum()


@pytest.fixture
def run(run_path: Path) -> Any:
    paddle.seed(0)
    model = Net()
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((3, 4)), dtype="float32")
    with tt.capture(model, run_path, keep="tensors", kinds=ALL_KINDS) as tap:
        model(x).backward()
        tap.step()
    return tt.open(run_path)


@pytest.mark.parametrize("module", ["stem", "block.norm", "block.act", "block"])
def test_layers_are_reproduced(run: Any, module: str) -> None:
    result = tt.replay(run, module, Net())
    assert result.verdict == "match", str(result)
    assert not result.unmatched
    kinds = {row["kind"] for row in result.rows}
    assert {"input", "output", "grad_output"} <= kinds


def test_plain_arguments_are_restored(run_path: Path) -> None:
    class Casts(nn.Layer):
        def forward(self, x: Any, dtype: Any, place: Any = None, scale: float = 1.0) -> Any:
            assert str(place) == str(paddle.CPUPlace())  # paddle 3.0's CPUPlace equals no other
            return x.astype(dtype).astype(x.dtype) * scale

    class Whole(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.casts = nn.Linear(4, 4), Casts()

        def forward(self, x: Any) -> Any:
            return self.casts(self.stem(x), paddle.float16, place=paddle.CPUPlace(), scale=0.5)

    with tt.capture(Whole(), run_path, keep="tensors") as tap:
        tap._tree.sites[0].owner(paddle.ones([2, 4])).sum().backward()
        tap.step()
    result = tt.replay(run_path, "casts", Whole())
    assert result.verdict == "match"
    result = tt.replay(run_path, "casts", Whole(), arguments={"dtype": "float32", "scale": 1.0})
    assert "1=float16 in the reference and float32 in the candidate, scale=0.5 and 1.0" in str(result)
    with pytest.raises(UsageError, match="paddle has no dtype float3"):
        tt.replay(run_path, "casts", Whole(), arguments={"dtype": "float3"})


def test_another_dtype_and_implementation(run: Any) -> None:
    assert tt.replay(run, "block.norm", Net(), dtype="float64").verdict == "match"
    wrong = tt.replay(run, "stem", Net(), implementation=lambda self, x: paddle.matmul(x, 1.01 * self.weight))
    assert wrong.verdict == "diverged"
    assert wrong.first is not None
    assert wrong.first.module == "stem"


def test_bfloat16_is_restored_bit_for_bit(run_path: Path) -> None:
    from tensortap.frameworks.paddle.player import PaddlePlayer

    values = paddle.to_tensor([1.5, -2.25, 1e-3]).astype("bfloat16")
    from tensortap.frameworks.paddle.framework import Paddle

    host = Paddle().host(values)
    again = PaddlePlayer().tensor(host, nn.Linear(1, 1), None)
    assert str(again.dtype) == "paddle.bfloat16"
    assert np.array_equal(Paddle().host(again), host)


def test_paddle_layers_that_can_be_written_as_an_expression() -> None:
    """A layer is written as an expression only if the expression builds the same layer."""
    from tensortap.frameworks.paddle.player import PaddlePlayer

    source = PaddlePlayer().plain_source
    layers = (
        nn.Linear(3, 4),
        nn.Linear(3, 4, bias_attr=False),
        nn.LayerNorm(4, epsilon=1e-3),
        nn.Conv2D(3, 4, 3, stride=2, padding=1, groups=1, bias_attr=False),
        nn.BatchNorm2D(3, momentum=0.5),
        nn.GELU(approximate=True),
        nn.Embedding(5, 4, padding_idx=1),
        nn.Dropout(0.25),
        nn.ReLU(),
    )
    for layer in layers:
        code = source(layer)
        assert code is not None, layer
        assert repr(eval(code, {"paddle": paddle})) == repr(layer)
    changed = nn.LayerNorm(4)
    changed.forward = lambda x: x
    moved = nn.LayerNorm(4)
    moved._begin = 3
    for layer in (changed, moved, nn.Sequential(nn.ReLU()), nn.MultiHeadAttention(4, 2), Block()):
        assert source(layer) is None, layer


def test_a_run_of_the_other_framework_is_refused(run: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match="recorded with paddle, and this is a torch model"):
        tt.replay(run, "stem", torch.nn.ModuleDict({"stem": torch.nn.Linear(4, 4)}))
