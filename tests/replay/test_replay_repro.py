"""The reproduction: a script that runs without tensortap and prints the errors that the comparison found."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.reproductions import errors, run_script
from support.tapping import tapped
from tensortap.core.arguments import OpaqueValue
from tensortap.errors import UsageError
from tensortap.frameworks.torch.dialect import TorchDialect

MODEL = """
import torch
from torch import nn

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x, pair, *, mask, scale=1.0):
        y, _ = self.attention(x, x, x)
        y = self.norm(self.act(y)) * mask + pair[0]
        return {"y": y * scale, "more": (y.sum(), [y + pair[1]["k"]])}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mixer = nn.Linear(4, 4), Mixer()

    def forward(self, x):
        y = self.first(x)
        out = self.mixer(y, (y * 2, {"k": y}), mask=torch.ones(3, 5, 4), scale=0.5)
        return out["y"] + out["more"][1][0]

def build():
    return Net()

def halved(self, x):
    return torch.nn.functional.linear(x, self.weight, self.bias) * 1.001
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def run(file: Path, run_path: Path) -> Path:
    own: dict[str, Any] = {}
    exec(MODEL, own)
    torch.manual_seed(0)
    tapped(own["build"](), run_path, zoo.batch())
    return run_path


def test_a_users_module(run: Path, file: Path, tmp_path: Path) -> None:
    result = tt.replay(run, "mixer", f"{file}:build", repro=tmp_path / "bug")
    assert result.verdict == "match"
    assert {path.name for path in (tmp_path / "bug").iterdir()} >= {"model.py", "repro.py", "tensors.safetensors"}
    printed = run_script(tmp_path / "bug")
    assert set(printed) == set(errors(result, "mixer"))
    assert max(printed.values()) < 1e-6
    assert "scale=0.5" in (tmp_path / "bug" / "repro.py").read_text()


def test_in_another_dtype_the_script_prints_what_the_comparison_found(run: Path, file: Path, tmp_path: Path) -> None:
    result = tt.replay(run, "mixer", f"{file}:build", dtype="bfloat16", repro=tmp_path / "bug")
    printed, found = run_script(tmp_path / "bug"), errors(result, "mixer")
    assert set(printed) == set(found)
    assert max(printed.values()) > 1e-4
    assert printed == pytest.approx(found, rel=1e-3, abs=1e-12)


def test_a_module_of_torch_needs_no_file(run: Path, file: Path, tmp_path: Path) -> None:
    result = tt.replay(run, "first", f"{file}:build", repro=tmp_path / "bug")
    script = (tmp_path / "bug" / "repro.py").read_text()
    assert "module = torch.nn.Linear(in_features=4, out_features=4, bias=True)" in script
    assert {path.name for path in (tmp_path / "bug").iterdir()} == {"repro.py", "tensors.safetensors"}
    assert set(run_script(tmp_path / "bug")) == set(errors(result, "first"))


def test_another_implementation_is_copied(run: Path, file: Path, tmp_path: Path) -> None:
    wrong = f"{file}:halved"
    result = tt.replay(run, "first", f"{file}:build", implementation=wrong, repro=tmp_path / "bug")
    assert result.verdict == "diverged"
    printed = run_script(tmp_path / "bug")
    assert printed["output 0"] == pytest.approx(1e-3, rel=0.1)
    assert printed == pytest.approx(errors(result, "first"), rel=1e-3, abs=1e-12)


def test_torch_modules_whose_repr_is_incomplete() -> None:
    """A module's repr is used only if it builds the same module."""
    from tensortap.frameworks.torch.player import TorchPlayer

    source = TorchPlayer().plain_source
    for module in (nn.LayerNorm(4, eps=1e-3), nn.Conv1d(4, 4, 3, padding=1), nn.GELU("tanh"), nn.BatchNorm1d(3)):
        code = source(module)
        assert code is not None
        assert repr(eval(code, {"torch": torch})) == repr(module)
    changed = nn.LayerNorm(4)
    changed.forward = lambda x: x  # type: ignore[method-assign]
    assert source(changed) is None
    assert source(nn.Sequential(nn.Linear(2, 2))) is None
    assert source(zoo.Residual()) is None


