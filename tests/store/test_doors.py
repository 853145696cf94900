"""Every invalid file ends in one TensortapError of bounded length, in bounded time and memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from storing import record, write

import tensortap as tt
from tensortap.errors import RunUnreadable, TensortapError, shorten
from tensortap.store import open_run
from tensortap.store.exports.export import export
from tensortap.store.format import SCHEMA
from tensortap.store.noise_file import is_noise, read_noise

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "x" * 100_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run")
    return tmp_path / "run"


def read_all(path: Path) -> None:
    """Read everything that a run offers."""
    with tt.open(path) as run:
        _ = run.notices, run.coverage, run.finished, run.steps
        for each in run:
            run.arguments(each)
            if each.location is not None:
                run.load(each)


def refused(path: Path, words: str) -> str:
    with pytest.raises(TensortapError, match=words) as caught:
        read_all(path)
    assert len(str(caught.value)) <= 2000
    return str(caught.value)


# --- the JSON files of a run ---------------------------------------------------------------------------------------
def with_info(run: Path, **changes: Any) -> Path:
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, **changes}))
    return run


@pytest.mark.parametrize("changes", [{"config": [1]}, {"framework": 3}, {"model": {}}, {"environment": LONG}])
def test_run_json_with_a_field_of_another_type(run: Path, changes: dict[str, Any]) -> None:
    refused(with_info(run, **changes), rf"run\.json is damaged: {next(iter(changes))} must be")


def test_deep_json(run: Path) -> None:
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(DEEP)
    refused(run, r"run\.json is damaged: it is nested too deeply")
    (run / "run.json").write_text(text)
    names = ("rank.json", "coverage.json", "calls.jsonl", "loop.jsonl")
    for name in names:
        (run / "rank_0" / name).write_text(DEEP + "\n")
    notices = open_run(run).notices
    assert len(notices) == len(names)
    assert all(any(name in text for text in notices) for name in names)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"modules": {}},
        {"modules": [3]},
        {"modules": [{"module": "a"}]},
        {"modules": [{"module": 3, "class": "", "status": "", "calls": 1, "reason": ""}]},
        {"modules": [{"module": "a", "class": "", "status": "seen", "calls": "1", "reason": ""}]},
        {"modules": [], "notices": "text"},
    ],
)
def test_coverage_that_is_none(run: Path, value: Any) -> None:
    (run / "rank_0/coverage.json").write_text(json.dumps(value))
    found = open_run(run)
    assert found.coverage == {0: []} and "coverage.json is damaged" in found.notices[0] and len(list(found)) == 3


def test_long_texts_are_shortened(run: Path) -> None:
    (run / "rank_0/rank.json").write_text(json.dumps({"status": "failed", "reason": LONG}))
    (run / "rank_0/coverage.json").write_text(json.dumps({"notices": [LONG]}))
    found = open_run(run)
    assert len(found.failure) <= 2000 and all(len(text) < 2100 for text in found.notices)
    assert len(str(RunUnreadable(f"{LONG} is damaged"))) == 2000
    assert str(RunUnreadable(f"{LONG} is damaged")).endswith("is damaged")
    assert shorten("short") == "short"


# --- the index -----------------------------------------------------------------------------------------------------
def with_column(run: Path, name: str, values: Any) -> Path:
    index = run / "rank_0/index.arrows"
    with pa.ipc.open_stream(index.read_bytes()) as stream:
        table = stream.read_all()
    place = table.schema.get_field_index(name)
    table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    with pa.OSFile(str(index), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as stream:
        stream.write_table(table.cast(SCHEMA))
    return run


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("dtype", ["float32", "float33", "float32"], "dtype 'float33', which does not exist"),
        ("dtype", ["float32", LONG, "float32"], "which does not exist"),
        ("shape", [[2, 2], [-2, -2], [2, 2]], "a shape has a size"),
        ("shape", [[2, 2], [1 << 40, 1 << 40], [2, 2]], "more elements than any tensor"),
        ("shape", [[2, 2], [1] * 100, [2, 2]], "100 axes"),
        ("shape", [[2, 2], [2, 3], [2, 2]], "the index is damaged"),
        ("offset", [-16, 0, 0], "the index is damaged"),
        ("offset", [1 << 62, 0, 0], "is cut off"),
        ("file", [LONG, LONG, LONG], "it names a file"),
    ],
)
def test_an_index_that_cannot_be_true(run: Path, column: str, values: Any, words: str) -> None:
    refused(with_column(run, column, values), words)


# --- special files and links -------------------------------------------------------------------------------------
def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # the whole path may be too long for a socket
        server.bind(path.name)


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [fifo, device, bound_socket, folder])
@pytest.mark.parametrize("name", ["run.json", "rank_0/index.arrows", "rank_0/step_000000.0.safetensors"])
def test_files_of_a_run_are_files(
    run: Path, make: Callable[[Path], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    (run / name).unlink()
    make(run / name)
    refused(run, "not a file|leads out of")


@pytest.mark.parametrize("make", [fifo, device, bound_socket])
@pytest.mark.parametrize("name", ["a", "a.npz", "a.hdf5", "a.pt", "a.safetensors", "a.pdparams", "a.pkl", "a.npy"])
def test_only_files_and_folders_are_opened(
    tmp_path: Path, make: Callable[[Path], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    refused(tmp_path / name, "it is a (FIFO|device|socket), not a file")
    assert not is_noise(tmp_path / name)
    with pytest.raises(RunUnreadable, match="not a file"):
        read_noise(tmp_path / name)


def test_links_that_lead_out_of_a_run(run: Path, tmp_path: Path) -> None:
    for name in ("run.json", "rank_0/index.arrows", "rank_0/step_000000.0.safetensors"):
        shutil.copytree(run, tmp_path / "copy")
        shutil.move(tmp_path / "copy" / name, tmp_path / "elsewhere")
        (tmp_path / "copy" / name).symlink_to(tmp_path / "elsewhere")
        refused(tmp_path / "copy", "is a link that leads out of")
        shutil.rmtree(tmp_path / "copy")
        (tmp_path / "elsewhere").unlink()


def test_links_within_a_run_and_to_a_run(run: Path, tmp_path: Path) -> None:
    shard = run / "rank_0/step_000000.0.safetensors"
    shard.rename(run / "kept.safetensors")
    shard.symlink_to("../kept.safetensors")
    (tmp_path / "latest").symlink_to(run)
    read_all(tmp_path / "latest")


def test_a_rank_that_is_a_link_out_of_the_run(run: Path, tmp_path: Path) -> None:
    shutil.move(run / "rank_0", tmp_path / "elsewhere")
    (run / "rank_0").symlink_to(tmp_path / "elsewhere")
    refused(run, "leads out of")


def test_links_of_a_checkpoint_are_followed(tmp_path: Path) -> None:
    """Caches of model hubs consist of them."""
    from safetensors.numpy import save_file

    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "blobs/abc")
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blobs/abc")
    read_all(tmp_path / "snapshot")


@pytest.mark.parametrize("to", ["npy", "safetensors"])
def test_links_that_lead_out_of_an_export(run: Path, tmp_path: Path, to: str) -> None:
    export(open_run(run), to, tmp_path / "out")
    file = next(path for path in (tmp_path / "out").rglob("*") if path.suffix == f".{to}")
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "leads out of" in tt.open(tmp_path / "out").notices[0]


# --- files that change ---------------------------------------------------------------------------------------------
def test_a_shard_that_is_cut_off_while_it_is_mapped(run: Path) -> None:
    found = open_run(run)
    records = list(found)
    for each in records:
        found.load(each)
    os.truncate(run / "rank_0/step_000000.0.safetensors", 100)
    for each in records:
        with pytest.raises(RunUnreadable, match="is cut off"):
            found.load(each)
        with pytest.raises(RunUnreadable, match="is cut off"):
            found.bytes_of(each)


def test_flipped_bits_are_found_by_the_digest(tmp_path: Path) -> None:
    from tensortap.kernels import summarize
    from tensortap.store import RunWriter

    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    with RunWriter(tmp_path / "a", info={}) as writer:
        for number in range(2):
            where = writer.put("x", array + number, step=0)
            writer.append(record(number, array, where, summary=summarize(array + number)))
    shard = tmp_path / "a/rank_0/step_000000.0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)
    found = open_run(tmp_path / "a")
    first, second = found
    assert found.load(first, verify=True).tolist() == array.tolist()
    with pytest.raises(RunUnreadable, match=r"layers\.1 .*its bytes are damaged"):
        found.load(second, verify=True)
    result = found.verify()
    assert not result.ok and result.tensors == 2 and [each.key for each, _ in result.damaged] == [second.key]
    shard.unlink()
    assert len(open_run(tmp_path / "a").verify().damaged) == 2


# --- safetensors ---------------------------------------------------------------------------------------------------
def safetensors(path: Path, header: Any, data: bytes = bytes(64)) -> Path:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(0, 16), "b": entry(8, 24)}, "neither overlap nor leave gaps"),
        ({"a": entry(0, 16), "b": entry(0, 16)}, "neither overlap nor leave gaps"),
        ({"a": entry(0, 16), "b": entry(32, 48)}, "neither overlap nor leave gaps"),
        ({"a": entry(16, 32)}, "neither overlap nor leave gaps"),
        ({"a": entry(0, 1 << 50)}, "is cut off"),
        ({"a": entry(0, 16, [-2, -2])}, "is damaged in the entry of 'a'"),
        ({"a": entry(0, 16, [1 << 62, 1 << 62])}, "is damaged in the entry of 'a'"),
        ({"a": entry(0, 0, [1 << 62, 0])}, "damaged|cannot be read"),
        ({"a": entry(0, 16, dtype="F33")}, "dtype of 'a' is not known"),
        ({"a": entry(0, 16, dtype=["F32"])}, "dtype of 'a' is not known"),
        ({"a": entry(0, 16, 4)}, "is damaged in the entry of 'a'"),
        ({"a": [0, 16]}, "dtype of 'a' is not known"),
        ({LONG: entry(0, 17)}, "is damaged in the entry of"),
        ({"\ud800": entry(0, 16)}, "is damaged in the entry of"),
        (DEEP, "its header is damaged"),
        ("\x80", "its header is damaged"),
        ([], "its header is damaged"),
    ],
)
def test_safetensors_headers(tmp_path: Path, header: Any, words: str) -> None:
    refused(safetensors(tmp_path / "a.safetensors", header), words)


# --- arrays of NumPy -----------------------------------------------------------------------------------------------
def npy_tree(tmp_path: Path) -> Path:
    target = tmp_path / "tree/tensors/rank_0"
    target.mkdir(parents=True)
    return target / "tensor_idx_0_layer_class_Linear_layer_name_fc_micro_step_0.npy"


def npy(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (64 - (10 + len(text) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(16)


@pytest.mark.parametrize(
    "data",
    [
        npy("(1000000000000,)"),
        npy("(-2, -2)"),
        npy("(4611686018427387904, 4611686018427387904)"),
        npy("(4,)", "'|O'"),
        npy("(4,)", "[('a', '<f4', (1000000000,))]"),
        npy("(4,)", "('<f4', (1000000000,))"),
        npy("(4,)", "'<f5'"),
        npy("(4,)", "'<M8[s]'"),
        npy("(" * 200),
        npy("4"),
        b"\x93NUMPY\x01\x00\xff\xff",
        b"\x93NUMPY\x03\x00\xff\xff\xff\x7f",
        b"",
    ],
    ids=range(13),
)
def test_npy_headers(tmp_path: Path, data: bytes) -> None:
    path = npy_tree(tmp_path)
    path.write_bytes(data)
    found = tt.open(tmp_path / "tree")
    assert len(found) == 0 and "cannot be read" in found.notices[0] and len(found.notices[0]) < 1000


def test_an_npy_that_is_an_npz(tmp_path: Path) -> None:
    with npy_tree(tmp_path).open("wb") as file:
        np.savez(file, x=np.ones(3))
    assert "archive of several arrays" in tt.open(tmp_path / "tree").notices[0]


# --- HDF5 ----------------------------------------------------------------------------------------------------------
def hdf5(path: Path, **dataset: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("0000_Linear/feat_output", **dataset)
    return path


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
import tensortap
run = tensortap.open(sys.argv[1])
assert len(run) == 0 and "not tensors that can be read" in run.notices[0], run.notices
"""


