"""Bytes arrive whole whichever way they take to the disk, and the faster way is found."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack

import numpy as np
import pytest
from safetensors.numpy import load_file

from tensortap.store import RunWriter
from tensortap.store.writer import run_writer as writer_module
from tensortap.store.writer.route import BLOCK, Route


def arrays(seed=0):
    dice = np.random.default_rng(seed)
    return [dice.standard_normal(int(n)).astype(np.float32) for n in dice.integers(1, 9000, 60)]


def write(folder, flush_every, **options):
    """Arrays with a flush in between, so that slabs go out unfilled and the next must begin on a block again."""
    with RunWriter(folder, info={}, max_buffer=64 << 10, **options) as writer:
        for number, array in enumerate(arrays()):
            writer.put(str(number), array, step=0)
            if number % flush_every == 0:
                writer.flush()
        writer.end_step(0)
    found = {}
    for path in sorted((folder / "rank_0").glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("flush_every", [1, 7, 1000])
@pytest.mark.parametrize("way", ["direct", "through", "caller", "refused", "half refused"])
def test_every_byte_arrives(tmp_path, monkeypatch, way, flush_every):
    if way != "direct":
        monkeypatch.setattr(writer_module, "supports_direct_io", lambda folder: way in ("refused", "half refused"))
    if "refused" in way:
        true, calls = os.pwrite, []

        def pwrite(fd, data, offset):
            import fcntl

            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                calls.append(1)
                if way == "refused" or len(calls) > 3:
                    raise OSError(errno.EINVAL, "not aligned enough")
            return true(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
    found = write(tmp_path / "run", flush_every, crowded=way == "caller")
    for number, array in enumerate(arrays()):
        assert np.array_equal(found[str(number)], array)


def test_the_faster_way_is_taken_and_the_other_tried_again():
    route = Route(possible=True, favour=1)
    taken = []
    for _ in range(3000):
        past = route.use_direct()
        taken.append(past)
        route.learn(past, 1 << 20, 1.0 if past else 0.1)
    assert taken.count(True) < 10 and True in taken[300:]
    for _ in range(6000):
        past = route.use_direct()
        route.learn(past, 1 << 20, 0.01 if past else 0.1)
    assert route.use_direct()


def test_favour_and_refusal():
    route = Route(possible=True, favour=8)
    route.learn(True, 1 << 20, 0.5)
    route.learn(False, 1 << 20, 0.1)
    assert route.use_direct()
    route.disable_direct()
    assert not route.use_direct()
    assert not Route(possible=False, favour=8).use_direct()


def test_of_many_writes_at_a_time_one_tries():
    route = Route(possible=True, favour=2)
    assert [route.use_direct() for _ in range(12)].count(True) == 1
    for _ in range(11):
        route.learn(False, 1 << 20, 0.01, abreast=11)
    assert not any(route.use_direct() for _ in range(12)), "the first has not come back yet"
    route.learn(True, 1 << 20, 0.01)
    tries = 0
    for _ in range(1000):
        ways = [route.use_direct() for _ in range(12)]
        tries += ways.count(True)
        assert ways.count(True) <= 1
        for past in ways:
            route.learn(past, 1 << 20, 0.01, abreast=ways.count(past))
    assert 1 <= tries <= 12_000 // 256


def test_the_joint_rate_of_all_writers_counts():
    """A disk that gives one writer as much as a cache does, and twelve no more than one."""
    route = Route(possible=True, favour=2)
    route.learn(True, 1 << 20, 0.01)
    route.learn(False, 1 << 20, 0.01, abreast=12)
    assert not route.use_direct()
    with pytest.raises(OSError, match="full"), route.timed(True, 1 << 30):
        raise OSError("full")
    assert not route.use_direct(), "what failed teaches nothing"


def test_a_write_that_tries_the_cache_counts_for_all_that_would_go_there():
    """Twelve writers go past a cache that was slow for a while: one of them is enough to see that it no longer is."""
    route = Route(possible=True, favour=2)
    route.learn(True, 1 << 30, 1.0, abreast=12)
    route.learn(False, 1 << 30, 60.0, abreast=12)
    assert route.use_direct()
    with ExitStack() as others:
        for _ in range(11):
            others.enter_context(route.timed(True, 0))
        with route.timed(False, 1 << 30):
            pass
    assert not route.use_direct()


def test_small_writes_teach_nothing():
    route = Route(possible=True, favour=1)
    route.learn(True, BLOCK, 1.0)
    assert route.use_direct()
