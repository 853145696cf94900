"""Paddle's static programs: `jit.save` inside a tap, and models that `to_static` compiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt

paddle = pytest.importorskip("paddle")
nn = paddle.nn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:paddle")


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return self.second(nn.functional.relu(self.first(x))) * scale


def net() -> Any:
    paddle.seed(3)
    return Net()


def batch(seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal((3, 4)), dtype="float32")


def saved(model: Any, path: Path) -> dict[str, bytes]:
    paddle.jit.save(model, str(path / "model"), input_spec=[paddle.static.InputSpec([None, 4], "float32", "x")])
    # Paddle numbers the traces of a process in the names of its scopes.
    return {file.name: re.sub(rb"_\d+/", b"/", file.read_bytes()) for file in path.iterdir()}


def test_jit_save_writes_what_it_would_write_and_the_tap_goes_on(tmp_path: Path) -> None:
    model = net()
    plain = saved(model, tmp_path / "plain")
    with tt.capture(model, tmp_path / "run") as tap:
        for step in range(2):
            model(batch(step)).sum().backward()
            if step == 0:
                written = saved(model, tmp_path / "tapped")
            tap.step()
    assert written == plain
    found = paddle.jit.load(str(tmp_path / "tapped" / "model"))(batch(5))
    assert np.array_equal(found.numpy(), model(batch(5)).numpy())
    assert [r.key.step for r in tt.open(tmp_path / "run").records(module="first", kind="output")] == [0, 1]
    assert [(row.status, row.calls, row.reason) for row in tap.coverage] == [("seen", 2, "")] * 3
