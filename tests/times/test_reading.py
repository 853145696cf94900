"""Traces from disk: every form that profilers write, and one clear error for every other file."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from support.traces import Trace, own
from tensortap.errors import RunNotFound, RunUnreadable, UsageError
from tensortap.times import attribute, read_profile
from tensortap.times.traces import json_stream
from tensortap.times.traces.json_stream import trace_events


@pytest.fixture
def trace() -> Trace:
    made = Trace()
    made.module("forward (root) (Net)", 10, 110)
    made.module("forward fc (Linear)", 30, 60)
    return made


def test_plain_gzipped_and_bare_list_traces(trace: Trace, tmp_path: Path) -> None:
    plain = own(trace.ledger(tmp_path))
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps(trace.events))
    for path in (trace.write(tmp_path / "trace.json.gz"), listed):
        assert own(attribute(read_profile(path))) == own(attribute(read_profile(str(path)))) == plain


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_events_across_chunk_boundaries(
    size: int, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK", size)
    trace.span('ärger "mit" \\ [Klammern] {…} 𝄞', 200, 210)
    path = trace.write(tmp_path / "trace.json")
    assert list(trace_events(path)) == trace.events


def test_progress_ends_at_the_size_of_the_file(trace: Trace, tmp_path: Path) -> None:
    for name in ("trace.json", "trace.json.gz"):
        seen: list[tuple[int, int]] = []
        path = trace.write(tmp_path / name)
        read_profile(path, lambda done, size, seen=seen: seen.append((done, size)))
        assert seen[-1] == (path.stat().st_size,) * 2


def test_numbers_that_are_not_json(trace: Trace, tmp_path: Path) -> None:
    path = trace.write(tmp_path / "trace.json")
    text = path.read_text().replace('"ts": 10', '"bandwidth": -nan, "other": inf, "ts": 10', 1)
    path.write_text(text)
    assert own(attribute(read_profile(path))) == own(trace.ledger(tmp_path))


@pytest.mark.parametrize("left", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_that_ends_too_early(left: float, name: str, trace: Trace, tmp_path: Path) -> None:
    path = trace.write(tmp_path / name)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * left)])
    with pytest.raises(RunUnreadable, match="ends too early"):
        read_profile(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends too early"),
        (b"name,dur\nfc,3\n", "does not hold JSON"),
        (b"\x89PNG\r\n\x1a\n", "does not hold JSON"),
        (b'{"rows": [1, 2]}', 'no list "traceEvents"'),
        (b'{"traceEvents": 3}', 'no list "traceEvents"'),
        (b'{"traceEvents": []}', "no events"),
        (b'{"traceEvents": [{"ph": "X" "ts": 1}' + b" " * 200 + b"]}", "not valid JSON after 28 characters"),
        (b'{"traceEvents": [{"ph": "X", "tid": 1, "ts": "soon", "name": "a"}]}', "an event that cannot be read"),
        (b'{"traceEvents": [{"ph": "X", "tid": 1, "name": "a"}]}', "an event that cannot be read"),
        (b'[1, 2, "three"]', "no events"),
    ],
)
def test_files_that_are_not_traces(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(RunUnreadable, match=words) as error:
        read_profile(path)
    assert str(path) in str(error.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="there is no file"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(RunUnreadable, match="cannot be read"):
        read_profile(tmp_path)
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(RunUnreadable, match="it is a FIFO"):
        read_profile(tmp_path / "fifo.json")


def test_bytes_that_only_start_like_gzip(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"{}")[:5] + b"damaged")
    with pytest.raises(RunUnreadable, match=r"damaged|ends too early"):
        read_profile(path)


def test_a_trace_without_annotations_is_refused_with_a_remedy(tmp_path: Path) -> None:
    trace = Trace()
    trace.span("aten::mm", 0, 10)
    with pytest.raises(UsageError, match=r"no spans of tensortap.annotate.*with tensortap.annotate\(model\)"):
        read_profile(trace.write(tmp_path / "trace.json"))


def test_an_entry_that_never_ends_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK", 1 << 10)
    monkeypatch.setattr(json_stream, "_MAX_EVENT", 1 << 12)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"name": "' + "x" * (1 << 16) + '"}]}')
    with pytest.raises(RunUnreadable, match="does not end"):
        read_profile(path)


def test_other_objects_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot read times from a dict"):
        read_profile({})
