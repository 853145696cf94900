"""Exports open as runs again: every key and bit, several ranks, and lost or damaged parts."""

from __future__ import annotations

import csv
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from tensortap.core import dtypes
from tensortap.core.records import Key, Record
from tensortap.errors import RunUnreadable
from tensortap.kernels import summarize
from tensortap.store import RunWriter
from tensortap.store.exports.export import export

FORMATS = {"npy": "tree", "npz": "all.npz", "safetensors": "folder", "hdf5": "all.hdf5"}
ODD = ("..", "../../up", "a/b", "a%2Fb", "(root)x", "n\nl", 'q"uo,te', "x" * 400, "é" * 300, ".a", "")
PHASES = {"input": "forward", "output": "forward", "param": "state", "grad_output": "backward"}


def write(path: Path, tensors: list[tuple[Key, Any]], ranks: int = 1) -> Path:
    for rank in range(ranks):
        with RunWriter(path, rank=rank, world=ranks, info={"framework": "torch", "model": "Net"}) as writer:
            for seq, (key, array) in enumerate(tensors):
                array = array + rank if rank else array
                where = writer.put(str(key), array, step=key.step)
                facts = dtypes.name_of(array.dtype), array.shape, seq, summarize(array), where
                writer.append(Record(key, rank, seq, "Linear", *facts))
    return path


def key(module: str, kind: str = "output", step: int = 0, path: str = "0") -> Key:
    return Key(step, 0, PHASES[kind], module, 0, kind, path)


def bits_of(name: str) -> Any:
    """Every bit pattern of a small dtype, else random ones; NaN with payloads among them."""
    dtype = dtypes.numpy_dtype(name)
    if name == "bool":
        return np.array([[True, False, True]])
    if dtype.itemsize <= 2:
        unsigned = np.uint16 if dtype.itemsize == 2 else np.uint8
        return np.arange(1 << (8 * dtype.itemsize)).astype(unsigned).view(dtype).reshape(-1, 16)
    return np.frombuffer(np.random.default_rng(0).bytes(24 * dtype.itemsize), dtype).reshape(2, 3, 4)


def exported(run: Path, to: str, place: Path) -> Path:
    place.mkdir(exist_ok=True)
    export(tt.open(run), to, place / FORMATS[to])
    return place / FORMATS[to]


def same(run: Path, other: Path) -> None:
    result = tt.compare(run, other)
    assert result.verdict == "match" and not result.unmatched and set(result.counts) == {"equal"}
    assert result.counts["equal"] == len(tt.open(run)) and not tt.open(other).notices
    back = tt.compare(other, run)
    assert (back.verdict, back.unmatched) == ("match", [])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    found = [(key("", "param", path="w"), rng.normal(size=(3, 2)).astype(np.float32))]
    for step in range(2):
        for module in ("fc1", "layers.0"):
            found += [(key(module, kind, step), rng.normal(size=(2, 3))) for kind in ("input", "output", "grad_output")]
    return write(tmp_path / "run", found, ranks=2)


@pytest.mark.parametrize("to", FORMATS)
def test_every_dtype_and_bit_comes_back(tmp_path: Path, to: str) -> None:
    tensors = [(key(name), bits_of(name)) for name in dtypes.NAMES]
    tensors += [(key(name, path="empty"), bits_of(name)[:0]) for name in ("bfloat16", "float32", "complex128")]
    tensors += [(key(name, path="single"), bits_of(name).reshape(-1)[5].reshape(())) for name in ("bfloat16", "int64")]
    ours = tt.open(write(tmp_path / "run", tensors))
    theirs = tt.open(exported(tmp_path / "run", to, tmp_path / "out"))
    for record in ours:
        other = theirs.get(record.key)
        assert other is not None and (other.dtype, other.shape) == (record.dtype, record.shape)
        assert other.summary.digest == record.summary.digest
        assert theirs.load(other).tobytes() == ours.load(record).tobytes()
    assert [other.key for other in theirs] == [record.key for record in ours]


