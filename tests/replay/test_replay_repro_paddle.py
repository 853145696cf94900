"""The reproduction of a paddle layer: a script that needs only paddle and safetensors, and prints the same errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from support.reproductions import errors, run_script
from support.tapping import ALL_KINDS

paddle = pytest.importorskip("paddle")
pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track global mean:UserWarning")

MODEL = """
import paddle
from paddle import nn

class Mixer(nn.Layer):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiHeadAttention(4, 2)
        self.norm = nn.BatchNorm1D(5)

    def forward(self, x, pair, *, mask, scale=1.0, dtype=None):
        y = self.attention(x, x, x)
        y = self.norm(y).astype(dtype) * mask + pair[0]
        return {"y": y * scale, "more": (y.sum(), [y + pair[1]["k"]])}

class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.mixer = nn.Embedding(7, 4), nn.Linear(4, 4), Mixer()

    def forward(self, tokens):
        y = self.first(self.embed(tokens))
        out = self.mixer(y, (y * 2, {"k": y}), mask=paddle.ones([3, 5, 4]), scale=0.5, dtype=paddle.float32)
        return out["y"] + out["more"][1][0]

def build():
    paddle.seed(0)
    return Net()

def halved(self, x):
    return paddle.nn.functional.linear(x, self.weight, self.bias) * 1.001
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own: dict[str, Any] = {}
    exec(MODEL, own)
    path = tmp_path_factory.mktemp("runs") / "a"
    model = own["build"]()
    tokens = paddle.to_tensor(np.random.default_rng(0).integers(0, 7, (3, 5)))
    with tt.capture(model, path, keep="tensors", kinds=ALL_KINDS) as tap:
        model(tokens).square().sum().backward()
        tap.step()
    return path


def test_a_users_layer(run: Path, file: Path, tmp_path: Path) -> None:
    result = tt.replay(run, "mixer", f"{file}:build", repro=tmp_path / "bug")
    assert result.verdict == "match", str(result)
    assert {path.name for path in (tmp_path / "bug").iterdir()} == {"model.py", "repro.py", "tensors.safetensors"}
    script = (tmp_path / "bug" / "repro.py").read_text()
    assert "needs paddle and safetensors" in script and "torch" not in script
    assert "scale=0.5, dtype=paddle.float32" in script
    printed = run_script(tmp_path / "bug")
    assert set(printed) == set(errors(result, "mixer"))
    assert max(printed.values()) < 1e-6


def test_in_another_dtype_the_script_prints_what_the_comparison_found(run: Path, file: Path, tmp_path: Path) -> None:
    result = tt.replay(run, "first", f"{file}:build", dtype="float64", repro=tmp_path / "bug")
    printed, found = run_script(tmp_path / "bug"), errors(result, "first")
    assert set(printed) == set(found)
    assert max(printed.values()) > 1e-9
    assert printed == pytest.approx(found, rel=1e-2, abs=1e-12)


def test_a_layer_of_paddle_needs_no_file(run: Path, file: Path, tmp_path: Path) -> None:
    own: dict[str, Any] = {}
    exec(MODEL, own)
    result = tt.replay(run, "embed", own["build"](), repro=tmp_path / "bug")
    assert "module = paddle.nn.Embedding(num_embeddings=7, embedding_dim=4" in (tmp_path / "bug/repro.py").read_text()
    assert {path.name for path in (tmp_path / "bug").iterdir()} == {"repro.py", "tensors.safetensors"}
    assert set(run_script(tmp_path / "bug")) == set(errors(result, "embed"))


def test_another_implementation_is_copied(run: Path, file: Path, tmp_path: Path) -> None:
    given = {"implementation": f"{file}:halved", "repro": tmp_path / "bug"}
    result = tt.replay(run, "first", f"{file}:build", **given)
    assert result.verdict == "diverged"
    printed = run_script(tmp_path / "bug")
    assert printed["output 0"] == pytest.approx(1e-3, rel=0.1)
    assert printed == pytest.approx(errors(result, "first"), rel=1e-2, abs=1e-12)


def test_short_dtypes_are_read_from_the_file(run_path: Path, tmp_path: Path) -> None:
    """NumPy has no bfloat16, so it passes through as bits."""
    code = """
import paddle

class Widen(paddle.nn.Layer):
    def forward(self, x):
        return x.astype("float32") * 2

class Whole(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.widen = Widen()

    def forward(self, x):
        return self.widen(x.astype("bfloat16"))
"""
    (tmp_path / "net.py").write_text(code)
    own: dict[str, Any] = {}
    exec(code, own)
    model = own["Whole"]()
    with tt.capture(model, run_path, keep="tensors") as tap:
        model(paddle.to_tensor([[0.5, -3.0, 1e-3]])).sum()
        tap.step()
    tt.replay(run_path, "widen", f"{tmp_path / 'net.py'}:Whole", repro=tmp_path / "bug")
    assert run_script(tmp_path / "bug") == {"output 0": 0.0}
