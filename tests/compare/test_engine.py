"""Engines: all give the same numbers, yield them early, stop on request, and report a missing file."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tensortap.compare.measure import engine, engines
from tensortap.compare.measure.engine import Engine, Serial, Span, Task
from tensortap.compare.measure.engines import process_pool
from tensortap.compare.measure.engines.pool import PoolEngine
from tensortap.core import dtypes
from tensortap.errors import RunUnreadable, UsageError
from tensortap.kernels import summarize
from tensortap.kernels.pairs import cpu as pairs

Array = npt.NDArray[Any]


def write(path: Path, arrays: list[Array], gap: int = 3) -> list[Span]:
    """Arrays one after the other in one file, out of step with any alignment."""
    spans = []
    with path.open("wb") as file:
        for array in arrays:
            file.write(b"\0" * gap)
            spans.append(Span(str(path), dtypes.name_of(array.dtype), array.shape, file.tell(), array.nbytes))
            file.write(array.tobytes())
    return spans


def arrays() -> tuple[list[Array], list[Array]]:
    """Large, small, empty, 0-d, of several dtypes; the first needs several batches of a megabyte."""
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(2, 700_000), (40, 30), (0, 3), (), (5,), (300_000,)]
    reference: list[Array] = [rng.normal(0, 1, shape).astype(np.float32) for shape in shapes]
    candidate: list[Array] = [(each * 1.001).astype(np.float32) for each in reference]
    candidate[1] = candidate[1].astype(dtypes.numpy_dtype("bfloat16"))
    candidate[5][77] = np.nan
    reference.append((reference[5] + 1j).astype(np.complex64))
    candidate.append((candidate[5] + 1j).astype(np.complex64))
    return reference, candidate


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    monkeypatch.setattr(engine.batches, "__defaults__", (1 << 20,))
    reference, candidate = arrays()
    spans = zip(write(tmp_path / "reference", reference), write(tmp_path / "candidate", candidate, 8), strict=True)
    sizes = [summarize(each).l2 for each in reference]
    return [Task(r, c, size=size) for (r, c), size in zip(spans, sizes, strict=True)]


@pytest.mark.parametrize("chosen", [Serial(), Serial(threads=1), process_pool(2)], ids=["serial", "alone", "pool"])
def test_every_engine_gives_the_same_numbers(chosen: Engine, tasks: list[Task]) -> None:
    done: list[int] = []
    found = dict(chosen.run(iter(tasks), done.append))
    expected = {n: pairs.difference(r, c) for n, (r, c) in enumerate(zip(*arrays(), strict=True))}
    assert {n: repr(measure) for n, measure in found.items()} == {n: repr(each) for n, each in expected.items()}
    assert done == sorted(done)
    assert done[-1] == sum(task.nbytes for task in tasks)
    assert len(done) > 3


def test_tolerances_and_ranges_travel(tasks: list[Task]) -> None:
    span, other = tasks[0].reference, tasks[0].candidate
    part = Task(span, other, start=10, stop=20, rtol=0.0, atol=0.0)
    ((_, measure),) = Serial().run([part])
    assert measure.difference.elements == 10
    assert measure.difference.mismatched == 1
    assert measure.difference.max_abs_index is not None
    assert 10 <= measure.difference.max_abs_index[1] < 20


def test_batches_are_worth_their_while(tasks: list[Task]) -> None:
    found = list(engine.batches(enumerate(tasks), 1 << 20))
    assert all(sum(piece.nbytes for _, piece in batch) <= 4 << 20 for batch in found)  # a chunk is never cut
    small = [Task(tasks[1].reference, tasks[1].candidate)] * 1000
    assert len(list(engine.batches(enumerate(small), 1 << 20))) < 20
    for n, task in enumerate(tasks):
        pieces = [piece for batch in found for number, piece in batch if number == n]
        assert sum(piece.elements for piece in pieces) == task.elements
        assert all(piece.start % pairs.CHUNK == 0 for piece in pieces)


@pytest.mark.parametrize("chosen", [Serial(), process_pool(1)], ids=["serial", "pool"])
def test_an_early_stop_leaves_the_rest(chosen: Engine, tasks: list[Task]) -> None:
    asked = 0

    def endless() -> Any:
        nonlocal asked
        while True:
            asked += 1
            yield tasks[5]

    results = chosen.run(endless())
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert asked < 20
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("chosen", [Serial(), process_pool(1)], ids=["serial", "pool"])
def test_a_missing_or_short_file_is_named(chosen: Engine, tasks: list[Task]) -> None:
    path = Path(tasks[0].candidate.name)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(RunUnreadable, match=r"candidate is cut off: bytes \d+ to \d+ are not there"):
        list(chosen.run(tasks))
    path.unlink()
    with pytest.raises(RunUnreadable, match="candidate is missing"):
        list(chosen.run(tasks))


def test_an_unfinished_file_is_found(tasks: list[Task]) -> None:
    path = Path(tasks[0].reference.name)
    expected = repr(dict(Serial().run(tasks)))
    path.rename(path.with_name(path.name + ".partial"))
    assert repr(dict(Serial().run(tasks))) == expected


def test_an_invalid_task_is_refused(tasks: list[Task]) -> None:
    r, c = tasks[0].reference, tasks[1].candidate
    with pytest.raises(UsageError, match="cannot be compared"):
        list(Serial().run([Task(r, c)]))
    with pytest.raises(UsageError, match="is not 5 bytes at 0"):
        list(Serial().run([Task(r, Span(c.name, "float32", r.shape, 0, 5))]))
    with pytest.raises(UsageError, match="elements 9 to 5"):
        list(Serial().run([Task(r, r, 9, 5)]))
    with pytest.raises(UsageError, match="workers must be 1 or more"):
        process_pool(0)


def test_the_choice(tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    large = Span("f", "float32", (1 << 30,), 0, 4 << 30)
    monkeypatch.setattr(engines, "cores", lambda: 2)
    assert isinstance(engines.choose([Task(large, large)]), Serial)
    monkeypatch.setattr(engines, "cores", lambda: 16)
    assert isinstance(engines.choose([Task(large, large)]), PoolEngine)
    assert isinstance(engines.choose(tasks), Serial)
    assert isinstance(engines.choose([]), Serial)


def test_workers_do_not_run_the_main_script_again(tmp_path: Path) -> None:
    """A training script without `if __name__ == "__main__"` would train once more in each of them."""
    span = write(tmp_path / "tensors", [np.ones(5, np.float32)])[0]
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from tensortap.compare.measure.engine import Span, Task\n"
        "from tensortap.compare.measure.engines import process_pool\n"
        "print('started')\n"
        f"span = {span!r}\n"
        "(_, measure), = process_pool(1).run([Task(span, span)])\n"
        "print(measure.difference.equal, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["started", "True", "False"]
    assert done.stderr == ""
