"""Steps that a ring drops leave the index and the files beside it, whatever happens in between."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from storing import record

from tensortap.errors import RunUnreadable
from tensortap.store import RunWriter, open_run
from tensortap.store.following import FollowedRun
from tensortap.store.rotation import DroppedSteps, RemainingSteps, holding
from tensortap.store.writer import index_file

ROWS = 3


@pytest.fixture(autouse=True)
def little_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "_LEAST_GARBAGE", 1)


class Ringed:
    """Writes steps of a few rows, and drops each step two steps later, but for some."""

    def __init__(self, path: Path, kept: tuple[int, ...] = ()) -> None:
        self.writer = RunWriter(path, info={}, calls=True, loop=True, ring=True, rotates=True)
        self.path, self.kept, self.step = path, kept, 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            step = self.step
            self.writer.called(step, 0, "layers.0", 0, {"scale": step})
            self.writer.loop_fact(step, "loss", "", {"value": float(step)})
            for number in range(ROWS):
                self.writer.append(record(step * ROWS + number, step=step, module=f"layers.{number}"))
            self.writer.end_step(step)
            if step >= 2 and step - 2 not in self.kept:
                self.writer.drop(step - 2)
            self.writer.flush()
            self.step += 1

    @property
    def nbytes(self) -> int:
        """Bytes of all files but one that is about to take another's place: the index rotates beside the caller."""
        files = [file for file in (self.path / "rank_0").iterdir() if file.suffix != ".partial"]
        return sum(file.stat().st_size for file in files)


def check(path: Path, steps: list[int]) -> Any:
    run = open_run(path)
    assert run.steps == steps and len(run) == ROWS * len(steps)
    for step in steps:
        assert run.loop(0).value("loss", step) == {"value": float(step)}
        assert run.source.calls(0).of(step, 0, "layers.0", 0) == {"scale": step}
        assert [float(r.summary.sketch[0]) for r in run.records(step=step)] == [step * ROWS + n for n in range(ROWS)]
    return run


def test_dropped_steps_are_gone_and_the_reader_is_told(tmp_path: Path) -> None:
    ring = Ringed(tmp_path / "run", kept=(5,))
    ring.run(40)
    ring.writer.close()
    run = check(tmp_path / "run", [5, 38, 39])
    assert run.finished
    assert "rank 0: 37 recorded steps have left the ring, the last is step 37: the run has no records of them" in (
        run.notices
    )
    assert ring.writer.stats()["records"] == len(run)


def test_the_files_do_not_grow(tmp_path: Path) -> None:
    ring = Ringed(tmp_path / "run")
    sizes = []
    for _ in range(20):
        ring.run(25)
        ring.writer.flush()  # the index rotates beside the caller
        sizes.append(ring.nbytes)
    ring.writer.close()
    assert max(sizes[1:]) < 1.3 * sizes[0]


def test_a_copy_at_any_moment_is_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill leaves what a copy of the folder shows: before and after each file takes another's place."""
    copies: list[Path] = []
    replace = os.replace

    def copied_replace(*names: Any) -> None:
        for moment in (lambda: None, lambda: replace(*names)):
            moment()
            if Path(names[1]).suffix in (".arrows", ".jsonl"):
                copies.append(tmp_path / f"copy {len(copies)}")
                shutil.copytree(tmp_path / "run", copies[-1])

    monkeypatch.setattr(index_file, "_LEAST_GARBAGE", 6000)  # a few rotations are enough
    monkeypatch.setattr(os, "replace", copied_replace)
    ring = Ringed(tmp_path / "run", kept=(5,))
    ring.run(20)
    ring.writer.close()
    assert len(copies) > 10
    for path in copies:
        run = open_run(path)
        newest = run.steps[-1]
        assert {step for step in (5, newest - 1, newest) if step <= newest} <= {*run.steps}
        check(path, run.steps)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ringed(tmp_path / "run")
    ring.run(5)

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr("tensortap.store.rotation._write", no_room)
        ring.run(5)
    assert not list((tmp_path / "run").rglob("*.partial"))
    grown = open_run(tmp_path / "run").steps
    assert grown[-1] == 9 and len(grown) > 4
    ring.run(20)
    ring.writer.close()
    check(tmp_path / "run", [28, 29])


