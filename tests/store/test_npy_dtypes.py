"""The dtypes of a tree of .npy files: kept in its sidecar, or inferred where that is certain, else as saved."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import tensortap
from support.saving import CLASSES, SavingKit, kit_of
from tensortap.compat.saving_hook import register_saving_hook, remove_saving_hook
from tensortap.store.formats.npy.names import parse
from tensortap.store.formats.npy.sidecar import sidecar_path


@pytest.fixture(params=["torch", "paddle"])
def kit(request: pytest.FixtureRequest) -> SavingKit:
    return kit_of(request.param)


def save(kit: SavingKit, path: Path, **options: Any) -> Path:
    model = register_saving_hook(kit.net(**options), path, CLASSES, -1, -1)
    kit.train(model, 2)
    remove_saving_hook(model)
    return path


def without_sidecar(path: Path) -> Path:
    """As other tools of this scheme leave it."""
    shutil.rmtree(path / "tensortap")
    return path


def put(root: Path, layer: str, array: Any, micro: int = 0, index: int = 0) -> Path:
    folder = root / "tensors" / "rank_0"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"tensor_idx_{index}_layer_class_L_layer_name_{layer}_micro_step_{micro}.npy"
    np.save(file, array)
    return file


def rounded(*shape: int, seed: int = 0) -> Any:
    """bfloat16 values in a float32 array."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def dtypes_in(path: Path) -> dict[str, str]:
    return {record.key.module: record.dtype for record in tensortap.open(path).records(kind="output")}


# --- as the hook leaves it -----------------------------------------------------------------------------------------
def test_a_tree_keeps_dtypes_and_is_equal_to_a_captured_run(kit: SavingKit, tmp_path: Path) -> None:
    save(kit, tmp_path / "tree", dtype="bfloat16")
    model = kit.net(dtype="bfloat16")
    kinds = ("output", "param_grad")
    with tensortap.capture(model, tmp_path / "run", keep="tensors", kinds=kinds, classes=CLASSES) as tap:
        for step in range(2):
            kit.train(model, first=step)
            tap.step()
    tree, run = tensortap.open(tmp_path / "tree"), tensortap.open(tmp_path / "run")
    assert {(r.key, r.dtype, r.summary.digest) for r in tree} == {(r.key, r.dtype, r.summary.digest) for r in run}
    assert {r.dtype for r in tree.records(kind="output", module="fc1")} == {"bfloat16"}
    record = next(tree.records(module="fc1"))
    assert tree.load(record).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tree.load(record), run.load(run.get(record.key)))  # type: ignore[arg-type]
    result = tensortap.compare(tmp_path / "run", tmp_path / "tree")
    assert result.counts["equal"] == len(result) and not result.unmatched
    assert tree.notices == []


