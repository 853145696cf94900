"""A disk that is full, slow or gone: one clear error, no endless wait, and flushed records stay."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors
from storing import record

from tensortap.errors import StoreWriteError, UsageError
from tensortap.store import RunWriter, open_run
from tensortap.store.format import encode
from tensortap.store.writer import index


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("tensortap-index", "tensortap-shard")]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert threads() == []


class Disk:
    """Wraps os.pwrite and os.write, and simulates a full disk. Half of the write that reaches the end succeeds."""

    def __init__(self, monkeypatch, number=errno.ENOSPC):
        self.full = False
        self.number = number
        for name in ("pwrite", "write"):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, real):
        def call(fd, data, *offset):
            if self.full == "soon":
                self.full = True
                return real(fd, data[: len(data) // 2], *offset)
            if self.full:
                raise OSError(self.number, os.strerror(self.number))
            return real(fd, data, *offset)

        return call


def fill(writer, first, count=20, size=1000):
    for number in range(first, first + count):
        array = np.full(size, number, np.int32)
        writer.append(record(number, array, writer.put("x", array, step=first)))


@pytest.mark.parametrize("when", [True, "soon"])
@pytest.mark.parametrize("call", ["put", "append", "flush", "end_step", "close"])
def test_a_full_disk(tmp_path, monkeypatch, call, when):
    disk = Disk(monkeypatch)
    writer = RunWriter(tmp_path / "a", info={}, max_buffer=10_000, writers=2)
    fill(writer, 0)
    writer.end_step(0)
    writer.flush()
    disk.full = when
    with pytest.raises(
        StoreWriteError, match=r"could not write .*rank_0.*No space left on device; free some space"
    ) as caught:
        while True:  # until the background thread has reached the end of the disk
            if call == "close":
                writer.put("x", np.zeros(10), step=1)
                writer.close()
            elif call == "put":
                writer.put("x", np.zeros(5000), step=1)
            elif call == "append":
                writer.append(record(1000))
                writer.end_step(0)
            else:
                fill(writer, 100, 1)
                writer.flush() if call == "flush" else writer.end_step(100)
    assert caught.value.errno == errno.ENOSPC
    if call != "close":
        with pytest.raises(StoreWriteError):
            writer.put("x", np.zeros(1), step=2)
        writer.close()  # said once is enough
    disk.full = False
    run = open_run(tmp_path / "a")
    found = list(run)
    assert [each.seq for each in found[:20]] == list(range(20))
    assert all(set(run.load(each).tolist()) == {each.seq} for each in found[:20])
    whole = list((tmp_path / "a/rank_0").glob("*.safetensors"))
    assert sum(len(safetensors.safe_open(path, "np").keys()) for path in whole) == 20
    assert not run.finished and not any("cut off" in text for text in run.notices)


@pytest.mark.parametrize("crowded", [False, True])
def test_rows_that_wait_are_written_although_tensors_cannot_be(tmp_path, monkeypatch, crowded):
    """The index is behind when the disk is full: it still gets the rows of what is written, and all summaries."""
    monkeypatch.setattr(index.IndexWriter, "hurry", lambda self, step_is_over=False: None)
    monkeypatch.setattr(index, "AGE", 1e6)
    real, partial_file = os.pwrite, tmp_path / "a/rank_0/ring_000002.0.safetensors.partial"

    def pwrite(fd, data, offset):
        if not partial_file.exists():
            return real(fd, data, offset)
        if offset > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:5000], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = RunWriter(tmp_path / "a", info={}, ring=True, rotates=True, loop=True, writers=1, crowded=crowded)
    with pytest.raises(StoreWriteError, match="ring_000002"):
        for step in range(3):
            writer.loop_fact(step, "loss", "", {"value": step})
            for number in range(10 * step, 10 * step + 10):
                array = np.full(1000, number, np.int32)
                where = writer.put("x", array, step=step, ring=True)
                writer.append(record(number, array, where, step=step))
            writer.end_step(step)
        writer.close()
    writer.close("failed", "the disk is full")
    monkeypatch.undo()
    run = open_run(tmp_path / "a")
    found = list(run)
    kept = [each for each in found if each.location]
    assert [each.seq for each in found] == list(range(len(found))) and len(found) >= 20
    assert {each.seq for each in kept} >= set(range(20)) and len(kept) < 30
    assert all(set(run.load(each).tolist()) == {each.seq} for each in kept)
    assert len(run.loop(0)) == 3 and run.failure and not run.finished


def test_a_full_disk_takes_as_many_rows_as_it_has_room_for(tmp_path, monkeypatch):
    """The batch of a step does not fit: its first rows do."""
    real, room = os.write, [16_000]

    def write(fd, data):
        if len(data) > room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= len(data)
        return real(fd, data)

    writer = RunWriter(tmp_path / "a", info={}, writers=1)
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StoreWriteError, match=r"index\.arrows"):
        for number in range(250):
            array = np.random.default_rng(number).normal(size=1000)
            writer.append(record(number, array, writer.put("x", array, step=0)))
        writer.end_step(0)
        writer.flush()
    writer.close()
    monkeypatch.undo()
    run = open_run(tmp_path / "a")
    assert [each.seq for each in run] == list(range(len(run))) and 0 < len(run) < 250
    assert all((run.load(each) == np.random.default_rng(each.seq).normal(size=1000)).all() for each in run)


def test_close_reports_a_pending_error(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    writer = RunWriter(tmp_path / "a", info={})
    disk.full = True
    fill(writer, 0, 3)
    with pytest.raises(StoreWriteError, match="No space left"):
        writer.close()
    disk.full = False
    writer.close()
    assert len(open_run(tmp_path / "a")) == 0


def test_a_with_block_shows_the_error_itself(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, errno.EIO)
    with pytest.raises(StoreWriteError, match="the disk reports a fault"), RunWriter(tmp_path / "a", info={}) as writer:
        disk.full = True
        fill(writer, 0, 3)
        writer.flush()
    disk.full = False
    with pytest.raises(KeyError), RunWriter(tmp_path / "b", info={}) as writer:
        fill(writer, 0, 3)
        raise KeyError("the caller's own")


def test_a_put_that_waits_wakes_up(tmp_path, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()

    def slow(fd, data, offset):
        entered.set()
        go_on.wait()
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "pwrite", slow)
    writer = RunWriter(tmp_path / "a", info={}, max_buffer=1000)
    caught = []

    def put():
        try:
            writer.put("x", np.zeros(100_000), step=0)
        except StoreWriteError as error:
            caught.append(error)

    waiting = [threading.Thread(target=put) for _ in range(3)]
    for thread in waiting:
        thread.start()
    entered.wait()
    go_on.set()
    for thread in waiting:
        thread.join()
    assert len(caught) == 3 and "check that you may write there" in str(caught[0])
    writer.close()


def test_a_folder_that_is_removed(tmp_path):
    writer = RunWriter(tmp_path / "a", info={})
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(StoreWriteError, match="folder was removed"):
        fill(writer, 0, 3)
        writer.flush()
    with pytest.raises(StoreWriteError, match=r"coverage\.json"):
        writer.coverage([], [])
    writer.close()


def test_a_record_that_cannot_be_written_is_an_error_too(tmp_path):
    writer = RunWriter(tmp_path / "a", info={})
    writer.append(record(0))
    writer.flush()
    writer.append(record(1, seq="one"))
    with pytest.raises(StoreWriteError, match=r"index\.arrows"):
        writer.flush()
    writer.close()
    assert len(open_run(tmp_path / "a")) == 1


@pytest.mark.parametrize("writers", [1, 4])
def test_back_pressure_bounds_memory(tmp_path, writers):
    with RunWriter(tmp_path / "a", info={}, max_buffer=4096, writers=writers) as writer:

        def work(first):
            for number in range(first, first + 50):
                array = np.full(number * 13 % 3000, number, np.int32)
                writer.append(record(number, array, writer.put("x", array, step=number % 2)))
                if number % 10 == 0:
                    writer.flush()

        workers = [threading.Thread(target=work, args=(first,)) for first in range(0, 200, 50)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert writer.stats()["peak_buffer_bytes"] <= 4096
    stats = writer.stats()
    assert stats["records"] == 200 and stats["queued"] == 0 and stats["stalled_seconds"] >= 0
    run = open_run(tmp_path / "a")
    for found in run:
        assert run.load(found).tolist() == [found.seq] * (found.seq * 13 % 3000)
    for path in (tmp_path / "a/rank_0").glob("*.safetensors"):
        with safetensors.safe_open(path, "np") as file:
            assert len(file.keys()) > 0


def test_many_rows_wait_for_their_bytes(tmp_path, monkeypatch):
    """No row goes out while its tensor is still on its way."""
    real, entered, go_on = os.pwrite, threading.Event(), threading.Event()

    def slow(*args):
        entered.set()
        go_on.wait()
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    with RunWriter(tmp_path / "a", info={}) as writer:
        fill(writer, 0, 300, 10)
        writer.end_step(0)
        entered.wait()
        early = len(open_run(tmp_path / "a"))
        go_on.set()
        assert early == 0
        writer.flush()
        assert len(open_run(tmp_path / "a")) == 300


class Together:
    """Rows that come together, as those of a device do."""

    may_wait = True
    gathers = False

    def __init__(self, records):
        self.records = records

    def arrive(self):
        pass

    def __len__(self):
        return len(self.records)

    def columns(self):
        batch = encode(self.records, [True] * len(self))
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        return columns | {"sketch": [record.summary.sketch for record in self.records]}


def test_rows_that_come_together_wait_for_the_end_of_their_step(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "AGE", 1e6)
    monkeypatch.setattr(index, "MOST_AHEAD", 100)
    with RunWriter(tmp_path / "a", info={}, writers=2) as writer:
        for step in range(3):
            for first in range(0, 60, 20):
                arrays = [np.full(50, first + number, np.int32) for number in range(20)]
                places = [writer.put("x", array, step=step) for array in arrays]
                seqs = range(60 * step + first, 60 * step + first + 20)
                writer.append_rows(
                    Together([record(s, a, p, step=step) for s, a, p in zip(seqs, arrays, places, strict=True)])
                )
            assert any(shard._slab is not None for shard in writer._shards), "nobody has asked for the bytes"
            writer.end_step(step)
            writer.flush()
            assert len(open_run(tmp_path / "a")) == 60 * (step + 1)
        for first in range(1000, 1300, 20):  # more than may wait: the step goes on all the same
            writer.append_rows(Together([record(number, step=3) for number in range(first, first + 20)]))
    run = open_run(tmp_path / "a")
    assert len(run) == 180 + 300
    assert all(set(run.load(found).tolist()) == {found.seq % 60} for found in run if found.location)


class Asked(Together):
    """Tells when it is asked."""

    def __init__(self, records, asked, may_wait=True):
        super().__init__(records)
        self.asked, self.may_wait = asked, may_wait

    def arrive(self):
        self.asked.put(("arrive", self.records[0].key.step))

    def columns(self):
        self.asked.put(("columns", self.records[0].key.step))
        return super().columns()


def test_rows_of_a_device_arrive_at_once_and_are_written_when_the_next_step_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "AGE", 1e6)
    asked = queue.Queue()
    with RunWriter(tmp_path / "a", info={}) as writer:
        for step in range(3):
            writer.append_rows(Asked([record(10 * step + number, step=step) for number in range(10)], asked))
            writer.end_step(step)
            if step:
                assert asked.get(timeout=20) == ("columns", step - 1)
            assert asked.get(timeout=20) == ("arrive", step)
            assert writer._index.written == 10 * step and asked.empty()
        writer.flush()
        assert asked.get(timeout=20) == ("columns", 2) and writer._index.written == 30
    assert [found.seq for found in open_run(tmp_path / "a")] == list(range(30))


def test_rows_of_a_device_do_not_stay_for_long_nor_if_they_may_not(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "AGE", 1e6)
    asked = queue.Queue()
    with RunWriter(tmp_path / "a", info={}) as writer:
        writer.append_rows(Asked([record(number) for number in range(10)], asked, may_wait=False))
        writer.end_step(0)
        assert asked.get(timeout=20) == ("columns", 0)
        monkeypatch.setattr(index, "AGE", 0.05)
        writer.append_rows(Asked([record(10 + number, step=1) for number in range(10)], asked))
        writer.end_step(1)
        assert {asked.get(timeout=20) for _ in range(2)} == {("arrive", 1), ("columns", 1)}
    assert [found.seq for found in open_run(tmp_path / "a")] == list(range(20))


def test_an_interrupted_put_leaves_no_hole(tmp_path):
    class Interrupted:
        def __iter__(self):
            yield np.zeros(5000, np.uint8)
            raise KeyboardInterrupt

    for last in (False, True):
        path = tmp_path / str(last)
        with RunWriter(path, info={}, max_buffer=4096, writers=1) as writer:
            fill(writer, 0, 2, 30)
            with pytest.raises(KeyboardInterrupt):
                writer._shards[0].put(0, "broken", "uint8", (9000,), 9000, Interrupted())
            if not last:
                where = writer.put("after", np.full(7, 2), step=0)
                writer.append(record(2, np.full(7, 2), where))
        run = open_run(path)
        assert all(set(run.load(found).tolist()) == {found.seq} for found in run)
        with safetensors.safe_open(path / "rank_0/step_000000.0.safetensors", "np") as file:
            assert sorted(file.keys()) == sorted(["x", "x #2", *([] if last else ["after"])])


def test_a_closed_writer_raises(tmp_path):
    writer = RunWriter(tmp_path / "a", info={})
    assert threads() == []  # they start when there is something to do
    writer.close()
    writer.close()
    for call in (
        lambda: writer.put("x", np.zeros(1), step=0),
        lambda: writer.append(record(0)),
        writer.flush,
        lambda: writer.end_step(0),
    ):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_a_writer_left_open_lets_the_interpreter_go(tmp_path):
    code = (
        "import sys, numpy as np; from tensortap.store import RunWriter; "
        "w = RunWriter(sys.argv[1], info={}); w.put('x', np.zeros(9), step=0); w.flush()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True, timeout=60)


def test_the_store_is_imported_without_pyarrow():
    code = "import sys, tensortap.store; assert not {'pyarrow', 'torch', 'safetensors'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("reason", ["the disk is full", "x" * 100_000, "é" * 3000])
def test_a_full_disk_still_takes_the_status(tmp_path, monkeypatch, reason):
    """No new file can be written, so rank.json is written in place; it does not go on saying that the rank runs."""
    writer = RunWriter(tmp_path / "a", info={})
    fill(writer, 0, 3)
    writer.flush()
    size = (tmp_path / "a/rank_0/rank.json").stat().st_size

    def full(path, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        writer.close("failed", reason)
    run = open_run(tmp_path / "a")
    assert (tmp_path / "a/rank_0/rank.json").stat().st_size == size
    assert run.failure[:5] == reason[:5] and not run.finished and run.notices[0].startswith("rank 0: it failed: ")
    assert not list((tmp_path / "a/rank_0").glob(".*"))
