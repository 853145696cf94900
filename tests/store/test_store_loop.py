"""Loop facts on disk: as durable as the records; a run without them opens as well."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from storing import record, write

from tensortap.store import RunWriter, open_run

LOOP = "rank_0/loop.jsonl"


def write_facts(path: Path, facts: list[tuple[int, str, str, dict[str, Any]]], **options: Any) -> Path:
    with RunWriter(path, info={}, loop=True, **options) as writer:
        for fact in facts:
            writer.loop_fact(*fact)
        writer.append(record(0))
    return path


def rates(path: Path) -> list[tuple[int, Any]]:
    return [(change.step, change.value["lr"]) for change in open_run(path).loop().changes("group", "0.0")]


def test_a_run_without_them_opens_as_usual(tmp_path: Path) -> None:
    write(tmp_path / "a")
    assert not (tmp_path / "a" / LOOP).exists()
    run = open_run(tmp_path / "a")
    assert not run.loop() and run.notices == []


def test_a_new_run_in_its_place_begins_anew(tmp_path: Path) -> None:
    write_facts(tmp_path / "a", [(0, "group", "0.0", {"lr": 1})])
    write_facts(tmp_path / "a", [(0, "group", "0.0", {"lr": 2})], overwrite=True)
    assert rates(tmp_path / "a") == [(0, 2)]
    write(tmp_path / "a", overwrite=True)
    assert not open_run(tmp_path / "a").loop()


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    write_facts(tmp_path / "a", [(step, "group", "0.0", {"lr": step}) for step in range(3)])
    file = tmp_path / "a" / LOOP
    data = file.read_bytes()
    for size in range(len(data), -1, -1):
        os.truncate(file, size)
        whole = data[:size].count(b"\n")
        assert rates(tmp_path / "a") == [(step, step) for step in range(whole)]
        assert open_run(tmp_path / "a").notices == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b'{"step":1,"fact":"group","of":"0.0"}',
        b'{"step":true,"fact":"group","of":"0.0","value":{}}',
        b'{"step":-1,"fact":"group","of":"0.0","value":{}}',
        b'{"step":0,"fact":"group","of":"0.0","value":{"lr":3}}',
        b'{"step":1,"fact":3,"of":"0.0","value":{}}',
        b'{"step":1,"fact":"group","of":null,"value":{}}',
        b'{"step":1,"fact":"group","of":"0.0","value":[]}',
        b'{"step":1,"fact":"group","of":"0.0","value":' + b"[" * 100_000,
        b"9" * 10_000,
    ],
)
def test_a_damaged_file_is_reported_and_ignored(tmp_path: Path, line: bytes) -> None:
    write_facts(tmp_path / "a", [(1, "group", "0.0", {"lr": 1}), (2, "group", "0.0", {"lr": 2})])
    file = tmp_path / "a" / LOOP
    first, second = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([first, line, second, b""]))
    run = open_run(tmp_path / "a")
    assert (len(run), len(run.loop())) == (1, 0)
    assert run.notices == ["rank 0: loop.jsonl cannot be read: facts about the loop are not known"]


def test_lines_are_on_disk_before_later_rows(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a", info={}, loop=True)
    for step in range(3):
        writer.loop_fact(step, "group", "0.0", {"lr": step})
        writer.append(record(step, step=step))
        writer.flush()
        assert rates(tmp_path / "a") == [(at, at) for at in range(step + 1)]
    writer.close()


def test_hostile_names(tmp_path: Path) -> None:
    names = ["a\nb", 'quote"\\', "lone \udc80", "层", "\u2028"]
    write_facts(tmp_path / "a", [(0, "attributes", name, {name: name}) for name in names])
    facts = open_run(tmp_path / "a").loop()
    assert facts.subjects("attributes") == ["a\nb", 'quote"\\', "lone \\udc80", "层", "\u2028"]
    assert [list(facts.value("attributes", 0, of) or {}) for of in facts.subjects("attributes")] == [
        [of] for of in facts.subjects("attributes")
    ]
