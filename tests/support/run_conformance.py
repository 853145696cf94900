"""The Run contract as tests: every kind of run, and every reader, passes them.

A test module derives a class from `RunConformance` and gives it a fixture `example`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt
import pyarrow as pa
import pytest

import tensortap as tt
from tensortap.core.records import KINDS, PHASES, Coverage, Key, Record
from tensortap.errors import RunNotFound, RunUnreadable, TensortapError, UsageError
from tensortap.kernels import summarize
from tensortap.store.format import SCHEMA
from tensortap.store.run import Run
from tensortap.store.source import AddressedFiles

__all__ = ["Example", "RunConformance"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Example:
    """A run, and what is known about its content."""

    open: Callable[[], Run]
    """Opens the run. Two results share nothing that closing one could break."""
    values: Mapping[tuple[int, Key], Array]
    """The original values of each record, by rank and key."""
    ranks: list[int] = field(default_factory=lambda: [0])
    keeps_tensors: bool = True
    has_loop_facts: bool = False
    """Whether it has the facts `world` of 2 ranks and a `group` whose lr changes from 0.5 to inf in step 1."""


class RunConformance:
    """The contract of `tensortap.store.run.Run`, for every source."""

    def test_records_are_those_that_were_written(self, example: Example) -> None:
        run = example.open()
        assert run.ranks == example.ranks
        found = {(record.rank, record.key): record for record in run}
        assert found.keys() == example.values.keys()
        assert len(run) == len(found) == len(list(run)), "keys are unique within a rank"
        for where, record in found.items():
            array = example.values[where]
            assert record.shape == array.shape and record.summary.elements == array.size
            assert record.summary.digest == summarize(array).digest
            assert record.key.kind in KINDS and record.key.phase in PHASES

    def test_values_are_the_original_ones(self, example: Example) -> None:
        run = example.open()
        for record in run:
            array = example.values[record.rank, record.key]
            if not example.keeps_tensors:
                with pytest.raises(UsageError, match="only the summary was kept"):
                    run.load(record)
                continue
            loaded = run.load(record)
            assert loaded.dtype == array.dtype and loaded.shape == array.shape
            assert loaded.tobytes() == array.tobytes() == bytes(run.bytes_of(record))
            with pytest.raises(ValueError, match="read-only"):
                loaded[...] = 0

    def test_bytes_match_the_digests(self, example: Example) -> None:
        run = example.open()
        kept = list(run.records(kept=True))
        found = run.verify()
        assert found.ok and found.tensors <= len(kept) and (found.tensors > 0) == bool(kept)
        for record in kept:
            assert run.load(record, verify=True).tobytes() == run.load(record).tobytes()
            other = replace(record, summary=replace(record.summary, digest=record.summary.digest ^ 1))
            with pytest.raises(RunUnreadable, match="its bytes are damaged"):
                run.load(other, verify=True)

    def test_order(self, example: Example) -> None:
        run = example.open()
        for rank in run.ranks:
            numbers = [record.seq for record in run.records(rank=rank)]
            assert numbers == sorted(numbers)
        assert [record.rank for record in run] == sorted(record.rank for record in run)

    def test_filters(self, example: Example) -> None:
        run = example.open()
        records = list(run)
        key = records[-1].key
        for name in ("step", "micro", "phase", "module", "call", "kind", "path"):
            value = getattr(key, name)
            expected = [_identity(each) for each in records if getattr(each.key, name) == value]
            assert [_identity(each) for each in run.records(**{name: value})] == expected, name
            assert [_identity(each) for each in run.records(**{name: [value]})] == expected, name
        assert [_identity(each) for each in run.records(module="*")] == list(map(_identity, records))
        assert list(run.records(module="no such module")) == []
        assert [_identity(each) for each in run.records(kept=True)] == [
            _identity(each) for each in records if each.location is not None
        ]
        assert all(each.summary.nan + each.summary.posinf + each.summary.neginf for each in run.records(nonfinite=True))
        with pytest.raises(TypeError):
            list(run.records(colour="red"))

    def test_one_record_by_key_and_by_row(self, example: Example) -> None:
        run = example.open()
        for rank in run.ranks:
            for row, record in enumerate(run.records(rank=rank)):
                assert _identity(run.at(rank, row)) == _identity(record)
                found = run.get(record.key, rank)
                assert found is not None and _identity(found) == _identity(record)
        assert run.get(Key(10**6, 0, "forward", "no such module", 0, "output", "0")) is None
        assert run.get(next(iter(run)).key, rank=10**6) is None

    def test_stream(self, example: Example) -> None:
        run = example.open()
        streamed = list(run.stream())
        kept = [_identity(record) for record in run.records(kept=True)]
        assert sorted(map(str, kept)) == sorted(str(_identity(record)) for record, _ in streamed)
        for record, array in streamed:
            assert array.tobytes() == example.values[record.rank, record.key].tobytes()

    def test_tables(self, example: Example) -> None:
        run = example.open()
        for rank in run.ranks:
            table = run.index(rank)
            assert table.schema.equals(SCHEMA) and table.num_rows == len(list(run.records(rank=rank)))
            matrix, rows = run.sketches(rank)
            assert len(rows) == table.num_rows and rows.max(initial=-1) < max(len(matrix), 1)
        whole = run.to_arrow()
        assert isinstance(whole, pa.Table) and whole.num_rows == len(run) and whole.column_names[0] == "rank"
        assert run.to_arrow(rank=run.ranks[0]).num_rows == run.index(run.ranks[0]).num_rows

    def test_steps(self, example: Example) -> None:
        run = example.open()
        assert run.steps == sorted({record.key.step for record in run})

    def test_the_runs_own_facts(self, example: Example) -> None:
        run = example.open()
        assert all(isinstance(text, str) and text for text in run.notices)
        assert isinstance(run.finished, bool) and isinstance(run.failure, str)
        assert isinstance(run.info.get("framework"), str) and isinstance(run.info.get("config", {}), dict)
        assert run.info.get("world", 1) >= len(run.ranks)
        for rank, rows in run.coverage.items():
            assert rank in run.ranks and all(isinstance(row, Coverage) for row in rows)
        for record in run:
            assert run.arguments(record) is None or isinstance(run.arguments(record), dict)
        assert str(run.path) in repr(run)

    def test_loop_facts(self, example: Example) -> None:
        run = example.open()
        for rank in (None, *run.ranks):
            facts = run.loop(rank)
            assert bool(facts) == example.has_loop_facts
            assert facts.value("group", 10**6, "no such group") is None and facts.changes("no such fact") == []
            assert len(list(facts)) == len(facts) and facts.subjects("no such fact") == []
            if not facts:
                assert facts.names() == []
                continue
            assert facts.names() == ["world", "group"] and facts.subjects("group") == ["0.0"]
            assert facts.value("world", 10**6) == facts.value("world", 0) == {"size": 2}
            before, after = (facts.value("group", step, "0.0") or {} for step in (0, 1))
            assert before == {"lr": 0.5, "betas": (0.9, 0.99)} and after == before | {"lr": float("inf")}
            assert [change.step for change in facts.changes("group", "0.0")] == [0, 1]
            assert facts.value("group", -1, "0.0") is None, "nothing is known before the first"

    def test_a_rank_that_is_not_there(self, example: Example) -> None:
        run = example.open()
        for ask in (
            run.index,
            run.sketches,
            run.loop,
            lambda rank: list(run.records(rank=rank)),
            lambda rank: run.at(rank, 0),
        ):
            with pytest.raises(RunNotFound, match="has no rank 1000"):
                ask(1000)

    def test_closed_twice_and_used_again(self, example: Example) -> None:
        run = example.open()
        before = [(_identity(record), record.summary.digest) for record in run]
        loaded = [run.load(record) for record in run.records(kept=True)]
        with run as same:
            assert same is run
        run.close()
        for record, array in zip(run.records(kept=True), loaded, strict=True):
            assert array.tobytes() == run.load(record).tobytes(), "arrays stay valid, and more can be loaded"
        assert [(_identity(record), record.summary.digest) for record in run] == before

    def test_opened_again(self, example: Example) -> None:
        first, second = example.open(), example.open()
        assert [_identity(record) for record in first] == [_identity(record) for record in second]
        first.close()
        assert len(list(second)) == len(example.values)

    def test_compared_with_itself_it_is_clean(self, example: Example) -> None:
        result = tt.compare(example.open(), example.open())
        assert result.first is None
        assert result.verdict == "match" and result.counts["equal"] == len(example.values)

    def test_an_open_run_is_returned_as_it_is(self, example: Example) -> None:
        run = example.open()
        assert tt.open(run) is run

    def test_ranges_of_files_are_found_by_their_address(self, example: Example) -> None:
        run = example.open()
        records = list(run.records(kept=True))
        if not run.on_disk:
            pytest.skip("its tensors are not ranges of files")
        for record in records:
            assert record.location is not None
            name, offset, nbytes = record.location
            found = AddressedFiles().read(run.source.address(record.rank, name), offset, nbytes)
            assert bytes(found) == example.values[record.rank, record.key].tobytes()

    def test_a_location_that_contradicts_the_record(self, example: Example) -> None:
        run = example.open()
        for record in run.records(kept=True):
            assert record.location is not None
            wrong = replace(record, location=record.location._replace(nbytes=record.location.nbytes + 1))
            with pytest.raises(TensortapError):
                run.load(wrong)


def _identity(record: Record) -> tuple[int, Key]:
    return record.rank, record.key
