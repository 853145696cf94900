"""An .npz as a run: one call of a module, named arrays, compressed or not, and archives with false claims."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import RunNotFound, RunUnreadable

Array = np.ndarray[Any, Any]


def call(seed: int = 0, **changes: Any) -> dict[str, Array]:
    """The arrays that the old script saves for a linear layer. `changes` are factors of its tensors."""
    rng = np.random.default_rng(seed)
    weight, x, gradient = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 8), (4, 8), (4, 8)))
    x = x * np.float32(changes.get("x", 1))
    gradient = gradient * np.float32(changes.get("gradient", 1))
    output = x @ (weight * np.float32(changes.get("forward", 1)))
    back = gradient @ (weight * np.float32(changes.get("backward", 1))).T
    return {"grad_input": back, "grad_output": gradient, "input": x, "output": output}


def save(path: Path, arrays: dict[str, Any], compressed: bool = False) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


# --- one call of a module --------------------------------------------------------------------------------------
@pytest.mark.parametrize("compressed", [False, True])
def test_a_call_has_kinds_phases_and_order(tmp_path: Path, compressed: bool) -> None:
    run = tt.open(save(tmp_path / "gradients_and_inputs_down_blk2_b4.npz", call(), compressed))
    assert [(r.key.module, r.key.phase, r.key.kind, r.key.path, r.seq) for r in run] == [
        ("down_blk2_b4", "forward", "input", "0", 0),
        ("down_blk2_b4", "forward", "output", "0", 1),
        ("down_blk2_b4", "backward", "grad_output", "0", 2),
        ("down_blk2_b4", "backward", "grad_input", "0", 3),
    ]
    assert run.steps == [0] and run.ranks == [0] and run.finished and run.notices == []
    for record in run:
        assert np.array_equal(run.load(record), call()[record.key.kind])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"forward": 1.01}, "The runs part in module: in step 0, its output 0 is off by 0.01"),
        ({"x": 1.01}, "input 0 of module is off by 0.01 (relative L2) already"),
        ({"backward": 1.01}, "The forward pass agrees; the runs part in the backward of module"),
        ({"gradient": 1.01}, "the gradient that enters module at its output is off by 0.01"),
    ],
)
def test_the_verdict_distinguishes_a_module_from_its_inputs(tmp_path: Path, changes: Any, sentence: str) -> None:
    gpu, cpu = save(tmp_path / "gpu.npz", call()), save(tmp_path / "cpu.npz", call(**changes), compressed=True)
    result = tt.compare(gpu, cpu)
    assert result.verdict == "diverged" and sentence in str(result)
    assert tt.compare(gpu, gpu).verdict == "match"


def test_two_calls_pair_whatever_their_modules_are_called(tmp_path: Path) -> None:
    ours = save(tmp_path / "gradients_and_inputs_b4.npz", call())
    for name in ("gradients_and_inputs_block_4.1.npz", "other.npz", "gradients_and_inputs_b4.rank1.2.npz"):
        theirs = save(tmp_path / name, call(forward=1.01))
        result = tt.compare(ours, theirs)
        assert len(result) == 4 and not result.unmatched
        assert result.first is not None and result.first.module == "b4"
        assert tt.compare(ours, theirs, noise=theirs).verdict == "match"


def test_further_tensors_and_a_second_backward(tmp_path: Path) -> None:
    names = ["input", "input_mask", "input_1", "output", "output_extra.pair.0", "grad_output", "grad_output~2"]
    run = tt.open(save(tmp_path / "a.npz", {name: np.full(3, number) for number, name in enumerate(names)}))
    assert [(r.key.kind, r.key.path) for r in run] == [
        ("input", "0"),
        ("input", "mask"),
        ("input", "1"),
        ("output", "0"),
        ("output", "extra.pair.0"),
        ("grad_output", "0"),
        ("grad_output", "0~2"),
    ]


def test_bfloat16_is_read_as_it_was(tmp_path: Path) -> None:
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in call().items()}
    wide = {name: array.astype(np.float32) for name, array in tensors.items()}
    bits = {name: array.view(np.uint16) for name, array in tensors.items()}
    said = np.array(json.dumps(dict.fromkeys(tensors, "bfloat16")))
    forms = {
        "wide": {**wide, "dtypes": said},
        "bits": {**bits, "dtypes": said},
        "numpys_own": tensors,  # NumPy saves them as a void type
        "paddles": bits,
    }
    runs = {name: tt.open(save(tmp_path / f"{name}.npz", arrays)) for name, arrays in forms.items()}
    for run in runs.values():
        assert {record.dtype for record in run} == {"bfloat16"}
        assert all(run.load(r).tobytes() == tensors[r.key.kind].tobytes() for r in run)
    assert "uint16 is read as the bits of bfloat16" in runs["paddles"].notices[0]
    assert not runs["wide"].notices and not runs["bits"].notices and not runs["numpys_own"].notices
    assert tt.compare(runs["wide"].path, runs["paddles"].path).verdict == "match"


def test_integers_without_gradients_stay_integers(tmp_path: Path) -> None:
    run = tt.open(save(tmp_path / "a.npz", {"input": np.arange(4, dtype=np.uint16), "output": np.ones(3)}))
    assert [record.dtype for record in run] == ["uint16", "float64"]


def test_values_that_cannot_have_been_bfloat16_are_an_error(tmp_path: Path) -> None:
    said = np.array(json.dumps({"output": "bfloat16"}))
    path = save(tmp_path / "a.npz", {"output": np.array([1.0, 1.0 + 2**-20], np.float32), "dtypes": said})
    with pytest.raises(RunUnreadable, match=r"a\.npz: output cannot be read: .*that bfloat16 cannot represent"):
        list(tt.open(path))


@pytest.mark.parametrize("said", ["{", "[]", '{"output": "float12"}', '{"output": 3}', "[" * 5000])
def test_dtypes_that_cannot_be_read_are_reported(tmp_path: Path, said: str) -> None:
    run = tt.open(save(tmp_path / "a.npz", {"output": np.ones(3), "dtypes": np.array(said)}))
    assert len(run) == 1 and "its member dtypes cannot be read" in run.notices[0]


# --- arrays by name --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compressed", [False, True])
def test_named_arrays_are_parameters(tmp_path: Path, compressed: bool) -> None:
    weights = {"embed.weight": np.ones((3, 2)), "layers.0.fc.bias": np.arange(4.0), "input_proj.weight": np.ones(2)}
    run = tt.open(save(tmp_path / "a.npz", weights, compressed))
    assert [(r.key.module, r.key.kind, r.key.path) for r in run] == [
        ("embed", "param", "weight"),
        ("layers.0.fc", "param", "bias"),
        ("input_proj", "param", "weight"),
    ]
    other = save(tmp_path / "b.npz", {**weights, "layers.0.fc.bias": np.arange(4.0) + 1}, compressed)
    assert "layers.0.fc" in str(tt.compare(run.path, other))


def test_an_archive_is_recognised_by_its_content(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", call()).rename(tmp_path / "dump")
    assert len(tt.open(tmp_path / "dump")) == 4


def test_orders_and_types_that_numpy_can_save(tmp_path: Path) -> None:
    arrays = {
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(6, dtype=">f4"),
        "none": np.empty((0, 3)),
        "one": np.array(3.5),
        "text": np.array("words"),
        "objects": np.array([{"a": 1}], object),
        "fields": np.zeros(2, [("a", "f4"), ("b", "i4")]),
    }
    for compressed in (False, True):
        run = tt.open(save(tmp_path / "a.npz", arrays, compressed))
        assert [record.key.path for record in run] == ["columns", "big", "none", "one"]
        for record in run:
            assert np.array_equal(run.load(record), arrays[record.key.path])
        assert "unreadable arrays (3)" in run.notices[0] and "only pickle can read" in run.notices[0]


# --- damage and false claims ------------------------------------------------------------------------------------
def test_python_objects_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", {**call(), "input": np.array([np.ones(2), np.ones(3)], object)})
    with pytest.raises(RunUnreadable, match=r"a\.npz: input cannot be read: it holds Python objects"):
        list(tt.open(path))
    with pytest.raises(RunUnreadable, match="only pickle"):
        list(tt.open(save(tmp_path / "b.npz", {"config": np.array({"a": 1})})))


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def npy(shape: tuple[int, ...], data: bytes = b"", descr: str = "<f8") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 40, 1 << 40), (5,), (-1,), (1,) * 200])
def test_a_header_cannot_claim_bytes_beyond_the_member(tmp_path: Path, shape: Any, method: int) -> None:
    path = archive(tmp_path / "a.npz", {"output.npy": npy(shape, bytes(8))}, method)
    with pytest.raises(RunUnreadable, match=r"a\.npz: output cannot be read"):
        list(tt.open(path))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(tmp_path: Path, method: int) -> None:
    path = archive(tmp_path / "a.npz", {"output.npy": npy((1,), bytes(8))}, method)
    with pytest.raises(RunUnreadable, match="NumPy does not write"):
        list(tt.open(path))


def test_a_directory_that_claims_more_than_compression_can_give(tmp_path: Path) -> None:
    size = 1 << 31
    path = archive(tmp_path / "a.npz", {"output.npy": npy((size // 8,), bytes(8))}, zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02") + 24  # the size in the directory
    data[at : at + 4] = struct.pack("<I", size)
    path.write_bytes(data)
    with pytest.raises(RunUnreadable, match="bytes cannot hold"):
        list(tt.open(path))


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    for compressed in (False, True):
        path = save(tmp_path / "a.npz", call(), compressed)
        data = bytearray(path.read_bytes())
        data[600] ^= 1
        path.write_bytes(data)
        with pytest.raises(RunUnreadable, match=r"a\.npz: \w+ cannot be read"):
            list(tt.open(path))


def test_damage_anywhere_is_one_error_or_none(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    wholes = [save(tmp_path / f"{number}.npz", call(), bool(number)).read_bytes() for number in range(2)]
    for number in range(300):
        torn = bytearray(wholes[number % 2])
        for _ in range(1 + number % 3):
            torn[dice.integers(len(torn))] = dice.integers(256)
        path = tmp_path / f"torn{number}.npz"
        path.write_bytes(torn if number % 5 else torn[: dice.integers(len(torn))])
        try:
            run = tt.open(path)
            assert all(run.load(record).shape == record.shape for record in run)
        except RunUnreadable as error:
            assert path.name in str(error)
        path.unlink()


def test_members_that_are_no_arrays_and_names_twice(tmp_path: Path) -> None:
    with pytest.raises(RunUnreadable, match="holds no arrays"):
        tt.open(archive(tmp_path / "a.npz", {"readme.txt": b"Hello"}))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "b.npz", "w") as file:
        for _ in range(2):
            file.writestr("output.npy", npy((1,), bytes(8)))
    with pytest.raises(RunUnreadable, match="several of its arrays have the same name"):
        tt.open(tmp_path / "b.npz")


@pytest.mark.parametrize("make", [lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"PK\x03\x04 not a zip")])
def test_files_that_are_not_archives(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "a.npz")
    with pytest.raises(RunUnreadable, match=r"a\.npz cannot be read as an \.npz archive"):
        tt.open(tmp_path / "a.npz")
    with pytest.raises(RunNotFound):
        tt.open(tmp_path / "none.npz")


def test_an_archive_that_changes_later(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", call())
    run = tt.open(path)
    record = next(iter(run))
    os.truncate(path, 0)
    with pytest.raises(RunUnreadable, match=r"a\.npz is cut off"):
        run.load(record)
