"""The same check around a paddle model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import tensortap as tt
from support.mirror import paddle_model, tokens
from support.tapping import ALL_KINDS
from tensortap.store.noise_file import read_noise

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")


class Net(nn.Layer):
    """Convolutions, statistics, a change in place, and an LSTM whose states are used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2D(3, 4, 3, padding=1), nn.BatchNorm2D(4), nn.ReLU()
        self.lstm, self.out = nn.LSTM(4, 5), nn.Linear(5, 2)

    def forward(self, x: Any) -> Any:
        y = self.act(self.norm(self.conv(x)))
        y += 1
        out, (h, _) = self.lstm(y.mean(-1).transpose([0, 2, 1]))
        return self.out(out) + h.sum()


class Passing(nn.Layer):
    """A layer and the one around it use and return one value, which also passes through a third."""

    class Router(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(6, 4), nn.Linear(4, 6)

        def forward(self, x: Any) -> Any:
            shares = nn.functional.softmax(self.lin(x))
            return self.out(shares * shares), shares

    class Block(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.drop = Passing.Router(), nn.Dropout(0.0)

        def forward(self, x: Any) -> Any:
            y, shares = self.router(x)
            return x + y * shares.max(-1, keepdim=True), self.drop(shares)

    def __init__(self) -> None:
        super().__init__()
        self.block = Passing.Block()

    def forward(self, x: Any) -> Any:
        y, shares = self.block(x)
        return y + shares.sin().sum()


def images() -> Any:
    return paddle.to_tensor(np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype("float32"))


MODELS = {
    "mirror": (paddle_model, lambda: paddle.to_tensor(tokens())),
    "net": (Net, images),
    "passing": (Passing, images),
}


def built(name: str) -> Any:
    paddle.seed(0)
    return MODELS[name][0]()


def step(model: Any, name: str) -> None:
    (model(MODELS[name][1]()) ** 2).mean().backward()


def captured(path: Path, name: str) -> Path:
    model = built(name)
    with tt.capture(model, path, keep="tensors", kinds=ALL_KINDS):
        step(model, name)
    return path


def checked(model: Any, reference: Path, name: str, **options: Any) -> Any:
    with tt.check(model, reference, **options) as check:
        step(model, name)
    return check.result


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_agrees_with_itself(name: str, isolate: bool, run_path: Path) -> None:
    model = built(name)
    before = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    result = checked(model, captured(run_path, name), name, isolate=isolate)
    assert result.verdict == "match", result.sentence
    assert not result.unmatched
    assert not any(layer._forward_pre_hooks or layer._forward_post_hooks for layer in model.sublayers(True))
    for key, value in model.state_dict().items():
        assert key.endswith(("_mean", "_variance")) or np.array_equal(value.numpy(), before[key])


def test_two_mistakes_are_two_births(run_path: Path) -> None:
    reference, model = captured(run_path, "mirror"), built("mirror")
    block, act = model.blocks[0].forward, model.blocks[1].act.forward
    model.blocks[1].act.forward = lambda x: act(x) * 1.01

    def wrong(x: Any, *, scale: Any) -> Any:
        out = block(x, scale=scale)
        return out | {"pair": (out["pair"][0], out["pair"][1] * 1.02)}

    model.blocks[0].forward = wrong
    assert [birth.module for birth in checked(model, reference, "mirror").births] == ["blocks.0", "blocks.1.act"]


def test_a_wrong_backward_is_attributed_to_its_module(run_path: Path) -> None:
    class Doubled(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return 2 * gradient

    reference, model = captured(run_path, "net"), built("net")
    inner = model.out.forward
    model.out.forward = lambda x: inner(Doubled.apply(x))
    result = checked(model, reference, "net")
    assert [birth.module for birth in result.births] == ["out"]
    assert result.first.key.kind == "grad_input"


def test_noise_restores_the_model(tmp_path: Path) -> None:
    model = built("net")
    before = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    noise = read_noise(tt.noise(model, lambda model: step(model, "net"), tmp_path / "noise", seeds=2))
    assert all(np.array_equal(value.numpy(), before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert 2.0**-24 < noise.of(("out", 0, "output", "0"))[0] < 1e-5
    assert len(read_noise(tt.noise(model, images(), tmp_path / "of a batch", seeds=1)))
