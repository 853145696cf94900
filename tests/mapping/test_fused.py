"""A module that includes the activation after it: a correct port matches, and a mistake is located."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("paddle")
import paddle

import tensortap as tt
from support import twins

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track global mean:UserWarning")

IMAGE = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
ROWS = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


class Apart(nn.Module):
    """A module for everything; the same ReLU is used in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.fc = nn.ReLU(), nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(x)))
        return self.fc(self.relu(x + self.bn3(self.conv3(y))).mean((2, 3)))


class Functions(Apart):
    """The activations are functions."""

    def forward(self, x: Any) -> Any:
        x = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(x)).relu()
        return self.fc((x + self.bn3(self.conv3(y))).relu().mean((2, 3)))


class Nested(nn.Module):
    """The norm in a separate block, and an activation after the block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.act, self.fc = nn.SiLU(), nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        return self.fc(self.act(self.stem(x)).mean((2, 3)))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.fc2(self.act(self.fc1(x)))


class ConvBN(paddle.nn.Layer):  # type: ignore[misc]  # paddle is untyped to us
    def __init__(self, inner: int, act: str | None) -> None:
        super().__init__()
        self.conv = paddle.nn.Conv2D(inner, 4, 3, padding=1, bias_attr=False)
        self.norm = paddle.nn.BatchNorm(4, act=act)

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x))


class PaddleFused(paddle.nn.Layer):  # type: ignore[misc]
    def __init__(self, own_relu: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = ConvBN(3, "relu"), ConvBN(4, "relu"), ConvBN(4, None)
        self.last = paddle.nn.ReLU() if own_relu else paddle.nn.functional.relu
        self.fc = paddle.nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        return self.fc(self.last(x + self.third(self.second(x))).mean([2, 3]))


class Stem(paddle.nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.conv = paddle.nn.Conv2D(3, 4, 3, padding=1, bias_attr=False)
        self.norm = paddle.nn.BatchNorm2D(4)

    def forward(self, x: Any) -> Any:
        return paddle.nn.functional.silu(self.norm(self.conv(x)))


class PaddleNested(paddle.nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = Stem(), paddle.nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        return self.fc(self.stem(x).mean([2, 3]))


class ActiveLinear(paddle.nn.Linear):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return paddle.nn.functional.gelu(super().forward(x))


class PaddleDense(paddle.nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ActiveLinear(6, 8), paddle.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any]] = {
    "a module": (Apart, PaddleFused, IMAGE),
    "a module, one of its own": (Apart, lambda: PaddleFused(own_relu=True), IMAGE),
    "a function": (Functions, PaddleFused, IMAGE),
    "a block": (Nested, PaddleNested, IMAGE),
    "a linear": (Dense, PaddleDense, ROWS),
}


def compared(
    name: str,
    folder: Path,
    back: bool = False,
    seed: int = 0,
    keep: str = "tensors",
    change: Callable[[Any], None] | None = None,
) -> Any:
    ours, theirs, data = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        source, target = ours(), theirs()
        for parameter in source.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    assert tt.transfer(source, target).complete
    if change is not None:
        change(target)
    runs = [twins.train(m, data, folder / str(at), keep=keep) for at, m in enumerate((source, target))]
    return tt.compare(*(runs[::-1] if back else runs))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("back", [False, True], ids=["torch first", "paddle first"])
@pytest.mark.parametrize("name", MODELS)
def test_a_correct_port_matches(name: str, back: bool, seed: int, tmp_path: Path) -> None:
    result = compared(name, tmp_path, back, seed)
    assert result.verdict == "match", str(result)
    assert any("includes" in note for note in result.notes)
    assert all(each.why for each in result.unmatched)


@pytest.mark.parametrize("name", ["a module", "a function"])
def test_summaries_are_enough(name: str, tmp_path: Path) -> None:
    assert compared(name, tmp_path, keep="summary").verdict == "match"


def test_the_output_is_compared_with_the_activations(tmp_path: Path) -> None:
    result = compared("a module", tmp_path)
    rows = [row for row in result.rows if row["module"] == "relu"]
    assert {(row["kind"], row["call"], row["module_candidate"]) for row in rows} == {
        ("output", 0, "first.norm"),
        ("output", 1, "second.norm"),
        ("grad_output", 0, "first.norm"),
        ("grad_output", 1, "second.norm"),
    }
    assert all(row["status"] in ("equal", "close") for row in rows)
    assert "first.norm of the candidate includes relu of the reference: compared there" in result.notes, result.notes


def test_other_calls_of_the_activation_keep_their_order(tmp_path: Path) -> None:
    result = compared("a module, one of its own", tmp_path)
    last = [row for row in result.rows if row["module"] == "relu" and row["module_candidate"] == "last"]
    assert {(row["kind"], row["call"]) for row in last} == {("input", 2), ("output", 2), ("grad_output", 2)}


def _epsilon(model: Any) -> None:
    model.second.norm._epsilon = 1e-2


def _weight(model: Any) -> None:
    model.up.weight.set_value(model.up.weight * 1.01)


def _sigmoid(model: Any) -> None:
    model.second.norm._act = "sigmoid"


@pytest.mark.parametrize(
    ("name", "change", "module"),
    [
        ("a module", _epsilon, "bn2"),
        ("a function", _epsilon, "bn2"),
        ("a module", _sigmoid, "bn2"),
        ("a linear", _weight, "fc1"),
    ],
)
def test_a_mistake_in_it_is_located(name: str, change: Callable[[Any], None], module: str, tmp_path: Path) -> None:
    result = compared(name, tmp_path, change=change)
    assert (result.verdict, result.first.module) == ("diverged", module), str(result)
    if change is _epsilon and name == "a module":
        assert result.first.cls == "BatchNorm2d" and result.first.inputs_matched
        assert "bn2 (BatchNorm2d; second.norm in paddle)" in str(result)
