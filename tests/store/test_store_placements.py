"""Placements, mesh and renames of a rank: written before the rows that name them, read back as they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from storing import record

from tensortap.core.placement import Mesh, Placement
from tensortap.errors import RunUnreadable
from tensortap.kernels import summarize
from tensortap.store import RunWriter, open_run
from tensortap.store.format import SCHEMA
from tensortap.store.index import Index
from tensortap.store.memory import MemoryWriter

HALF = Placement.of_block((4, 2), (2, 0), (2, 2), {"tp": "shard", "dp": "replica"})
ZIGZAG = Placement((8, 2), (((0, 0, 1), (0, 0, 2)), ((1, 7, 1), (0, 0, 2))), {"cp": "shard"}, "layout")
MESH = Mesh(("dp", "tp"), (2, 2), (1, 0))


def written(path: Path) -> Path:
    with RunWriter(path, info={}) as writer:
        writer.arrange(MESH, {"layers.0": "layers.2"})
        for number, placement in enumerate((HALF, None, ZIGZAG, HALF)):
            array = np.full((2, 2), number, np.float32)
            where = writer.put(f"{number}", array, step=0)
            summary = summarize(array, placement=placement)
            writer.append(record(number, array, where, placement=placement, summary=summary))
    return path


def test_records_have_their_placement(tmp_path: Path) -> None:
    run = open_run(written(tmp_path / "run"))
    assert [each.placement for each in run] == [HALF, None, ZIGZAG, HALF]
    assert list(run.placements(0)) == [HALF, ZIGZAG]
    assert run.columns(0).column("placement").to_pylist() == [0, None, 1, 0]
    assert run.mesh(0) == MESH
    assert run.renames(0) == {"layers.0": "layers.2"}
    assert run.verify().ok  # digests belong to the positions in the whole


def test_a_run_in_memory_has_them_too() -> None:
    with MemoryWriter(info={}) as writer:
        writer.arrange(MESH, {})
        writer.append(record(0, placement=HALF))
    run = writer.run()
    assert [each.placement for each in run] == [HALF]
    assert run.mesh(0) == MESH


def test_an_index_without_the_column_has_no_placements(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", info={}) as writer:
        writer.append(record(0))
    assert not (tmp_path / "run/rank_0/placements.jsonl").exists()
    path = tmp_path / "run/rank_0/index.arrows"
    rows = pa.ipc.open_stream(path.read_bytes()).read_all().drop_columns(["placement"])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as stream:
        stream.write_table(rows)
    run = open_run(tmp_path / "run")
    assert [each.placement for each in run] == [None]
    assert run.index(0).schema.names == SCHEMA.names
    assert run.mesh(0) is None
    assert not run.notices


@pytest.mark.parametrize(
    "text", ["", '{"shape": [4]}\n', json.dumps({**HALF.as_dict(), "boxes": [[[0, 3, 2], [0, 0, 2]]]}) + "\n"]
)
def test_a_damaged_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "run")
    (path / "rank_0/placements.jsonl").write_text(text)
    with pytest.raises(RunUnreadable, match="jsonl is damaged"):
        list(open_run(path))


def test_records_of_a_reader_keep_their_placement() -> None:
    index = Index.of_records([record(0, placement=ZIGZAG), record(1)], 0)
    assert [each.placement for each in index.records(np.arange(2))] == [ZIGZAG, None]


@pytest.mark.parametrize("placement", [HALF, ZIGZAG, Placement((3, 4), (((0, 5, 2),),)), Placement((), ((),))])
def test_placements_survive_json(placement: Placement) -> None:
    assert Placement.parse(json.loads(json.dumps(placement.as_dict()))) == placement