@pytest.mark.parametrize("to", FORMATS)
def test_ranks_steps_and_kinds_come_back(run: Path, tmp_path: Path, to: str) -> None:
    other = exported(run, to, tmp_path / "out")
    same(run, other)
    opened = tt.open(other)
    assert (opened.ranks, opened.steps, opened.finished) == ([0, 1], [0, 1], True)
    assert (opened.info["framework"], opened.info["model"]) == ("torch", "Net")
    assert {record.cls for record in opened} == {"Linear"}


@pytest.mark.parametrize("to", FORMATS)
def test_odd_names_come_back(tmp_path: Path, to: str) -> None:
    tensors = [(key(name, path=name), np.arange(3.0) + number) for number, name in enumerate(ODD)]
    same(write(tmp_path / "run", tensors), exported(tmp_path / "run", to, tmp_path / "out"))


@pytest.mark.parametrize("to", ["npy", "npz"])
def test_without_a_manifest_the_names_say_most_of_it(run: Path, tmp_path: Path, to: str) -> None:
    other = exported(run, to, tmp_path / "out")
    for path in tmp_path.glob("out/**/*manifest.csv"):
        path.unlink()
    opened = tt.open(other)
    assert "its manifest is missing" in opened.notices[0]
    assert {(r.rank, r.key) for r in opened} == {(r.rank, r.key) for r in tt.open(run)}
    assert tt.compare(run, other).verdict == "match"


@pytest.mark.parametrize("to", ["npy", "npz"])
def test_a_plain_export_is_compared_in_its_files(run: Path, tmp_path: Path, to: str) -> None:
    opened = tt.open(exported(run, to, tmp_path / "out"))
    assert len(opened) and opened.on_disk
    record = next(opened.records(rank=1))
    assert opened.file(1, record.location.file).is_file()
    assert np.array_equal(opened.load(record), tt.open(run).load(next(tt.open(run).records(rank=1))))
    assert not opened.load(record).flags.writeable
    result = tt.compare(run, opened.path, workers=2, rtol=1e-3)
    assert result.verdict == "match"


def test_a_compressed_archive(run: Path, tmp_path: Path) -> None:
    path = exported(run, "npz", tmp_path / "out")
    arrays = dict(np.load(path))
    np.savez_compressed(path, **arrays)
    same(run, path)
    opened = tt.open(path)
    assert len(opened) and not opened.on_disk


def test_an_export_of_an_unfinished_run_has_a_notice(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunWriter(tmp_path / "run", info={}) as writer:
        array = np.ones(3, np.float32)
        where = writer.put("x", array, step=0)
        writer.append(Record(key("fc"), 0, 0, "", "float32", (3,), 0, summarize(array), where))
        raise ZeroDivisionError
    for to in ("npy", "npz"):
        opened = tt.open(exported(tmp_path / "run", to, tmp_path / to))
        assert not opened.finished and "not finished" in opened.notices[0]


def rewrite(manifest: Path, **changes: Any) -> None:
    """The manifest with other values in its first row."""
    with manifest.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[0] |= changes
    with manifest.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("file", ["../run/run.json", "/etc/passwd", "rank_0/../../x.npy", "", "a\0b", "..", "a\\b"])
def test_a_manifest_cannot_name_files_elsewhere(run: Path, tmp_path: Path, file: str) -> None:
    tree = exported(run, "npy", tmp_path / "out")
    rewrite(tree / "manifest.csv", file=file)
    opened = tt.open(tree)
    assert len(opened) == len(tt.open(run)) - 1
    assert "unreadable tensors (1)" in opened.notices[0] and "is not the name of a file in it" in opened.notices[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "one"},
        {"step": str(1 << 70)},
        {"rank": "-1"},
        {"kind": "thought"},
        {"phase": ""},
        {"dtype": "float12"},
        {"shape": "[-1]"},
        {"shape": "3"},
        {"shape": "[" * 5000},
    ],
)
def test_a_damaged_manifest_is_one_error(run: Path, tmp_path: Path, changes: dict[str, str]) -> None:
    tree = exported(run, "npy", tmp_path / "out")
    rewrite(tree / "manifest.csv", **changes)
    with pytest.raises(RunUnreadable, match=r"manifest\.csv, line 2, is damaged"):
        tt.open(tree)


