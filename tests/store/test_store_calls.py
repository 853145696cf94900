"""Plain arguments on disk: as durable as the records; a run without them opens as well."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest
from storing import record, same, write

from tensortap.errors import StoreWriteError
from tensortap.store import RunWriter, open_run
from tensortap.store.calls import CallEntry, CallsWriter, read_calls
from tensortap.store.source import LocalFiles
from tensortap.store.writer.state import WriterState

CALLS = "rank_0/calls.jsonl"


def write_calls(path, calls, **options):
    """Calls as (step, micro, call, arguments) of layers.0."""
    with RunWriter(path, info={}, calls=True, **options) as writer:
        for step, micro, call, arguments in calls:
            writer.called(step, micro, "layers.0", call, arguments)
        writer.append(record(0, rank=options.get("rank", 0)))
    return path


def of(run, step, micro=0, call=0, module="layers.0"):
    found = record(0, module=module)
    key = found.key._replace(step=step, micro=micro, call=call)
    return run.arguments(record(0, key=key))


def test_arguments_hold_until_the_next_that_differ(tmp_path):
    calls = [(0, 0, 1, {"a": 1}), (0, 2, 0, {"a": 2}), (3, 0, 0, {}), (3, 0, 5, {"a": {"tuple": [1]}})]
    run = open_run(write_calls(tmp_path / "a", calls))
    assert [of(run, 0, 0, 0), of(run, 0, 0, 1), of(run, 0, 1, 0), of(run, 0, 2, 0)] == [
        {},
        {"a": 1},
        {"a": 1},
        {"a": 2},
    ]
    assert [of(run, 1), of(run, 2, 9, 9), of(run, 3), of(run, 3, 0, 4)] == [{"a": 2}, {"a": 2}, {}, {}]
    assert of(run, 3, 0, 5) == of(run, 100) == {"a": (1,)}
    assert of(run, 3, module="layers.1") == {}, "it never got any"
    assert run.notices == []
    assert [called.step for called in run.calls(0)] == [0, 0, 3, 3]


def test_records_outside_calls_have_no_arguments(tmp_path):
    run = open_run(write_calls(tmp_path / "a", [(0, 0, 0, {"a": 1})]))
    for kind in ("param", "buffer", "param_grad"):
        assert run.arguments(record(0, kind=kind)) is None
    for kind in ("input", "output", "grad_input", "grad_output"):
        assert run.arguments(record(0, kind=kind)) == {"a": 1}


def test_a_run_without_plain_arguments_opens_as_usual(tmp_path):
    write(tmp_path / "a")
    assert not (tmp_path / "a" / CALLS).exists()
    run = open_run(tmp_path / "a")
    assert run.notices == []
    assert run.calls(0) is None
    assert [run.arguments(each) for each in run] == [None] * 3
    with RunWriter(tmp_path / "b", info={}, calls=True) as writer:
        for each in run:
            writer.append(each)
    again = open_run(tmp_path / "b")
    index = [(tmp_path / name / "rank_0/index.arrows").read_bytes() for name in "ab"]
    assert len(index[0]) == len(index[1]), "records know nothing of it"
    assert all(same(one, other) for one, other in zip(run, again, strict=True))
    assert [again.arguments(each) for each in again] == [{}] * 3


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    write_calls(tmp_path / "a", [(step, 0, 0, {"step": step}) for step in range(3)])
    file = tmp_path / "a" / CALLS
    data = file.read_bytes()
    ends = [at + 1 for at, letter in enumerate(data) if letter == ord("\n")]
    for size in range(len(data), -1, -1):
        os.truncate(file, size)
        run = open_run(tmp_path / "a")
        whole = sum(end <= size for end in ends)
        assert len(list(run.calls(0))) == whole
        assert of(run, 9) == ({"step": whole - 1} if whole else {})
        assert run.notices == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"3",
        b"{",
        b"\xff\xfe",
        b'{"step":0,"micro":0,"module":"a","call":0}',
        b'{"step":"0","micro":0,"module":"a","call":0,"arguments":{}}',
        b'{"step":true,"micro":0,"module":"a","call":0,"arguments":{}}',
        b'{"step":0,"micro":0,"module":3,"call":0,"arguments":{}}',
        b'{"step":0,"micro":0,"module":"a","call":0,"arguments":[]}',
        b"[" * 100_000,
        b"9" * 10_000,
    ],
)
def test_a_damaged_file_is_reported_and_ignored(tmp_path, line):
    write_calls(tmp_path / "a", [(0, 0, 0, {"a": 1}), (1, 0, 0, {"a": 2})])
    file = tmp_path / "a" / CALLS
    first, second = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([first, line, second, b""]))
    run = open_run(tmp_path / "a")
    assert (len(run), run.calls(0), of(run, 0)) == (1, None, None)
    assert run.notices == ["rank 0: calls.jsonl cannot be read: plain arguments are not known"]


def test_flipped_bits_never_crash(tmp_path):
    write_calls(tmp_path / "a", [(step, 0, 0, {"x": {"tuple": [step, {"dict": [["k", "v"]]}]}}) for step in range(2)])
    file = tmp_path / "a" / CALLS
    data = file.read_bytes()
    for at in range(len(data)):
        for bit in (0, 5):
            torn = bytearray(data)
            torn[at] ^= 1 << bit
            file.write_bytes(torn)
            repr(of(open_run(tmp_path / "a"), 1))


def test_hostile_names_are_those_of_the_index(tmp_path):
    names = ["a\nb", 'quote"\\', "lone \udc80", "层", "\u2028"]
    with RunWriter(tmp_path / "a", info={}, calls=True) as writer:
        for seq, name in enumerate(names):
            writer.called(0, 0, name, 0, {name: name})
            writer.append(record(seq, module=name))
    assert len((tmp_path / "a" / CALLS).read_bytes().splitlines()) == len(names)
    run = open_run(tmp_path / "a")
    for found, name in zip(run, names, strict=True):
        assert list((run.arguments(found) or {}).values()) == [name]
        assert list(run.arguments(found) or {}) == [found.key.module], "spelled out alike where UTF-8 has no letter"


def test_each_rank_has_its_own(tmp_path):
    for rank in range(2):
        write_calls(tmp_path / "a", [(0, 0, 0, {"rank": rank})], rank=rank, world=2)
    run = open_run(tmp_path / "a")
    assert [run.arguments(found) for found in run] == [{"rank": 0}, {"rank": 1}]


def test_a_new_run_in_its_place_begins_anew(tmp_path):
    write_calls(tmp_path / "a", [(0, 0, 0, {"a": 1})])
    write_calls(tmp_path / "a", [(0, 0, 0, {"b": 1})], overwrite=True)
    assert of(open_run(tmp_path / "a"), 0) == {"b": 1}
    write(tmp_path / "a", overwrite=True)
    assert of(open_run(tmp_path / "a"), 0) is None


def test_lines_are_on_disk_before_the_index_speaks_of_them(tmp_path):
    writer = RunWriter(tmp_path / "a", info={}, calls=True)
    for step in range(5):
        writer.called(step, 0, "layers.0", 0, {"step": step})
        writer.append(record(0, module="layers.0", step=step))
        writer.flush()
        run = open_run(tmp_path / "a")
        assert [run.arguments(found) for found in run] == [{"step": at} for at in range(step + 1)]
    writer.close()


def test_calls_without_records_do_not_pile_up(tmp_path):
    with RunWriter(tmp_path / "a", info={}, calls=True) as writer:
        for step in range(5000):
            writer.called(step, 0, "a", 0, {"step": step})
        assert len((tmp_path / "a" / CALLS).read_bytes().splitlines()) > 3000
    assert len(list(open_run(tmp_path / "a").calls(0))) == 5000


def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    real, writer = os.pwrite, RunWriter(tmp_path / "a", info={}, calls=True)
    writer.called(0, 0, "layers.0", 0, {"a": 1})
    writer.append(record(0))
    writer.flush()

    def full(fd, data, offset):
        if b"arguments" in bytes(data):
            real(fd, bytes(data)[:10], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    writer.called(1, 0, "layers.0", 0, {"a": 2})
    writer.append(record(1))
    with pytest.raises(StoreWriteError, match=r"calls\.jsonl: No space left.*free some space"):
        writer.flush()
    writer.close()
    run = open_run(tmp_path / "a")
    assert [run.arguments(found) for found in run] == [{"a": 1}]
    assert "No space left" in run.notices[0]


def test_many_threads_lose_no_line(tmp_path):
    writer = CallsWriter(tmp_path / "calls.jsonl", WriterState())
    writing = threading.Event()

    def add(module):
        for step in range(500):
            writer.add(CallEntry(step, 0, module, 0, {"step": step}))

    def write_on():
        while not writing.is_set():
            writer.write()

    threads = [threading.Thread(target=add, args=(name,)) for name in "abcd"]
    other = threading.Thread(target=write_on)
    for thread in (other, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    writing.set()
    other.join()
    writer.close()
    calls = read_calls(LocalFiles(tmp_path), "calls.jsonl")
    assert calls is not None
    assert [calls.of(step, 0, name, 0) for name in "abcd" for step in range(500)] == [
        {"step": s} for s in range(500)
    ] * 4
    assert all(json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines())


def test_an_interrupt_while_lines_are_written_loses_none(tmp_path, monkeypatch):
    writer = CallsWriter(tmp_path / "calls.jsonl", WriterState())
    writer.add(CallEntry(0, 0, "a", 0, {"step": 0}))
    assert writer.write()
    real, interrupts = os.pwrite, iter([True, True])

    def interrupted(fd, data, offset):
        written = real(fd, bytes(data)[:20], offset)
        if next(interrupts, False):
            raise KeyboardInterrupt
        return written

    monkeypatch.setattr(os, "pwrite", interrupted)
    for step in (1, 2):
        writer.add(CallEntry(step, 0, "a", 0, {"step": step}))
        with pytest.raises(KeyboardInterrupt):
            writer.write()
    writer.close()
    lines = (tmp_path / "calls.jsonl").read_text().splitlines()
    assert [json.loads(line)["arguments"] for line in lines] == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_no_file_stays_open_if_the_index_cannot_be_opened(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, *options):
        if str(path).endswith(".arrows"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *options)

    monkeypatch.setattr(os, "open", refuse)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreWriteError, match="Permission denied"):
        RunWriter(tmp_path / "a", info={}, calls=True)
    assert set(os.listdir("/proc/self/fd")) <= before