@pytest.mark.parametrize("chunks", [None, (1 << 20,)])
def test_hdf5_that_declares_64_gigabytes(tmp_path: Path, chunks: tuple[int] | None) -> None:
    path = hdf5(tmp_path / "a.hdf5", shape=(16 << 30,), dtype="f4", chunks=chunks)
    assert path.stat().st_size < 1 << 20
    subprocess.run([sys.executable, "-c", LIMITED, str(path)], check=True, timeout=60)


@pytest.mark.parametrize("dtype", [h5py.string_dtype(), np.dtype([("a", "f4")]), "S8"])
def test_hdf5_datasets_that_are_not_numbers(tmp_path: Path, dtype: Any) -> None:
    found = tt.open(hdf5(tmp_path / "a.hdf5", shape=(3,), dtype=dtype))
    assert len(found) == 0 and "not tensors that can be read" in found.notices[0]


def test_hdf5_with_values_in_other_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(12))
    found = tt.open(hdf5(tmp_path / "a.hdf5", shape=(3,), dtype="f4", external=[("secret", 0, 12)]))
    assert len(found) == 0 and found.notices


def test_hdf5_attributes_of_other_types(tmp_path: Path) -> None:
    path = hdf5(tmp_path / "a.hdf5", data=np.ones(3, np.float32))
    with h5py.File(path, "a") as file:
        file.attrs.update({"world": "many", "framework": 3, "config": 5, "ranks": [-1, 7], "epoch": "x"})
        file["0000_Linear/feat_output"].attrs.update({"kind": "output", "seq": np.uint64(1 << 63)})
    found = tt.open(path)
    assert found.ranks == [0] and found.info["framework"] == "hdf5" and len(found) == 0


