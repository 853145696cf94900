"""Runs that are cut off, damaged, newer, or no runs at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from storing import record, write

from tensortap.core.records import Location
from tensortap.errors import MissingDependency, RunExists, RunNotFound, RunUnreadable, UsageError
from tensortap.store import RunWriter, open_run
from tensortap.store.format import FORMAT, OLDEST


@pytest.fixture(scope="module")
def three_batches(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "a"
    with RunWriter(path, info={}) as writer:
        for number in range(3):
            writer.append(record(number, summary=record(number).summary))
            writer.flush()
    return path


def test_an_index_cut_off_anywhere_keeps_earlier_batches(three_batches, tmp_path):
    shutil.copytree(three_batches, tmp_path / "a")
    index = tmp_path / "a/rank_0/index.arrows"
    data = index.read_bytes()
    counts = []
    # Every length near the end of a batch and of the file, and every 7th between.
    ends = [len(data), *(match.end() for match in re.finditer(b"\xff\xff\xff\xff", data)), 0]
    near = {end + off for end in ends for off in range(-24, 25)}
    for size in sorted({*near, *range(0, len(data), 7)} & set(range(len(data) + 1)), reverse=True):
        os.truncate(index, size)
        run = open_run(tmp_path / "a")
        counts.append(len(run))
        assert [found.seq for found in run.records()] == list(range(counts[-1]))
        if size < len(data):
            assert run.notices, size
    assert counts == sorted(counts, reverse=True) and set(counts) == {0, 1, 2, 3}


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\xff" * 100, b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"x", "random"])
def test_garbage_behind_the_index_is_dropped_and_reported(three_batches, tmp_path, tail):
    for seed in range(50 if tail == "random" else 1):
        folder = tmp_path / str(seed)
        shutil.copytree(three_batches, folder)
        index = folder / "rank_0/index.arrows"
        data = index.read_bytes()[:-8]  # as if it were still growing
        more = np.random.default_rng(seed).bytes(64 + seed) if tail == "random" else tail
        index.write_bytes(data + more)
        run = open_run(folder)
        assert len(run) == 3
        assert run.notices == [
            f"rank 0: the last {len(more)} bytes of the index are cut off or damaged; 3 records before them are intact"
        ]


def test_flipped_bits_in_the_index_never_crash(three_batches, tmp_path):
    shutil.copytree(three_batches, tmp_path / "a")
    index = tmp_path / "a/rank_0/index.arrows"
    data = index.read_bytes()
    dice = np.random.default_rng(0)
    for _ in range(300):
        torn = bytearray(data)
        torn[dice.integers(len(data))] ^= 1 << int(dice.integers(8))
        index.unlink()  # a new file: the old one may still be mapped
        index.write_bytes(torn)
        with suppress(RunUnreadable):
            assert len(list(open_run(tmp_path / "a"))) <= 3


def test_an_index_that_is_empty_or_missing(tmp_path):
    write(tmp_path / "a")
    index = tmp_path / "a/rank_0/index.arrows"
    index.write_bytes(b"")
    run = open_run(tmp_path / "a")
    assert len(run) == 0 and list(run) == [] and run.steps == []
    assert run.to_arrow().num_rows == 0 and list(run.stream()) == [] and run.sketches(0)[0].size == 0
    assert "ends early" in run.notices[0]
    index.unlink()
    assert "no index" in open_run(tmp_path / "a").notices[0]


def test_a_missing_or_damaged_rank_json(tmp_path):
    write(tmp_path / "a")
    for damage in ("{", "[]", None):
        (tmp_path / "a/rank_0/rank.json").unlink()
        if damage:
            (tmp_path / "a/rank_0/rank.json").write_text(damage)
        run = open_run(tmp_path / "a")
        assert not run.finished and len(run) == 3 and "rank.json" in run.notices[0]


def test_a_failed_rank_has_a_reason(tmp_path):
    with pytest.raises(ZeroDivisionError), RunWriter(tmp_path / "a", info={}) as writer:
        writer.append(record(0))
        1 / 0  # noqa: B018
    run = open_run(tmp_path / "a")
    assert not run.finished and len(run) == 1
    assert run.notices == ["rank 0: it failed: ZeroDivisionError: division by zero"]


def test_a_newer_format_asks_for_an_upgrade(tmp_path):
    write(tmp_path / "a")
    info = json.loads((tmp_path / "a/run.json").read_text())
    (tmp_path / "a/run.json").write_text(json.dumps({**info, "version": FORMAT + 1}))
    with pytest.raises(RunUnreadable, match="pip install --upgrade tensortap"):
        open_run(tmp_path / "a")


def with_world(path, world):
    """The run with another number of ranks in run.json."""
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, "world": world}))
    return path


@pytest.mark.parametrize("world", [10**12, 10**30])
def test_ranks_that_left_nothing_are_counted_and_not_walked(tmp_path, world):
    write(tmp_path / "a", rank=0, world=12)
    write(tmp_path / "a", rank=3, world=12)
    run = open_run(with_world(tmp_path / "a", world))
    assert run.ranks == [0, 3] and len(run) == 6
    assert run.notices == [f"{world - 2} of {world} ranks left nothing: 1, 2, 4, 5, 6, 7, 8, 9, … ({world - 2} in all)"]


@pytest.mark.parametrize("world", [-1, 0, True, False, 2.0, "2", None, [2], "x" * 10_000])
def test_a_world_that_is_not_a_number_of_ranks(tmp_path, world):
    write(tmp_path / "a")
    with pytest.raises(RunUnreadable, match=r"run\.json is damaged: world is the number of ranks") as found:
        open_run(with_world(tmp_path / "a", world))
    assert len(str(found.value)) < len(str(tmp_path)) + 300


def test_a_world_smaller_than_the_number_of_ranks(tmp_path):
    write(tmp_path / "a", rank=5, world=6)
    run = open_run(with_world(tmp_path / "a", 2))
    assert run.ranks == [5] and run.notices == ["2 of 2 ranks left nothing: 0, 1"]


def with_version(path, version):
    """Write another format version into one file of a run; None removes the version."""
    if path.suffix == ".json":
        about = json.loads(path.read_text()) | {"version": version}
        path.write_text(json.dumps({name: value for name, value in about.items() if value is not None}))
        return
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        table, about = stream.read_all(), dict(stream.schema.metadata)
    about.pop(b"version")
    schema = table.schema.with_metadata(about if version is None else about | {b"version": str(version).encode()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_table(table)


@pytest.mark.parametrize("file", ["run.json", "rank_0/rank.json", "rank_0/index.arrows", "rank_1/index.arrows"])
@pytest.mark.parametrize(
    ("version", "advice"), [(FORMAT + 1, "pip install --upgrade tensortap"), (OLDEST - 1, "record the run again")]
)
def test_every_file_with_a_format_is_checked(tmp_path, file, version, advice):
    """Ranks may have been written by different versions."""
    write(tmp_path / "a", rank=0, world=2)
    write(tmp_path / "a", rank=1, world=2)
    with_version(tmp_path / "a" / file, version)
    with pytest.raises(RunUnreadable, match=rf"{file} is of format {version}.*{advice}"):
        list(open_run(tmp_path / "a"))


def test_an_index_of_a_newer_format_is_not_called_damaged(tmp_path):
    write(tmp_path / "a")
    schema = pa.schema({"other": pa.int64()}, {"format": "tensortap-index", "version": str(FORMAT + 1)})
    with pa.OSFile(str(tmp_path / "a/rank_0/index.arrows"), "wb") as file, pa.ipc.new_stream(file, schema):
        pass
    with pytest.raises(RunUnreadable, match="pip install --upgrade tensortap"):
        len(open_run(tmp_path / "a"))


@pytest.mark.parametrize("file", ["rank_0/rank.json", "rank_0/index.arrows"])
@pytest.mark.parametrize("version", [None, "two"])
def test_files_of_a_rank_without_a_format_are_read(tmp_path, file, version):
    write(tmp_path / "a")
    with_version(tmp_path / "a" / file, version)
    run = open_run(tmp_path / "a")
    assert run.finished and len(list(run)) == 3


def test_a_run_with_summaries_of_another_definition_is_not_read(tmp_path):
    write(tmp_path / "a")
    info = json.loads((tmp_path / "a/run.json").read_text())
    (tmp_path / "a/run.json").write_text(json.dumps({**info, "version": OLDEST - 1}))
    with pytest.raises(RunUnreadable, match="record the run again"):
        open_run(tmp_path / "a")
    with pytest.raises(RunExists, match="of another format"):
        RunWriter(tmp_path / "a", rank=0, world=1, info={})


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"format": "tensortap-run"}', '{"format": 3}', "\x80"])
def test_a_damaged_run_json(tmp_path, text):
    write(tmp_path / "a")
    (tmp_path / "a/run.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunUnreadable, match=r"run\.json"):
        open_run(tmp_path / "a")


def test_paths_that_are_not_runs(tmp_path):
    with pytest.raises(RunNotFound, match="nowhere"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(RunUnreadable, match="empty"):
        open_run(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RunUnreadable, match=r"notes\.txt"):
        open_run(tmp_path)
    with pytest.raises(RunUnreadable, match="is a file"):
        open_run(tmp_path / "notes.txt")
    write(tmp_path / "a")
    with pytest.raises(RunUnreadable, match="runs in it: a"):
        open_run(tmp_path)
    (tmp_path / "a/run.json").unlink()
    with pytest.raises(RunUnreadable, match="looks like an incomplete copy of a run"):
        open_run(tmp_path / "a")


def test_another_arrow_file_is_not_taken_for_an_index(tmp_path):
    write(tmp_path / "a")
    table = pa.table({"x": [1]})
    with pa.OSFile(str(tmp_path / "a/rank_0/index.arrows"), "wb") as file, pa.ipc.new_stream(file, table.schema) as s:
        s.write_table(table)
    with pytest.raises(RunUnreadable, match="columns"):
        len(open_run(tmp_path / "a"))


def test_no_permission(tmp_path, monkeypatch):
    write(tmp_path / "a")

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    run = open_run(tmp_path / "a")
    found = next(iter(run))
    run.close()
    with monkeypatch.context() as patch:
        patch.setattr("tensortap.store.source.os.open", refuse)
        with pytest.raises(RunUnreadable, match=r"run\.json cannot be read: Permission denied"):
            open_run(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr("tensortap.store.source.os.open", refuse)
        with pytest.raises(RunUnreadable, match="safetensors cannot be read: Permission denied"):
            run.load(found)


def test_tensors_that_cannot_be_loaded(tmp_path):
    write(tmp_path / "a")
    run = open_run(tmp_path / "a")
    found = list(run)
    shard = tmp_path / "a/rank_0/step_000000.0.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    assert run.load(found[0]).tolist() == [[0, 0], [0, 0]]
    for load in (open_run(tmp_path / "a").load, run.torch):
        with pytest.raises(RunUnreadable, match=r"step_000000\.0\.safetensors is cut off"):
            load(found[2])
    shard.unlink()
    with pytest.raises(RunUnreadable, match=r"step_000000\.0\.safetensors is missing"):
        open_run(tmp_path / "a").load(found[0])
    with pytest.raises(UsageError, match=r'only the summary was kept.*keep="tensors"'):
        run.load(record(0))


@pytest.mark.parametrize("file", ["../run.json", "/etc/passwd", "rank.json", "step_000000.0.safetensors/../x"])
def test_an_index_cannot_name_files_elsewhere(tmp_path, file):
    with RunWriter(tmp_path / "a", info={}) as writer:
        writer.append(record(0, None, Location(file, 0, 16)))
    run = open_run(tmp_path / "a")
    for load in (run.load, run.torch, run.bytes_of):
        with pytest.raises(RunUnreadable, match="damaged"):
            load(next(iter(run)))


def test_pandas_and_torch_are_asked_for_by_name(tmp_path, monkeypatch):
    write(tmp_path / "a")
    run = open_run(tmp_path / "a")

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr("tensortap.store.run.import_module", absent)
    with pytest.raises(MissingDependency, match="pip install pandas"):
        run.to_pandas()
    with pytest.raises(MissingDependency, match="pip install torch"):
        run.torch(next(iter(run)))


def test_a_notice_of_all_ranks_appears_once(tmp_path):
    for rank in range(3):
        with RunWriter(tmp_path / "a", info={}, rank=rank, world=3) as writer:
            writer.append(record(0, rank=rank))
            writer.coverage([], ["all of them", *(["two of them"] if rank else [])])
    assert open_run(tmp_path / "a").notices == ["all ranks: all of them", "ranks 1, 2: two of them"]


@pytest.mark.parametrize(
    "text", ['{"modules": 1000000000000}', '{"modules": [{}]}', '{"modules": ["a"]}', '{"notices": 5}', "[]", "{"]
)
def test_a_damaged_coverage_file_costs_the_coverage_alone(tmp_path, text):
    write(tmp_path / "a")
    (tmp_path / "a" / "rank_0" / "coverage.json").write_text(text)
    run = open_run(tmp_path / "a")
    assert len(list(run)) == 3 and run.coverage == {0: []}
    (notice,) = run.notices
    assert "coverage.json is damaged" in notice


@pytest.mark.parametrize("count", [-1, 2**31, 2**63 - 1])
@pytest.mark.parametrize("name", ["micro", "call"])
def test_a_count_that_no_run_has_is_damage(tmp_path, name, count):
    write(tmp_path / "a")
    file = tmp_path / "a" / "rank_0" / "index.arrows"
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    values = [count, *table.column(name).to_pylist()[1:]]
    place = table.schema.get_field_index(name)
    table = table.set_column(place, table.schema.field(place), pa.array(values, pa.int64()))
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(RunUnreadable, match=f"damaged: {name} is a count"):
        list(open_run(tmp_path / "a"))