def test_cases_without_a_script_are_refused(run: Path, file: Path, tmp_path: Path) -> None:
    own: dict[str, Any] = {}
    exec(MODEL, own)
    with pytest.raises(UsageError, match=r"file\.py:function"):
        tt.replay(run, "mixer", own["build"](), arguments={"scale": 0.5}, repro=tmp_path / "bug")
    with pytest.raises(UsageError, match="implementation"):
        tt.replay(run, "first", f"{file}:build", implementation=own["halved"], repro=tmp_path / "bug")
    with pytest.raises(UsageError, match="is a file"):
        tt.replay(run, "first", f"{file}:build", repro=file)
    assert not (tmp_path / "bug").exists()


def test_an_implementation_that_returns_something_else(run: Path, file: Path, tmp_path: Path) -> None:
    file.write_text(MODEL + "\ndef bare(self, x, pair, *, mask): return x\n")
    given = {"implementation": f"{file}:bare", "repro": tmp_path / "bug"}
    result = tt.replay(run, "mixer", f"{file}:build", **given)
    assert {entry.side for entry in result.unmatched} == {"reference", "candidate"}
    assert 'show("output y", None, ' in (tmp_path / "bug" / "repro.py").read_text()


def test_plain_arguments_are_written_as_code() -> None:
    from tensortap.replay.arguments import build_arguments

    def forward(x: Any, *args: Any, **kwargs: Any) -> None: ...

    values = {"1": [1, (2.5,)], "2": {"k": None}, "nan": math.nan, "inf": [-math.inf], "numpy": np.float32(0.5)}
    others = {
        "dtype": OpaqueValue("dtype", "float16"),
        "device": [OpaqueValue("device", "cuda:0")],
        "text": "a\n'\"\udc80",
    }
    written = build_arguments(["0"], values | others, forward, {}, "x").as_code(lambda path: "t", TorchDialect().opaque)
    args, kwargs = eval(f"(lambda *args, **kwargs: (args, kwargs))({written})", {"torch": torch, "t": 0})
    assert args == (0, [1, (2.5,)], {"k": None})
    assert math.isnan(kwargs.pop("nan"))
    assert kwargs == {
        "inf": [-math.inf],
        "numpy": 0.5,
        "dtype": torch.float16,
        "device": [torch.device("cuda:0")],
        "text": others["text"],
    }


def test_names_in_a_run_cannot_become_code(run: Path, file: Path, tmp_path: Path) -> None:
    from tensortap.replay.arguments import build_arguments

    def forward(**anything: Any) -> None: ...

    evil = 'a=print("hello"), b'
    kept = {
        "k": evil,
        "dtype": OpaqueValue("dtype", evil),
        "device": OpaqueValue("device", evil),
        "other": OpaqueValue("object", evil),
    }
    found = build_arguments([evil], kept, forward, {}, "x")
    written = found.as_code(lambda path: "t", TorchDialect().opaque)
    assert eval(f"dict({written})", {"t": 1, "torch": SimpleNamespace(device=str)}) == {
        evil: 1,
        "k": evil,
        "device": evil,
    }
    assert len(found.assumed) == 2, "an invalid dtype name is not written, but noted"
    with tt.open(run) as opened:
        opened.info["environment"]["versions"] = {'"""\nprint("hello")\n"""': "1"}
        tt.replay(opened, "first", f"{file}:build", repro=tmp_path / "bug")
    assert 'print("hello")' not in (tmp_path / "bug" / "repro.py").read_text()
    assert run_script(tmp_path / "bug")


def test_imported_files_that_are_not_copied_are_noted(run: Path, file: Path, tmp_path: Path) -> None:
    (file.parent / "widths.py").write_text("WIDTH = 4\n")
    file.write_text("import json\nfrom widths import WIDTH\n" + MODEL)
    result = tt.replay(run, "mixer", f"{file}:build", repro=tmp_path / "bug")
    notes = [note for note in result.notes if note.startswith("repro:")]
    assert len(notes) == 1
    assert f"{file.name} imports widths.py from the same folder: copy that to" in notes[0]