def test_a_manifest_that_is_cut_off(run: Path, tmp_path: Path) -> None:
    tree = exported(run, "npy", tmp_path / "out")
    text = (tree / "manifest.csv").read_text()
    (tree / "manifest.csv").write_text(text[:-30])
    with pytest.raises(RunUnreadable, match=r"line \d+, is damaged"):
        tt.open(tree)


@pytest.mark.parametrize("changes", [{"shape": "[2, 3]"}, {"dtype": "float64"}, {"dtype": "bfloat16"}])
def test_a_tensor_that_is_not_the_listed_one_is_left_out(run: Path, tmp_path: Path, changes: dict[str, str]) -> None:
    for to, manifest in (("npy", "tree/manifest.csv"), ("npz", "all.manifest.csv")):
        path = exported(run, to, tmp_path / to)
        rewrite(tmp_path / to / manifest, **changes)
        opened = tt.open(path)
        assert len(opened) == len(tt.open(run)) - 1 and "unreadable tensors (1)" in opened.notices[0]


def test_files_that_are_missing_or_damaged(run: Path, tmp_path: Path) -> None:
    tree = exported(run, "npy", tmp_path / "out")
    files = sorted(tree.rglob("*.npy"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-5])
    np.save(files[2], np.array([{"a": 1}], object))
    files[3].write_bytes(b"")
    opened = tt.open(tree)
    assert len(opened) == len(tt.open(run)) - 4
    assert "unreadable tensors (4)" in opened.notices[0] and "and 1 more" in opened.notices[0]
    assert len(tt.compare(run, tree).unmatched) == 4


def test_a_header_cannot_claim_bytes_beyond_the_file(run: Path, tmp_path: Path) -> None:
    tree = exported(run, "npy", tmp_path / "out")
    first = (tree / "manifest.csv").read_text().splitlines()[1].partition(",")[0]
    with (tree / first).open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40, 1 << 20)}
        np.lib.format.write_array_header_1_0(file, header)
    rewrite(tree / "manifest.csv", shape=json.dumps([1 << 40, 1 << 20]), dtype="float64")
    assert "does not fit into the 0 bytes" in tt.open(tree).notices[0]


def test_a_manifest_of_another_archive_is_not_used(run: Path, tmp_path: Path) -> None:
    path = exported(run, "npz", tmp_path / "out")
    np.savez(path, input=np.ones(3), output=np.ones(3))
    assert [record.key.kind for record in tt.open(path)] == ["input", "output"]


def test_arrays_that_the_manifest_omits_are_reported(run: Path, tmp_path: Path) -> None:
    path = exported(run, "npz", tmp_path / "out")
    np.savez(path, more=np.ones(3), **dict(np.load(path)))
    opened = tt.open(path)
    assert "does not list, and that are left out (1): more" in opened.notices[0]
    assert len(opened) == len(tt.open(run))


def test_a_run_is_never_taken_for_an_export(run: Path, tmp_path: Path) -> None:
    shutil.copy(exported(run, "npy", tmp_path / "out") / "manifest.csv", run / "manifest.csv")
    assert tt.open(run).info["format"] == "tensortap-run"


def test_numpy_sees_nothing_but_arrays(run: Path, tmp_path: Path) -> None:
    path = exported(run, "npz", tmp_path / "out")
    with np.load(path, allow_pickle=False) as arrays:
        assert len(arrays.files) == len(tt.open(run))
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.comment)["format"] == "tensortap-export"
