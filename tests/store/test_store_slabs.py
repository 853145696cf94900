"""Slabs that all shards share: one can hold many, none can starve another, and memory is locked and unlocked once."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from storing import record

from tensortap.errors import StoreWriteError
from tensortap.store import RunWriter, open_run
from tensortap.store.writer.pool import SlabPool
from tensortap.store.writer.run_writer import _default_buffer
from tensortap.store.writer.state import WriterState

HUGE = 2 << 20


class MemoryPinning:
    """Records pinning, and checks that no other thread waits meanwhile."""

    def __init__(self):
        self.locked = {}
        self.ever = []
        self.state = None
        self.refusing = False

    def pin(self, memory):
        if self.refusing:
            raise MemoryError("no more memory can be locked")
        if self.state is not None:
            free = threading.Event()
            threading.Thread(target=self.pass_through, args=(free,), daemon=True).start()
            assert free.wait(60), "the lock is held"
        address = memory.ctypes.data
        assert all(address + memory.nbytes <= at or at + size <= address for at, size in self.locked.items())
        self.locked[address] = memory.nbytes
        self.ever.append((address, memory.nbytes))

    def pass_through(self, free):
        with self.state.changed:
            free.set()

    def unpin(self, memory):
        assert self.locked.pop(memory.ctypes.data) == memory.nbytes


class Late:
    """Bytes of a device that come at the last moment: a slab that is used again before would spoil them."""

    def __init__(self, array):
        self._bytes = array.view(np.uint8)
        self.size = self._bytes.size

    def copy(self, target, start):
        target[:] = 255

        def wait():
            target[:] = self._bytes[start : start + target.size]

        return wait


class Gate:
    """Wraps os.pwrite: writes to blocked files wait until all are unblocked."""

    def __init__(self, monkeypatch):
        self.shut = set()
        self.full = False
        self._open = threading.Event()
        self._real = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, fd, data, offset):
        name = Path(f"/proc/self/fd/{fd}").readlink().name.removesuffix(".partial")
        if name in self.shut:
            self._open.wait()
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._real(fd, data, offset)

    def open(self):
        self._open.set()


def send(writer, number, size, step=0):
    array = np.full(size, number % 251, np.uint8)
    where = writer.put_incoming(f"tensor {number}", "uint8", array.shape, [Late(array)], step=step)
    writer.append(record(number, array, where, step=step))
    return where


def check(path, sizes):
    run = open_run(path)
    assert {found.seq for found in run} == set(sizes)
    for found in run:
        array = run.load(found)
        assert array.size == sizes[found.seq]
        assert (array == found.seq % 251).all()


def until_all_are_taken(writer):
    while writer._pool._common:  # nothing reports it
        time.sleep(0.001)


@pytest.fixture
def never_waits(monkeypatch):
    """A state where waiting is an error: what a single thread can do, it can do without anybody's help."""
    state = WriterState()

    def wait(timeout=None):
        raise TimeoutError

    monkeypatch.setattr(state.changed, "wait", wait)
    return state