def test_float8_comes_back_bit_for_bit(tmp_path: Path) -> None:
    class Cast(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.to(torch.float8_e4m3fn)

    model = register_saving_hook(Cast(), tmp_path / "t", "Cast")
    x = torch.tensor([1.0, -0.3, 448.0, float("nan"), 0.001])
    with torch.no_grad():
        out = model(x)
    run = tensortap.open(tmp_path / "t")
    (record,) = run
    assert record.dtype == "float8_e4m3fn"
    np.testing.assert_array_equal(run.load(record).view(np.uint8), out.view(torch.uint8).numpy())


def test_folders_of_ranks_hold_nothing_that_older_checkers_trip_over(tmp_path: Path) -> None:
    """They take each entry of a rank's folder for a tensor, and split its name for the index."""
    path = save(kit_of("torch"), tmp_path / "t", dtype="bfloat16")
    entries = [entry.name for kind in ("tensors", "grads") for entry in (path / kind / "rank_0").iterdir()]
    assert entries and all(parse(entry) is not None and int(entry.split("_")[2]) >= 0 for entry in entries)
    assert sorted(entry.name for entry in path.iterdir()) == ["grads", "tensors", "tensortap"]


def test_a_killed_process_leaves_a_readable_sidecar(tmp_path: Path) -> None:
    script = f"""
import os, torch
from tensortap.compat.saving_hook import register_saving_hook
model = register_saving_hook(torch.nn.Linear(64, 64).bfloat16(), {str(tmp_path / "t")!r}, "Linear")
model(torch.randn(8, 64).bfloat16())
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 9
    assert dtypes_in(tmp_path / "t") == {"": "bfloat16"}


def test_a_torn_line_costs_that_line_only(tmp_path: Path) -> None:
    path = save(kit_of("torch"), tmp_path / "t", dtype="bfloat16")
    sidecar = sidecar_path(path, 0)
    sidecar.write_bytes(sidecar.read_bytes() + b'{"file": "tensors/tensor_id')  # killed while it wrote
    save(kit_of("torch"), path, dtype="bfloat16")
    lines = sidecar.read_text().splitlines()
    assert sum('"format"' in line for line in lines) == 2
    assert all(json.loads(line) for line in lines if line != '{"file": "tensors/tensor_id')
    assert dtypes_in(path)["fc1"] == "bfloat16"


@pytest.mark.parametrize("line", ["[]", "7", '{"file": 3}', '{"file": "x", "dtype": "rubbish"}', "\ud800", "[" * 10**5])
def test_damaged_lines_are_ignored(tmp_path: Path, line: str) -> None:
    path = save(kit_of("torch"), tmp_path / "t", dtype="bfloat16")
    with sidecar_path(path, 0).open("ab") as file:
        file.write(line.encode(errors="surrogatepass") + b"\n")
    assert dtypes_in(path)["fc1"] == "bfloat16"


def test_a_newer_sidecar_is_not_guessed_at(tmp_path: Path) -> None:
    put(tmp_path, "a", np.ones(3, np.float32))
    (tmp_path / "tensortap").mkdir()
    sidecar_path(tmp_path, 0).write_text('{"format": "tensortap-npy", "version": 99}\n')
    (notice,) = tensortap.open(tmp_path).notices
    assert "newer version" in notice


def test_a_file_that_was_replaced_later_is_read_as_it_is(tmp_path: Path) -> None:
    path = save(kit_of("torch"), tmp_path / "t", dtype="bfloat16")
    file = next((path / "tensors/rank_0").glob("*fc1_micro_step_0*"))
    np.save(file, np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32))
    run = tensortap.open(path)
    assert [r.dtype for r in run.records(module="fc1", kind="output")] == ["float32", "bfloat16"]
    assert "it was replaced later" in run.notices[0]


# --- trees without a sidecar ---------------------------------------------------------------------------------------
def test_bfloat16_is_inferred_by_layer_and_reported(kit: SavingKit, tmp_path: Path) -> None:
    """The norm works in float32 here, as under autocast."""
    run = tensortap.open(without_sidecar(save(kit, tmp_path / "t", dtype="bfloat16")))
    outputs = {(record.cls, record.dtype) for record in run.records(kind="output")}
    assert outputs == {("Product", "bfloat16"), ("LayerNorm", "float32")}
    (notice,) = run.notices
    assert notice.startswith("8 tensors count as bfloat16") and "inferred" in notice


def test_in_a_tree_of_bfloat16_alone_small_tensors_are_bfloat16_too(tmp_path: Path) -> None:
    put(tmp_path, "a", rounded(8, 8))
    put(tmp_path, "loss", rounded(1), index=1)
    put(tmp_path, "zeros", np.zeros(5, np.float32), index=2)
    assert set(dtypes_in(tmp_path).values()) == {"bfloat16"}


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((8, 8), np.float32),
        np.ones((8, 8), np.float32),
        np.arange(257, dtype=np.float32),
        np.arange(-128, 128, dtype=np.float32) / 128,
        np.exp2(np.arange(-60, 60)).astype(np.float32),
        np.random.default_rng(0).choice([0.0, 1.25], (64, 64)).astype(np.float32),
        np.random.default_rng(0).standard_normal(4096).astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
        np.random.default_rng(0).standard_normal(4096).astype(np.float16).astype(np.float32),
        np.array([1.0078125, 2.015625], np.float32),
    ],
    ids=["zeros", "ones", "integers", "fixed point", "powers of two", "mask", "float8", "float16", "two values"],
)
def test_values_that_would_fit_by_themselves_are_not_called_bfloat16(tmp_path: Path, array: Any) -> None:
    put(tmp_path, "a", array)
    run = tensortap.open(tmp_path)
    assert [record.dtype for record in run] == ["float32"]
    assert run.notices == []


def test_an_embedding_that_was_loaded_from_bfloat16_does_not_make_a_float32_model_bfloat16(tmp_path: Path) -> None:
    put(tmp_path, "embedding", rounded(16, 64))
    for index in range(1, 9):
        put(
            tmp_path,
            f"layers.{index}",
            np.random.default_rng(index).standard_normal((16, 64)).astype(np.float32),
            0,
            index,
        )
    assert set(dtypes_in(tmp_path).values()) == {"float32"}


def test_a_layer_that_is_float32_in_one_micro_step_is_float32_in_all(tmp_path: Path) -> None:
    put(tmp_path, "a", rounded(16, 64), 0, 0)
    put(tmp_path, "a", np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32), 1, 1)
    put(tmp_path, "b", rounded(16, 64, seed=2), 0, 2)
    run = tensortap.open(tmp_path)
    assert {(r.key.module, r.key.step, r.dtype) for r in run} == {
        ("a", 0, "float32"),
        ("a", 1, "float32"),
        ("b", 0, "bfloat16"),
    }


def test_one_element_at_the_end_of_a_large_tensor_decides(tmp_path: Path) -> None:
    array = rounded(3, 700_001)
    array[-1, -1] = 0.1
    put(tmp_path, "a", array)
    assert dtypes_in(tmp_path) == {"a": "float32"}


# --- names ---------------------------------------------------------------------------------------------------------
def test_two_models_of_one_process_are_compared_by_their_place_in_the_model(kit: SavingKit, tmp_path: Path) -> None:
    """Paddle numbers layers over the process: no file name of the two trees is the same."""
    for name, split in (("a", False), ("b", True), ("c", False)):
        save(kit, tmp_path / name, split=split)
    for other in "bc":
        result = tensortap.compare(tmp_path / "a", tmp_path / other)
        assert result.verdict == "match" and len(result) == 10 and not result.unmatched
    assert {row["module"] for row in result.table.to_pylist()} == {"fc1", "norm", "fc2"}


def test_a_tree_without_a_sidecar_is_compared_by_the_names_of_files(kit: SavingKit, tmp_path: Path) -> None:
    save(kit, tmp_path / "a")
    without_sidecar(save(kit, tmp_path / "b"))
    for pair in ("ab", "ba"):
        result = tensortap.compare(tmp_path / pair[0], tmp_path / pair[1])
        assert result.verdict == "match" and len(result) == 10 and not result.unmatched
    by_order = "paired with those of the reference by their order" in " ".join(result.notes)
    assert by_order == (kit.name == "paddle")


def test_a_tree_of_torch_is_compared_with_a_tree_of_paddle(tmp_path: Path) -> None:
    """Transposed weights are transposed back, as for captured runs."""
    paddle = pytest.importorskip("paddle")
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    theirs = paddle.nn.Sequential(paddle.nn.Linear(6, 8), paddle.nn.GELU(), paddle.nn.Linear(8, 3))
    tensortap.transfer(ours, theirs)
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    for model, batch, name in ((ours, torch.from_numpy(x), "torch"), (theirs, paddle.to_tensor(x), "paddle")):
        register_saving_hook(model, tmp_path / name)
        model(batch).square().mean().backward()
        remove_saving_hook(model)
    result = tensortap.compare(tmp_path / "torch", tmp_path / "paddle")
    assert result.verdict == "match" and len(result) == 8 and not result.unmatched