def test_a_folder_of_dumps_with_a_link_and_a_fifo(tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    hdf5(tmp_path / "elsewhere.hdf5", data=np.ones(3, np.float32))
    hdf5(tmp_path / "dumps/0-epoch_0-step_dump.hdf5", data=np.ones(3, np.float32))
    (tmp_path / "dumps/0-epoch_1-step_dump.hdf5").symlink_to(tmp_path / "elsewhere.hdf5")
    os.mkfifo(tmp_path / "dumps/0-epoch_2-step_dump.hdf5")
    found = tt.open(tmp_path / "dumps")
    assert found.steps == [0] and len(found) == 1
    assert "unreadable dumps (2)" in found.notices[0]
    assert "leads out of" in found.notices[0] and "it is a FIFO" in found.notices[0]


# --- checkpoints of torch ------------------------------------------------------------------------------------------
def test_a_state_dict_that_contains_itself(tmp_path: Path) -> None:
    import torch

    state: dict[str, Any] = {"w": torch.ones(2)}
    state["self"] = state
    torch.save(state, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "contains itself")


def test_a_state_dict_with_too_many_names_for_one_value(tmp_path: Path) -> None:
    import torch

    state: dict[str, Any] = {"w": torch.ones(2)}
    for _ in range(40):
        state = {"a": state, "b": state}
    torch.save(state, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "more than 1,000,000 values")


def test_a_tensor_that_repeats_its_elements(tmp_path: Path) -> None:
    import torch

    torch.save({"w": torch.ones(1).expand(1 << 34)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "shows the same elements repeatedly")


# --- manifests and noise -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cell", [DEEP, "[1e400]", "[-1]", "[true]", LONG, '["2"]'])
def test_manifests(run: Path, tmp_path: Path, cell: str) -> None:
    export(open_run(run), "npy", tmp_path / "out")
    manifest = tmp_path / "out/manifest.csv"
    manifest.write_text(manifest.read_text().replace("[2, 2]", cell.replace('"', '""')))
    refused(tmp_path / "out", "is damaged")


def test_a_manifest_that_is_not_text(run: Path, tmp_path: Path) -> None:
    export(open_run(run), "npy", tmp_path / "out")
    manifest = tmp_path / "out/manifest.csv"
    manifest.write_bytes(manifest.read_bytes() + b"\xff\xfe,\n")
    refused(tmp_path / "out", "is damaged")


def test_a_manifest_with_a_shape_that_no_memory_holds(run: Path, tmp_path: Path) -> None:
    export(open_run(run), "npy", tmp_path / "out")
    manifest = tmp_path / "out/manifest.csv"
    manifest.write_text(manifest.read_text().replace("[2, 2]", "[1099511627776, 2]", 1))
    assert "unreadable tensors (1)" in tt.open(tmp_path / "out").notices[0]


def test_the_memory_of_this_process_stayed_small() -> None:
    """All files above declare far more than this."""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 << 20  # KiB
