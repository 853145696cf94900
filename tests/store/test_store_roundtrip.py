"""Written tensors are read back bit for bit, also by tools that do not know tensortap."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import safetensors
import safetensors.torch
import torch
from storing import record, same, summary, write

from tensortap.core import dtypes
from tensortap.core.records import Coverage, Key
from tensortap.errors import UsageError
from tensortap.store import RunWriter, open_run
from tensortap.store.format import END_OF_STREAM, SCHEMA

SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4), (7, 1, 3)]


def bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bits at all, NaN payloads and denormals among them."""
    kind = dtypes.numpy_dtype(dtype)
    count = int(np.prod(shape)) * kind.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count, np.uint8)
    return raw.view(kind).reshape(shape)


@pytest.mark.parametrize("writers", [1, 3])
def test_every_dtype_and_shape(tmp_path, writers):
    arrays = [bits(name, shape) for name in dtypes.NAMES for shape in SHAPES]
    with RunWriter(tmp_path / "a", info={}, writers=writers) as writer:
        for number, array in enumerate(arrays):
            where = writer.put(f"t{number}", array, step=number % 3)
            writer.append(record(number, array, where))
    run = open_run(tmp_path / "a")
    assert run.finished and run.notices == [] and len(run) == len(arrays)
    for found, array in zip(run, arrays, strict=True):
        loaded = run.load(found)
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        assert loaded.tobytes() == array.tobytes() == bytes(run.bytes_of(found))
        assert not loaded.flags.writeable and loaded.flags.aligned
        tensor = run.torch(found)
        assert str(tensor.dtype) == f"torch.{found.dtype}" and tuple(tensor.shape) == array.shape
        assert bytes(tensor.reshape(-1).view(tensor.dtype).untyped_storage()) == array.tobytes()
    streamed = {found.seq: array.tobytes() for found, array in run.stream()}
    assert streamed == {number: array.tobytes() for number, array in enumerate(arrays)}


def test_safetensors_reads_the_files(tmp_path):
    arrays = {name: bits(name, (3, 5)) for name in dtypes.NAMES}
    with RunWriter(tmp_path / "a", info={}) as writer:
        for name, array in arrays.items():
            writer.put(name, array, step=12)
    (path,) = (tmp_path / "a/rank_0").glob("*.safetensors")
    assert path.name == "step_000012.0.safetensors"
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tuple(loaded[name].shape) == (array.shape if name != "complex128" else (3, 5, 2))
        flat = loaded[name].contiguous().reshape(-1)
        assert flat.view(torch.uint8).numpy().tobytes() == array.tobytes()


def test_plain_pyarrow_and_pandas_read_the_index(tmp_path):
    write(tmp_path / "a", 5)
    with pa.OSFile(str(tmp_path / "a/rank_0/index.arrows")) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.schema.equals(SCHEMA)
    assert table.column("digest").type == pa.uint64() and table.column("mean").to_pylist() == [0, 1, 2, 3, 4]
    assert all(field.metadata[b"about"] for field in table.schema)
    frame = open_run(tmp_path / "a").to_pandas()
    assert list(frame["module"]) == [f"layers.{n}" for n in range(5)] and set(frame["rank"]) == {0}