# --- limits of shares -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [1, 64 * 8, 5000, 100_000])
@pytest.mark.parametrize("pinned", [False, True])
def test_the_greediest_shard_leaves_two_to_each(never_waits, shards, nbytes, pinned):
    pool = SlabPool(nbytes, shards, never_waits, MemoryPinning() if pinned else None)
    greedy, *others = (pool.share() for _ in range(shards))
    total = max(2 * shards, nbytes // pool.slab_bytes)
    held = [greedy.take() for _ in range(total - 2 * len(others))]
    for share in (greedy, *others):
        if share is not greedy:
            held += [share.take(), share.take()]
        with pytest.raises(TimeoutError):
            share.take()
    assert len({slab.ctypes.data for slab in held}) == total
    assert pool.peak == total * pool.slab_bytes <= max(nbytes, 2 * shards * 64)
    with never_waits.changed:
        greedy.give(held.pop(0))
    assert greedy.take().size == pool.slab_bytes


def test_slabs_that_a_greedy_shard_returns_are_common(never_waits):
    pool = SlabPool(100 << 20, 2, never_waits)
    one, other = pool.share(), pool.share()
    held = [one.take() for _ in range(20)]
    with never_waits.changed:
        for slab in held:
            one.give(slab)
    before = pool.peak
    again = [other.take() for _ in range(len(held))]
    assert {slab.ctypes.data for slab in again} == {slab.ctypes.data for slab in held}
    assert pool.peak == before


def test_memory_that_cannot_be_had_is_not_missed_later(never_waits):
    pinning = MemoryPinning()
    pool = SlabPool(64 * 4, 1, never_waits, pinning)
    share = pool.share()
    pinning.refusing = True
    for _ in range(10):
        with pytest.raises(MemoryError):
            share.take()
    assert pool.peak == 0 and share.held == 0
    pinning.refusing = False
    assert len([share.take() for _ in range(4)]) == 4


# --- locked memory ----------------------------------------------------------------------------------------------------
def test_locked_memory_grows_with_the_need(tmp_path):
    pinning = MemoryPinning()
    with RunWriter(tmp_path / "a", info={}, max_buffer=64 << 20, writers=2, pinning=pinning) as writer:
        assert not pinning.ever
        pinning.state = writer._state
        send(writer, 0, 100)
        slab = writer._pool.slab_bytes
        assert [nbytes for _, nbytes in pinning.ever] == [2 * slab]
        sizes = {0: 100} | dict.fromkeys(range(1, 20), 3 * slab + 17)
        for number in range(1, 20):
            send(writer, number, sizes[number])
        assert sum(nbytes for _, nbytes in pinning.ever) == writer.stats()["peak_buffer_bytes"] <= 64 << 20
        assert len(pinning.ever) <= 5
        assert all(address % HUGE == 0 for address, _ in pinning.ever)
        assert len(pinning.locked) == len(pinning.ever)
    assert not pinning.locked
    check(tmp_path / "a", sizes)


def test_locked_memory_has_huge_pages_and_no_copy_in_a_forked_process(tmp_path):
    with RunWriter(tmp_path / "a", info={}, max_buffer=64 << 20, writers=1, pinning=MemoryPinning()) as writer:
        send(writer, 0, 100)
        address = writer._pool._arenas[0]._memory.ctypes.data
        flags = flags_of(address)
    assert "wf" in flags  # empty for who is forked
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def flags_of(address):
    """Return the kernel's description of the mapping at an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if "-" in first and len(others) > 3:
            low, high = (int(word, 16) for word in first.split("-"))
            here = low <= address < high
        elif here and first == "VmFlags:":
            return others
    raise LookupError(address)


def test_a_failed_writer_unlocks_its_memory(tmp_path, monkeypatch):
    gate, pinning = Gate(monkeypatch), MemoryPinning()
    writer = RunWriter(tmp_path / "a", info={}, max_buffer=1 << 20, writers=3, pinning=pinning)
    gate.full = True
    with pytest.raises(StoreWriteError, match="No space left"):
        for number in range(1000):
            send(writer, number, 100_000)
    writer.close()
    assert pinning.ever and not pinning.locked


# --- several shards ---------------------------------------------------------------------------------------------------
def test_a_great_tensor_waits_for_its_writer_while_the_others_go_on(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.shut = {"step_000000.0.safetensors"}
    with RunWriter(tmp_path / "a", info={}, max_buffer=1 << 20, writers=8, pinning=MemoryPinning()) as writer:
        sizes = {0: 500 << 10}  # half of the memory that eight writers have
        assert send(writer, 0, sizes[0]).file == "step_000000.0.safetensors"
        for number in range(1, 60):
            sizes[number] = 50_000
            assert send(writer, number, 50_000).file != "step_000000.0.safetensors"
        gate.open()
    check(tmp_path / "a", sizes)


def test_a_writer_that_hangs_with_all_its_slabs_blocks_no_other(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.shut = {"step_000000.0.safetensors"}
    with RunWriter(tmp_path / "a", info={}, max_buffer=4 * 64 * 3, writers=3, pinning=MemoryPinning()) as writer:
        sizes = {0: 100_000} | dict.fromkeys(range(1, 50), 1000)
        greedy = threading.Thread(target=send, args=(writer, 0, sizes[0]))
        greedy.start()
        until_all_are_taken(writer)
        for number in range(1, 50):
            assert send(writer, number, sizes[number]).file != "step_000000.0.safetensors"
        assert greedy.is_alive()
        gate.open()
        greedy.join()
        assert writer.stats()["peak_buffer_bytes"] <= 4 * 64 * 3
    check(tmp_path / "a", sizes)


@pytest.mark.parametrize("max_buffer", [1, 5 * 8 * 64, 40_000])
@pytest.mark.parametrize("writers", [1, 5])
def test_many_threads_and_next_to_no_memory(tmp_path, max_buffer, writers):
    """Two slabs a writer are enough for any number of threads and any tensor."""
    pinning = MemoryPinning()
    dice = np.random.default_rng(writers)
    sizes = dict(enumerate(dice.integers(0, 3000, 120).tolist())) | dict.fromkeys((7, 33, 99), 30000)
    with RunWriter(tmp_path / "a", info={}, max_buffer=max_buffer, writers=writers, pinning=pinning) as writer:

        def work(first):
            for number in range(first, len(sizes), 6):
                send(writer, number, sizes[number], step=number % 2)
                if number % 20 == first:
                    writer.flush()

        threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        peak = writer.stats()["peak_buffer_bytes"]
        assert peak <= max(max_buffer, 2 * writers * 64) and peak == sum(nbytes for _, nbytes in pinning.ever)
    check(tmp_path / "a", sizes)
    assert not pinning.locked


def test_a_full_disk_wakes_all_threads_that_wait_for_slabs(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.shut = {f"step_000000.{number}.safetensors" for number in range(2)}
    writer = RunWriter(tmp_path / "a", info={}, max_buffer=2048, writers=2, pinning=MemoryPinning())
    caught = []

    def work(number):
        try:
            send(writer, number, 100_000)
        except StoreWriteError as error:
            caught.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    until_all_are_taken(writer)
    gate.full = True
    gate.open()
    for thread in threads:
        thread.join()
    assert len(caught) == 5
    writer.close()


@pytest.mark.parametrize(
    ("machine", "container", "ranks", "expected"),
    [
        (128 << 30, "max", "", 4 << 30),
        (64 << 30, "max", "", 2 << 30),
        (2048 << 30, "max", "8", 4 << 30),
        (512 << 30, "max", "8", 2 << 30),
        (512 << 30, str(32 << 30), "", 1 << 30),
        (4 << 30, "max", "", 256 << 20),
    ],
)
def test_a_device_gets_a_small_share_of_the_memory(tmp_path, monkeypatch, machine, container, ranks, expected):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{container}\n")
    monkeypatch.setattr("tensortap.core.machine._MEMORY_LIMITS", (limit, tmp_path / "none"))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": machine // 4096}[name])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert _default_buffer(from_device=True) == expected
    assert _default_buffer(from_device=False) == 256 << 20
