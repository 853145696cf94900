"""Rows of tensors on a device, in Python and in C, and the results that their tickets lead to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support import fake_gpu
from support.fake_gpu import FakeReader, Forever
from tensortap.capture import native_classes
from tensortap.capture.placement.slot_placer import placed_token
from tensortap.capture.recording.deferred.entries import DeviceEntries, new_device_entries
from tensortap.frameworks.torch.cuda.results import Batch, TicketColumns
from tensortap.kernels.cuda.results import RESULT, columns
from tensortap.kernels.summary.reference import BUCKETS


@pytest.fixture(params=["C", "Python"])
def reader(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeReader:
    fake_gpu.choose_language(monkeypatch, request.param)
    reader = fake_gpu.install(monkeypatch)()
    if (native := native_classes.load_for_device(reader, 4096)) is not None:
        reader.use(native)
    return reader


def record(
    reader: FakeReader, entries: DeviceEntries, tensor: torch.Tensor, number: int | None = None, other: Any = None
) -> int:
    """Add a row for a tensor as capture does, and return the row of its earlier sighting."""
    description, kind, flat = reader.describe(tensor)
    token: Any = other or placed_token(description, number)
    before = entries.find(token)
    ticket = reader.submit(tensor, None if before < 0 else entries[before], flat)
    entries.append("slot", kind, ticket, 3, len(entries), before, -1 if number is None else number)  # type: ignore[arg-type]
    if before < 0:
        entries.remember(tensor, token)
    return before


def test_a_tensor_is_known_by_its_memory_version_and_placement(reader: FakeReader) -> None:
    entries = new_device_entries(reader)
    base = torch.randn(4, 8)
    assert [record(reader, entries, each) for each in (base, base.detach(), base[:2])] == [-1, 0, -1]
    strided = (1, 2, torch.float32, 0, False, 8, 4, 1, 8)  # one that does not lie flat has a token of another form
    assert [record(reader, entries, base, other=strided) for _ in range(2)] == [-1, 3]
    assert [record(reader, entries, base, 7), record(reader, entries, base, 7)] == [-1, 5]
    base.add_(1)
    assert record(reader, entries, base) == -1
    entries.forget(reader.describe(base)[0])
    entries.forget(strided)
    entries.forget("never seen")
    assert record(reader, entries, base) == -1 and record(reader, entries, base) == 8
    assert entries.find(strided) == -1
    numbers = np.frombuffer(entries.numbers(), np.int64).reshape(-1, 4)
    assert numbers[:, 0].tolist() == [3] * 10 and numbers[:, 1].tolist() == list(range(10))
    assert numbers[:, 2].tolist() == [-1, 0, -1, -1, 3, -1, 5, -1, -1, 8]
    assert numbers[:, 3].tolist() == [-1] * 5 + [7, 7] + [-1] * 3
    assert len(entries.slots) == len(entries.kinds) == len(entries) == 10


def test_released_entries_know_no_tensor_and_hold_no_memory(reader: FakeReader) -> None:
    entries = new_device_entries(reader)
    tensor = torch.randn(4, 8)
    record(reader, entries, tensor)
    address = tensor.untyped_storage()._cdata
    entries.release()
    assert entries.find(reader.describe(tensor)[0]) == -1
    entries.forget(reader.describe(tensor)[0])
    entries.release()
    del tensor
    others = [torch.randn(4, 8) for _ in range(1000)]
    assert address in {other.untyped_storage()._cdata for other in others}, "its address is free for others"


def test_results_of_several_steps_are_those_of_each_alone(reader: FakeReader) -> None:
    """A tensor that waits, is seen again, changed unseen, changed while it waits, and read again on its own."""
    steps = []
    for number in range(3):
        entries = new_device_entries(reader)
        steady, lost = torch.full((4, 8), number + 1.0), torch.full((2, 8), number + 1.0)
        assert record(reader, entries, steady) == -1 and record(reader, entries, steady) == 0
        steady.data.mul_(-2)
        assert record(reader, entries, steady) == 0, "no version counts that"
        kind = reader.deferrable(lost, None)
        assert kind is not None
        ticket = reader.submit_deferred(lost, kind, Forever(), None)
        entries.append("slot", kind, ticket, number, 3, -1, -1)  # type: ignore[arg-type]
        entries.remember(lost, reader.describe(lost)[0])
        assert record(reader, entries, lost) == 3
        if number == 1:
            lost.add_(1)
        reader.end_step()
        entries.release()
        steps.append(entries)
    joined = reader.collect(*steps)  # type: ignore[arg-type]
    alone = [reader.collect(entries) for entries in steps]  # type: ignore[arg-type]
    for name, column in joined.columns.items():
        np.testing.assert_array_equal(column, np.concatenate([each.columns[name] for each in alone]))
    assert list(joined.unchanged) == [False, True, False, False, True] * 3
    assert list(joined.missed) == [8, 9]


def test_c_computes_the_columns_of_any_results_as_python_does(
    monkeypatch: pytest.MonkeyPatch, reader: FakeReader
) -> None:
    """Nothing finite, nothing but values at the edge of the range, constants, sums that overflow, NaN."""
    if reader._native is None:
        pytest.skip("rows of Python take one way alone")
    random = np.random.default_rng(0)
    made: dict[Any, Any] = {}

    def rows(batch: Batch) -> Any:
        if batch not in made:
            found = np.zeros(batch.size, RESULT)
            found["sketch"] = random.normal(size=(batch.size, BUCKETS))
            for name in ("about", "sum", "squares", "l1", "low", "high"):
                found[name] = random.choice([0.0, 1.0, -2.5, 1e308, np.inf, np.nan, 1e-30], batch.size)
            for name in ("nan", "posinf", "neginf", "zeros", "edge"):
                found[name] = random.choice([0, 0, 0, 16, 32], batch.size)
            found["digest"] = random.integers(0, 3, batch.size)
            found["unchanged"] = random.integers(0, 2, batch.size)
            made[batch] = found
        return made[batch]

    monkeypatch.setattr(Batch, "rows", rows)
    steps = []
    for _ in range(5):
        entries = new_device_entries(reader)
        kept = [torch.randn(4, 8) for _ in range(60)]
        for tensor in kept + kept[:20] + kept[10:30]:
            record(reader, entries, tensor)
        for tensor in kept[5:25]:
            kind = reader.deferrable(tensor, None)
            before = entries.find(placed_token(reader.describe(tensor)[0], None))
            assert kind is not None
            ticket = reader.submit_deferred(tensor, kind, Forever(), entries[before])
            entries.append("slot", kind, ticket, 3, len(entries), before, -1)  # type: ignore[arg-type]
        reader.end_step()
        steps.append(entries)
    quick = reader._collect_natively(steps)
    found = TicketColumns.joined([TicketColumns.of(each) for each in steps])  # type: ignore[arg-type]
    expected, unchanged, missed = found.find_results()
    assert quick is not None and not missed.any() and quick.unchanged.tolist() == unchanged.tolist()
    assert 20 < unchanged.sum() < len(unchanged) - 60 * len(steps), "some of those that were read again differ"
    for name, column in columns(expected, found.elements).items():
        np.testing.assert_array_equal(quick.columns[name], column, err_msg=name)