@pytest.mark.parametrize("max_buffer", [1, 1000, None])
def test_arrays_that_are_not_contiguous(tmp_path, max_buffer):
    base = np.arange(6 * 7 * 8, dtype=np.float64).reshape(6, 7, 8)
    arrays = [
        base.T,
        base[::2, ::-1, 1::3],
        base.astype(">f8"),
        base.astype(">i2")[:, ::2].T,
        np.broadcast_to(np.float32(3), (4, 50)),
        base.astype(dtypes.numpy_dtype("bfloat16")).transpose(1, 0, 2),
        np.float32(1.5).reshape(()),
        np.array(7, ">u4"),
        np.asfortranarray(base),
        base.reshape(-1)[::-1],
    ]
    with RunWriter(tmp_path / "a", info={}, max_buffer=max_buffer, writers=1) as writer:
        for number, array in enumerate(arrays):
            writer.append(record(number, array, writer.put("same name", array, step=0)))
    run = open_run(tmp_path / "a")
    for found, array in zip(run, arrays, strict=True):
        assert np.array_equal(run.load(found), array) and run.load(found).dtype.isnative
    (path,) = (tmp_path / "a/rank_0").glob("*.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        assert len(file.keys()) == len(arrays) and "same name #3" in file.keys()  # noqa: SIM118


def test_the_caller_may_change_the_array_at_once(tmp_path):
    array = np.zeros(1000, np.int32)
    with RunWriter(tmp_path / "a", info={}, max_buffer=3000) as writer:
        for number in range(50):
            array[:] = number
            writer.append(record(number, array, writer.put("x", array, step=0)))
        array[:] = -1
    run = open_run(tmp_path / "a")
    assert [set(run.load(found).tolist()) for found in run] == [{n} for n in range(50)]


def test_unsupported_dtypes_raise(tmp_path):
    with RunWriter(tmp_path / "a", info={}) as writer, pytest.raises(UsageError, match="datetime64"):
        writer.put("x", np.zeros(2, "datetime64[s]"), step=0)


def test_records_come_back_whole(tmp_path):
    nothing = {name: float("nan") for name in ("min", "max", "mean", "std")}
    written = [
        record(0, summary=summary(0, digest=2**64 - 1, **nothing)),
        record(1, shape=(), cls="", module=""),
        record(2, shape=(0, 3), step=2**40, summary=summary(2, nan=3, posinf=2, neginf=1, l1=float("inf"))),
    ]
    with RunWriter(tmp_path / "a", info={"framework": "torch", "config": {"at": tmp_path}}) as writer:
        for each in written:
            writer.append(each)
        writer.coverage([Coverage("fc", "Linear", "seen", 3)], ["old"])
        writer.coverage([Coverage("fc", "Linear", "never called", 0, "why")], ["a graph was compiled"])
    run = open_run(tmp_path / "a")
    assert all(same(*pair) for pair in zip(run, written, strict=True))
    assert run.info["framework"] == "torch" and run.info["config"] == {"at": str(tmp_path)}
    assert run.coverage == {0: [Coverage("fc", "Linear", "never called", 0, "why")]}
    assert run.notices == ["rank 0: a graph was compiled"]


def test_a_tensor_seen_again_has_its_sketch_once_on_disk(tmp_path):
    with RunWriter(tmp_path / "a", info={}) as writer:
        for seq in range(600):
            number = seq % 7
            writer.append(record(number, seq=seq, summary=summary(number)))
            if seq == 3:
                writer.flush()
    run = open_run(tmp_path / "a")
    column = run.index(0).column("sketch")
    assert len(column) - column.null_count == 7
    assert all(np.array_equal(found.summary.sketch, np.full(256, found.seq % 7)) for found in run)
    matrix, which = run.sketches(0)
    assert matrix.shape == (7, 256) and matrix[which][:, 0].tolist() == [n % 7 for n in range(600)]


def test_records_are_given_in_execution_order(tmp_path):
    order = np.random.default_rng(0).permutation(500)
    with RunWriter(tmp_path / "a", info={}) as writer:
        for seq in order.tolist():
            writer.append(record(seq))
    assert [found.seq for found in open_run(tmp_path / "a")] == list(range(500))


def test_filters(tmp_path):
    with RunWriter(tmp_path / "a", info={}) as writer:
        for number in range(40):
            kind = "input" if number % 2 else "output"
            bad = summary(number, nan=int(number == 11))
            where = writer.put("x", np.zeros(2, np.float32), step=number // 10) if number == 5 else None
            writer.append(record(number, None, where, step=number // 10, kind=kind, summary=bad, shape=(2,)))
    run = open_run(tmp_path / "a")

    def seqs(**filters):
        return [found.seq for found in run.records(**filters)]

    assert seqs() == list(range(40)) and run.steps == [0, 1, 2, 3]
    assert seqs(module="layers.1*", kind="input") == [1, 11, 13, 15, 17, 19]
    assert seqs(module=["layers.3", "layers.?9"]) == [3, 19, 29, 39]
    assert seqs(step=range(2, 10**12), kind={"output"}) == list(range(20, 40, 2))
    assert seqs(step=1, nonfinite=True) == seqs(nonfinite=True) == [11]
    assert seqs(kept=True) == [5] == [found.seq for found, _ in run.stream()]
    assert seqs(phase="backward") == seqs(rank=[3]) == []
    assert run.get(Key(1, 0, "forward", "layers.12", 0, "output", "0")).seq == 12
    assert run.get(Key(1, 0, "forward", "layers.12", 0, "input", "0")) is None
    assert run.get(Key(1, 0, "forward", "layers.12", 0, "output", "0"), rank=1) is None
    with pytest.raises(TypeError):
        seqs(colour="red")


def test_an_open_run_is_readable_while_it_is_written(tmp_path):
    with RunWriter(tmp_path / "a", info={}) as writer:
        array = np.arange(10.0)
        writer.append(record(0, array, writer.put("x", array, step=0)))
        writer.flush()
        run = open_run(tmp_path / "a")
        assert not run.finished and len(run) == 1 and "not closed" in run.notices[0]
        assert np.array_equal(run.load(next(iter(run))), array)
        assert not list((tmp_path / "a/rank_0").glob("*.safetensors"))
        writer.end_step(0)
        writer.flush()
        assert [p.name for p in (tmp_path / "a/rank_0").glob("step*")] == ["step_000000.0.safetensors"]
        # Opened before, loaded after the rename.
        assert np.array_equal(open_run(tmp_path / "a").load(next(iter(run))), array)
    assert (tmp_path / "a/rank_0/index.arrows").read_bytes().endswith(END_OF_STREAM)


def test_files_roll_over_when_the_header_is_full_or_the_file_large(tmp_path, monkeypatch):
    monkeypatch.setattr("tensortap.store.writer.shard.FIRST_REGION", 256)
    monkeypatch.setattr("tensortap.store.writer.shard.LARGEST_FILE", 50_000)
    with RunWriter(tmp_path / "a", info={}, writers=1) as writer:
        for number in range(300):
            array = np.full(100, number, np.int64)
            writer.append(record(number, array, writer.put(f"t{number}", array, step=number // 100)))
    run = open_run(tmp_path / "a")
    assert all(set(run.load(found).tolist()) == {found.seq} for found in run)
    names = set()
    for path in (tmp_path / "a/rank_0").glob("*.safetensors"):
        with safetensors.safe_open(path, "np") as file:
            names |= set(file.keys())
        assert path.stat().st_size < 64_000
    assert names == {f"t{number}" for number in range(300)}
    assert len(list((tmp_path / "a/rank_0").glob("step_000000.*"))) > 1
    assert len(list((tmp_path / "a/rank_0").glob("step_000002.*"))) == 2  # the header's size was learnt


HOSTILE = [
    "../../etc/passwd",
    "/abs/olute",
    "nul\0byte",
    "new\nline\r\t",
    "x" * 10_000,
    "😀 é \u202e",
    "\"quotes' \\ {}[]",
    "__metadata__",
    "lone \ud800 surrogate",
    "",
    "rank_1",
]


def test_names_of_a_model_stay_inside_the_files(tmp_path):
    with RunWriter(tmp_path / "a", info={}) as writer:
        for number, name in enumerate(HOSTILE * 2):
            array = np.full(3, number)
            where = writer.put(name, array, step=0)
            writer.append(record(number, array, where, module=name, cls=name))
    run = open_run(tmp_path / "a")
    for found, name in zip(run, HOSTILE * 2, strict=True):
        assert found.key.module == name.encode("utf-8", "backslashreplace").decode()
        assert run.load(found).tolist() == [found.seq] * 3
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(
        ["a", "run.json", "rank_0", "rank.json", "index.arrows", "step_000000.0.safetensors"]
    )
    with safetensors.safe_open(tmp_path / "a/rank_0/step_000000.0.safetensors", "np") as file:
        assert len(set(file.keys())) == len(HOSTILE) * 2
