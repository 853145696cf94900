"""HDF5 files as runs: of older dumpers without attributes, with odd layouts, damaged, and pointing elsewhere."""

from __future__ import annotations

from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.compat.dump import HookerAndDumper
from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.store.exports.plain import narrow, widen
from tensortap.store.formats.hdf5 import probe


def old_dump(path: Path, digits: int, scale: float = 1.0) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number, cls in enumerate(("Conv2d", "BatchNorm2d")):
            group = file.create_group(f"{number:0{digits}d}_{cls}")
            group["feat_input0"] = rng.standard_normal((2, 3)).astype(np.float32)
            group["feat_output"] = rng.standard_normal((2, 3)).astype(np.float32) * np.float32(scale)
        group = file.create_group(f"{2:0{digits}d}_BatchNorm2d")
        group["grad_output0"] = np.ones((2, 3), np.float32)
        group.create_dataset("grad_input0", shape=(0,), dtype="f")
    return path


def test_files_without_attributes(tmp_path: Path) -> None:
    three = old_dump(tmp_path / "0-epoch_7-step_dump.hdf5", 3)
    (tmp_path / "b").mkdir()
    four = old_dump(tmp_path / "b/0-epoch_7-step_dump.hdf5", 4, 1.5)
    run = tt.open(three)
    assert [(r.key.step, r.key.module, r.key.kind, r.key.path, r.cls) for r in run] == [
        (7, "0000_Conv2d", "input", "0", "Conv2d"),
        (7, "0000_Conv2d", "output", "0", "Conv2d"),
        (7, "0001_BatchNorm2d", "input", "0", "BatchNorm2d"),
        (7, "0001_BatchNorm2d", "output", "0", "BatchNorm2d"),
        (7, "0002_BatchNorm2d", "grad_output", "0", "BatchNorm2d"),
    ]
    assert run.finished and run.notices == []
    result = tt.compare(three, four)
    assert result.first is not None and result.first.key.module == "0000_Conv2d"
    assert result.counts["equal"] == 3


def test_two_dumps_are_compared_where_their_bytes_are_not_their_tensors(tmp_path: Path) -> None:
    """bfloat16 is float32 in the file, so the comparison cannot read the file as it is."""
    for name, change in (("a", 0.0), ("b", 0.5)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).bfloat16()
        with torch.no_grad():
            model[2].bias += change
        with HookerAndDumper(f"{tmp_path}/{name}/").register_hooks(model, 0, 0):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    paths = [tmp_path / name / "0-epoch_0-step_dump.hdf5" for name in ("a", "b")]
    result = tt.compare(*paths)
    assert result.first is not None and result.first.key.module == "2" and result.first.key.kind == "output"
    assert result.first.max_abs == pytest.approx(0.5, abs=0.02)
    assert tt.compare(paths[0], paths[0]).verdict == "match"


def test_a_dump_compares_with_a_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    with HookerAndDumper(f"{tmp_path}/").register_hooks(model, 0, 0) as handle:
        model(x).sum().backward()
    with tt.capture(model, tmp_path / "run", keep="tensors", modules=["0", "1"]) as tap:
        model(x).sum().backward()
        tap.step()
    result = tt.compare(tmp_path / "run", handle.path)
    assert result.verdict == "match" and result.counts["equal"] == 6


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_survives_as_float32(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    codes = np.arange(1 << (8 * dtype.itemsize), dtype=np.uint16 if dtype.itemsize == 2 else np.uint8)
    wide = widen(codes.view(dtype))
    assert wide.dtype == np.float32
    assert np.array_equal(narrow(wide, name).view(codes.dtype), codes)


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(b"s" * 24)
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["feat_output"] = np.ones(3)
    path = tmp_path / "evil.hdf5"
    with h5py.File(path, "w") as file:
        group = file.create_group("0000_A")
        group["feat_input0"] = np.arange(3.0)
        group["feat_output"] = h5py.ExternalLink("other.h5", "feat_output")
        group.create_dataset(
            "feat_input1", (3,), "f8", external=[(str(tmp_path / "secret.bin"), 0, h5py.h5f.UNLIMITED)]
        )
        group["feat_input2"] = "words"
        group.create_dataset("feat_input3", data=np.arange(6.0), chunks=(2,), compression="gzip")
        group["feat_input3"].attrs["seq"] = "no number"
        group.create_dataset("feat_input4", data=np.arange(6.0, dtype=">f8"), chunks=(2,), compression="gzip")
    run = tt.open(path)
    assert [r.key.path for r in run] == ["0", "4"]
    assert np.array_equal(run.load(list(run)[1]), np.arange(6.0))
    assert "3 datasets are not tensors" in run.notices[0]


def test_damaged_and_missing(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        tt.open(tmp_path / "none.hdf5")
    path = tmp_path / "bad.hdf5"
    path.write_bytes(b"not hdf5")
    with pytest.raises(RunUnreadable, match="HDF5"):
        tt.open(path)


@pytest.mark.parametrize(
    ("walk", "wait"),
    [("import os; os.abort()", 100), ("import time; time.sleep(60)", 2), ("while True: pass", 100)],
    ids=["crash", "hang", "loop"],
)
def test_a_file_that_the_library_does_not_survive_is_refused(tmp_path, monkeypatch, walk, wait):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["0001_Linear/feat_output"] = np.ones(3, np.float32)
    monkeypatch.setattr(probe, "_WALK", walk)
    monkeypatch.setattr(probe, "_SECONDS", 1.0)
    monkeypatch.setattr(probe, "_WAIT", wait)
    monkeypatch.setattr(probe, "_known", {})
    with pytest.raises(RunUnreadable, match="the HDF5 library crashes or does not end"):
        tt.open(tmp_path / "a.hdf5")


def test_a_process_that_waits_for_a_processor_is_no_damage(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["0001_Linear/feat_output"] = np.ones(3, np.float32)
    monkeypatch.setattr(probe, "_WALK", "import time; time.sleep(0.5); print(0)")
    monkeypatch.setattr(probe, "_SECONDS", 0.2)
    monkeypatch.setattr(probe, "_WAIT", 1000)
    monkeypatch.setattr(probe, "_known", {})
    assert len(list(tt.open(tmp_path / "a.hdf5"))) == 1


def test_one_file_that_the_library_does_not_survive_costs_no_other(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.hdf5" for number in range(3)]
    for path in paths:
        with h5py.File(path, "w") as file:
            file["x"] = np.ones(3, np.float32)
    walk = """
import os, sys
for place, path in enumerate(sys.argv[2:]):
    if path.endswith("1.hdf5"):
        os.abort()
    print(place, flush=True)
"""
    monkeypatch.setattr(probe, "_WALK", walk)
    monkeypatch.setattr(probe, "_known", {})
    assert probe.find_damaged(paths) == [paths[1]]
