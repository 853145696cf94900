"""MemoryWriter keeps the contract of every writer: a bit-identical round trip, within the bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from storing import record

from tensortap.core.records import Coverage
from tensortap.errors import StoreWriteError, UsageError
from tensortap.store import memory
from tensortap.store.memory import RECORD_BYTES, MemoryWriter

ARRAYS = {
    "scalar": np.array(3.5, np.float32),
    "empty": np.empty((0, 3), np.float16),
    "transposed": np.arange(12, dtype=np.int64).reshape(3, 4).T,
    "strided": np.arange(20, dtype=np.float64)[::3],
    "big-endian": np.arange(5, dtype=">f4"),
    "bfloat16": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j, 3 - 4j], np.complex64),
}


def test_arrays_come_back_bit_for_bit() -> None:
    with MemoryWriter(info={}) as writer:
        for number, (name, array) in enumerate(ARRAYS.items()):
            writer.append(record(number, array, writer.put(name, array, step=0)))
    run = writer.run()
    for found, array in zip(run, ARRAYS.values(), strict=True):
        loaded = run.load(found)
        assert loaded.shape == array.shape and loaded.astype(array.dtype).tobytes() == array.tobytes()


def test_a_stored_array_may_change_afterwards() -> None:
    array = np.ones(4, np.float32)
    with MemoryWriter(info={}) as writer:
        writer.append(record(0, array, writer.put("a", array, step=0)))
        array[:] = 2
    run = writer.run()
    assert np.array_equal(run.load(next(iter(run))), np.ones(4))


class Part:
    """Bytes that arrive only when they are waited for."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = np.frombuffer(data, np.uint8)

    def copy(self, target: npt.NDArray[np.uint8], start: int) -> Callable[[], None]:
        def wait() -> None:
            target[:] = self._data[start : start + target.size]

        return wait


def test_bytes_of_a_device_have_arrived_when_they_are_read() -> None:
    array = np.arange(8, dtype=np.float32)
    parts = [Part(array.tobytes()[:12]), Part(array.tobytes()[12:])]
    with MemoryWriter(info={}) as writer:
        where = writer.put_incoming("a", "float32", array.shape, parts, step=0)
        writer.append(record(0, array, where))
        writer.flush()
        run = writer.run()
        assert np.array_equal(run.load(next(iter(run))), array)


def test_a_part_that_never_arrives_raises() -> None:
    class Broken(Part):
        def copy(self, target: npt.NDArray[np.uint8], start: int) -> Callable[[], None]:
            def wait() -> None:
                raise RuntimeError("the device is gone")

            return wait

    writer = MemoryWriter(info={})
    where = writer.put_incoming("a", "uint8", (4,), [Broken(b"1234")], step=0)
    writer.append(record(0, np.zeros(4, np.uint8), where))
    with pytest.raises(StoreWriteError, match="the device is gone"):
        writer.close()
    run = writer.run()
    assert len(run) == 0 and not run.finished and "the device is gone" in run.notices[0]


def test_from_the_first_tensor_that_does_not_fit_none_is_kept() -> None:
    writer = MemoryWriter(info={}, max_memory=8000)
    small, large = np.zeros(100, np.uint8), np.zeros(7000, np.uint8)
    assert writer.put("one", small, step=0) is not None
    assert writer.put("two", large, step=3) is None
    assert writer.put("three", small, step=3) is None
    assert writer.put_incoming("four", "uint8", (100,), [Part(bytes(100))], step=4) is None
    (notice,) = writer.take_notices()
    assert "from step 3, two on, only summaries are kept" in notice and "max_memory=8000" in notice
    assert writer.take_notices() == []
    writer.append(record(0))
    writer.close()
    assert writer.run().finished and writer.stats()["bytes"] < 8000


def test_a_full_run_takes_no_more_records() -> None:
    writer = MemoryWriter(info={"model": "Net"}, max_memory=3 * RECORD_BYTES)
    for number in range(3):
        writer.append(record(number))
    with pytest.raises(
        StoreWriteError, match=r"in-memory run \d+ \(Net\) is full: .* holds 3 records. Raise max_memory"
    ):
        writer.append(record(3))
    with pytest.raises(StoreWriteError, match="is full"):
        writer.called(0, 0, "a", 0, {"x": 1})
    writer.close("failed", "it was full")
    assert len(writer.run()) == 3 and not writer.run().finished


def test_plain_arguments_count_too() -> None:
    writer = MemoryWriter(info={}, max_memory=100_000)
    with pytest.raises(StoreWriteError, match="is full"):
        for call in range(1000):
            writer.called(0, 0, "a", call, {"scale": call, "text": "x" * 100})
    writer.close()


def test_the_usual_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, neighbours, bound in (
        (64 << 30, 1, 2 << 30),
        (4 << 30, 1, 1 << 30),
        (8 << 30, 2, 1 << 30),
        (0, 1, 2 << 30),
    ):
        monkeypatch.setattr(memory, "memory", lambda available=available: available)
        monkeypatch.setattr(memory, "neighbours", lambda neighbours=neighbours: neighbours)
        assert memory.default_bound() == bound


def test_rows_keep_the_order_of_execution_and_the_first_sketch() -> None:
    with MemoryWriter(info={}) as writer:
        for number in (2, 0, 1):
            writer.append(record(number, tensor=7))
    run = writer.run()
    assert [found.seq for found in run] == [0, 1, 2]
    assert len({found.summary.sketch.tobytes() for found in run}) == 1


def test_coverage_and_status() -> None:
    writer = MemoryWriter(info={}, rank=1, world=2)
    writer.coverage([Coverage("fc", "Linear", "seen", 2)], ["a notice"])
    assert writer.run().coverage == {1: [Coverage("fc", "Linear", "seen", 2)]}
    writer.close()
    writer.close()
    run = writer.run()
    assert run.finished and run.ranks == [1]
    assert run.notices == [
        "it holds rank 1 of 2 alone: in memory, each process has its own run",
        "rank 1: a notice",
    ]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensortap")]


@pytest.mark.parametrize(
    "use",
    [
        lambda writer: writer.append(record(0)),
        lambda writer: writer.put("a", np.zeros(1), step=0),
        lambda writer: writer.flush(),
        lambda writer: writer.end_step(0),
    ],
)
def test_a_closed_writer_takes_nothing(use: Callable[[Any], None]) -> None:
    writer = MemoryWriter(info={})
    writer.close()
    with pytest.raises(UsageError, match="is closed"):
        use(writer)


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="rank must be"):
        MemoryWriter(info={}, rank=2, world=2)
    with pytest.raises(UsageError, match="info must not have version"):
        MemoryWriter(info={"version": 1})
    with MemoryWriter(info={}) as writer, pytest.raises(UsageError, match="cannot be stored"):
        writer.put("a", np.array(["text"]), step=0)


def test_a_folder_of_the_same_name_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = MemoryWriter(info={})
    folder = tmp_path / writer.path / "rank_0"
    folder.mkdir(parents=True)
    (folder / "rank.json").write_text('{"version": 99}')
    writer.append(record(0))
    writer.close()
    assert writer.run().finished