def test_what_is_not_written_yet_is_dropped_when_it_is(tmp_path: Path) -> None:
    """The training may be many steps ahead of the index."""
    writer = RunWriter(tmp_path / "run", info={}, ring=True, rotates=True)
    for step in range(300):
        writer.append(record(step, step=step))
        if step:
            writer.drop(step - 1)
    writer.close()
    assert open_run(tmp_path / "run").steps == [299]


def test_a_watcher_counts_each_record_once(tmp_path: Path) -> None:
    ring = Ringed(tmp_path / "run", kept=(3,))
    ring.run(1)
    followed = FollowedRun(tmp_path / "run")
    for _ in range(12):
        followed.look()
        ring.run(1)
    followed.look()
    rank = followed.ranks[0]
    assert rank.records == 13 * ROWS
    assert [step.step for step in rank.steps] == list(range(5, 13)) and rank.steps[-1].loss == 12.0
    ring.writer.close()
    followed.look()
    assert rank.ended and rank.records == 13 * ROWS


def test_a_reader_never_mixes_two_files(tmp_path: Path) -> None:
    """An open file stays the one that was opened. If it was closed meanwhile, positions in it mean nothing."""
    ring = Ringed(tmp_path / "run")
    ring.run(4)
    early, late = open_run(tmp_path / "run"), open_run(tmp_path / "run")
    step = early.steps[0]
    assert late.steps[-1] == 3  # both have read their index
    late.source._files.close()
    ring.run(20)
    ring.writer.close()
    found = [float(r.summary.sketch[0]) for r in early.records(step=step)]
    assert found == [step * ROWS + n for n in range(ROWS)]
    with pytest.raises(RunUnreadable, match="replaced meanwhile: open the run again"):
        [r.summary.sketch for r in late.records(step=3)]


def test_a_file_that_was_replaced_by_a_shorter_one_is_named_so(tmp_path: Path) -> None:
    ring = Ringed(tmp_path / "run")
    ring.run(20)
    late = open_run(tmp_path / "run")
    assert late.steps[-1] == 19
    late.source._files.close()
    ring.run(20)
    ring.writer.close()
    index = tmp_path / "run/rank_0/index.arrows"
    os.truncate(index, index.stat().st_size // 2)
    with pytest.raises(RunUnreadable, match="replaced meanwhile: open the run again"):
        [r.summary.sketch for r in late.records(step=19)]


def test_a_replaced_run_has_no_leftovers(tmp_path: Path) -> None:
    ring = Ringed(tmp_path / "run")
    ring.run(3)
    ring.writer.close()
    for name in ("index.arrows.partial", "loop.jsonl.partial"):  # of a kill in the middle of a rotation
        (tmp_path / "run" / "rank_0" / name).write_bytes(b"torn")
    check(tmp_path / "run", [1, 2])
    RunWriter(tmp_path / "run", info={}, overwrite=True).close()
    assert not list((tmp_path / "run").rglob("*.partial"))


def test_a_line_stays_while_it_holds_in_a_remaining_step() -> None:
    remaining = RemainingSteps([5, 20], last_dropped=30)
    assert holding([0, 3, 4, 6, 19, 21, 25, 31, 40], remaining, several=False) == [
        *(False, False, True, False, True, False, False, True, True)
    ]
    assert holding([4, 5, 5, 6], remaining, several=True) == [True, True, True, True]
    assert holding([4, 5, 6, 7], remaining, several=False) == [False, True, False, True]
    assert holding([], remaining, several=True) == []


@pytest.mark.parametrize("metadata", [None, {}, {b"dropped_steps": b"x", b"dropped_last": b"1"}])
def test_damaged_counts_of_dropped_steps_are_ignored(metadata: Any) -> None:
    assert DroppedSteps.of(metadata) is None
    assert DroppedSteps.of({b"dropped_steps": b"9", b"dropped_last": b"3"}) is None
    assert DroppedSteps.of({b"dropped_steps": b"4", b"dropped_last": b"3"}) == (4, 3)
