"""`tensortap export`: every format gives the tensors back, hostile names stay inside, nothing is overwritten."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from showing import call
from torch import nn

import tensortap as tt

Capsys = pytest.CaptureFixture[str]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).bfloat16()
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=("input", "output", "grad_output", "param")) as tap:
        for _ in range(2):
            model(torch.randn(3, 4).bfloat16()).sum().backward()
            tap.step()
    return tmp_path / "run"


def manifest(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def expected(run: Path) -> dict[tuple[str, ...], Any]:
    opened = tt.open(run)
    return {tuple(map(str, r.key)): opened.load(r) for r in opened}


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("step", "micro", "phase", "module", "call", "kind", "path"))


def test_npy_and_npz(capsys: Capsys, run: Path, tmp_path: Path) -> None:
    wanted = expected(run)
    ended = call(capsys, "export", run, "--to", "npy", "--out", tmp_path / "tree")
    assert ended.code == 0 and f"{len(wanted)} tensors" in ended.out
    rows = manifest(tmp_path / "tree/manifest.csv")
    assert {key_of(row) for row in rows} == set(wanted)
    for row in rows:
        array = np.load(tmp_path / "tree" / row["file"])
        assert (row["dtype"], array.dtype) == ("bfloat16", np.float32)
        assert np.array_equal(array, wanted[key_of(row)].astype(np.float32))
    assert call(capsys, "export", run, "--to", "npz", "--out", tmp_path / "all.npz").code == 0
    with np.load(tmp_path / "all.npz") as arrays:
        for row in manifest(tmp_path / "all.manifest.csv"):
            assert np.array_equal(arrays[row["name"]], wanted[key_of(row)].astype(np.float32))
        assert len(arrays.files) == len(wanted)


def test_hdf5_is_a_run_again(capsys: Capsys, run: Path, tmp_path: Path) -> None:
    assert call(capsys, "export", run, "--to", "hdf5", "--out", tmp_path / "all.hdf5").code == 0
    with h5py.File(tmp_path / "all.hdf5", "r") as file:
        assert set(file) == {"(root)", "0", "1", "2"}
    ended = call(capsys, "compare", run, tmp_path / "all.hdf5")
    assert ended.code == 0 and f"all {len(expected(run))} pairs are equal bit for bit" in ended.out


def test_safetensors_of_parameters_are_a_state_dict(capsys: Capsys, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights"
    ended = call(capsys, "export", run, "--to", "safetensors", "--out", out, "--kind", "param", "--step", "0")
    assert ended.code == 0
    state = load_file(out / "step_000000.safetensors")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).bfloat16()
    model.load_state_dict({name: tensor for name, tensor in state.items() if not name.endswith("/after")})
    opened = tt.open(run)
    for record in opened.records(kind="param", step=0, call=0):
        assert torch.equal(state[f"{record.key.module}.{record.key.path}"], opened.torch(record))


def test_a_checkpoint(capsys: Capsys, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert call(capsys, "export", tmp_path / "a.pt", "--to", "npz", "--out", tmp_path / "a.npz").code == 0
    with np.load(tmp_path / "a.npz") as arrays:
        assert sorted(array.shape for array in arrays.values()) == [(3,), (3, 2)]


def test_filters_and_records_without_bytes(capsys: Capsys, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with tt.capture(model, tmp_path / "run", keep={"0": "tensors"}, kinds=("output",)) as tap:
        for _ in range(3):
            model(torch.ones(1, 2))
            tap.step()
    ended = call(capsys, "export", tmp_path / "run", "--to", "npy", "--out", tmp_path / "x", "--step", "1-2")
    assert "2 tensors" in ended.out and "4 records skipped" in ended.out
    ended = call(capsys, "export", tmp_path / "run", "--to", "npy", "--out", tmp_path / "y", "--module", "nope")
    assert ended.code == 2 and not (tmp_path / "y").exists()


@pytest.mark.parametrize("to", ["hdf5", "npy", "npz", "safetensors"])
def test_a_run_of_summaries_has_nothing_to_export(capsys: Capsys, tmp_path: Path, to: str) -> None:
    model = nn.Linear(4, 4)
    with tt.capture(model, tmp_path / "run", keep={"(root)": "summary"}):
        model(torch.ones(1, 4))
    ended = call(capsys, "export", tmp_path / "run", "--to", to, "--out", tmp_path / "out")
    assert ended.code == 2 and "kept no tensor" in ended.err and 'keep="tensors"' in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["hdf5", "npy", "npz", "safetensors"])
def test_nothing_is_overwritten_unasked(capsys: Capsys, run: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    args = ("export", run, "--to", to, "--out", out)
    assert call(capsys, *args).code == 0
    ended = call(capsys, *args)
    assert ended.code == 2 and "exists already" in ended.err
    assert call(capsys, *args, "--overwrite").code == 0
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("!")
    ended = call(capsys, "export", run, "--to", to, "--out", tmp_path / "mine", "--overwrite")
    assert ended.code == 2 and (tmp_path / "mine/thesis.txt").exists()


@pytest.mark.parametrize("to", ["hdf5", "npy", "npz", "safetensors"])
def test_hostile_names(capsys: Capsys, tmp_path: Path, to: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("..", "../../up", "a/b", "a%2Fb", "/etc", "n\nl", "\ud800", "x" * 400, "é" * 300):
                self._modules[name] = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self._modules.values():
                x = module(x) + 1  # type: ignore[misc]
            return x

    with tt.capture(Odd(), tmp_path / "run", keep="tensors", kinds=("output",)):
        Odd()
    model = Odd()
    with tt.capture(model, tmp_path / "odd", keep="tensors", kinds=("output",)) as tap:
        model(torch.arange(3.0))
        tap.step()
    (tmp_path / "in").mkdir()
    ended = call(capsys, "export", tmp_path / "odd", "--to", to, "--out", tmp_path / "in/out")
    assert ended.code == 0 and "10 tensors" in ended.out
    assert {path.name for path in tmp_path.iterdir()} == {"run", "odd", "in"}
    assert {path.name for path in (tmp_path / "in").iterdir()} <= {"out", "out.manifest.csv"}
    if to == "npy":
        rows = manifest(tmp_path / "in/out/manifest.csv")
        assert len({row["file"] for row in rows}) == 10
        assert all((tmp_path / "in/out" / row["file"]).resolve().is_relative_to(tmp_path / "in/out") for row in rows)
    if to == "hdf5":
        (tmp_path / "in/out").rename(tmp_path / "in/out.hdf5")
        assert call(capsys, "compare", tmp_path / "odd", tmp_path / "in/out.hdf5").code == 0


@pytest.mark.parametrize("page", ["hdf5-dump.md", "export.md"])
def test_the_page_runs(tmp_path: Path, page: str) -> None:
    blocks = (DOCS / page).read_text().split("```")[1::2]
    for block in blocks:
        language, _, code = block.partition("\n")
        if language == "python":
            subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)
        elif page == "export.md":
            for line in code.strip().splitlines():
                line = line.replace("tensortap", f"{sys.executable} -m tensortap", 1)
                subprocess.run(["bash", "-c", line], check=True, cwd=tmp_path, capture_output=True)
