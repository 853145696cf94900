"""Kernels and allocations belong to the module on the host that launched or made them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.traces import ENGINE, Trace, device_own
from tensortap.errors import UsageError
from tensortap.times.table import make_table


@pytest.fixture
def trace() -> Trace:
    """A forward with two layers on the main thread, their backward on the engine's, an optimizer; kernels run later."""
    made = Trace()
    made.module("forward (root) (Net)", 10, 110)
    made.module("forward fc1 (Linear)", 20, 50)
    made.module("forward fc2 (Linear)", 60, 90)
    made.node("AddmmBackward0", 200, 240, tid=ENGINE)
    made.backward(["(root) (Net)", "fc2 (Linear)"], 205, 230, tid=ENGINE)
    made.node("torch::autograd::AccumulateGrad", 241, 260, tid=ENGINE)
    made.span("Optimizer.step#AdamW.step", 300, 320)
    made.launch(1, 25)  # fc1
    made.launch(2, 65)  # fc2
    made.launch(3, 100)  # the root itself
    made.launch(4, 210, tid=ENGINE)  # backward of fc2
    made.launch(5, 235, tid=ENGINE)  # of fc2, too: the engine adds up gradients after the node
    made.launch(6, 245, tid=ENGINE)  # AccumulateGrad
    made.launch(7, 310)
    made.launch(8, 150)  # in no module
    for number, (start, length) in enumerate(
        [(500, 10), (520, 20), (540, 5), (550, 40), (600, 2), (610, 3), (620, 7), (630, 1)], start=1
    ):
        made.kernel(number, start, length)
    return made


def test_kernels_belong_to_the_module_that_launched_them(trace: Trace, tmp_path: Path) -> None:
    ledger = trace.ledger(tmp_path)
    assert device_own(ledger) == {
        ("fc1", "forward"): 10,
        ("fc2", "forward"): 20,
        ("(root)", "forward"): 5,
        ("fc2", "backward"): 42,
        ("(AccumulateGrad)", "backward"): 3,
        ("(optimizer)", "other"): 7,
        ("(no module)", "other"): 1,
    }
    rows = {(row.module, row.phase): row for row in make_table(ledger).rows}
    assert rows["(root)", "forward"].device_total == 35
    assert rows["(root)", "backward"].device_total == 42 and rows["(root)", "backward"].device_own == 0
    assert sum(row.device_own_share for row in rows.values()) == pytest.approx(1)
    assert next(iter(rows)) == ("fc2", "backward")  # sorted by device time
    assert (ledger.kernels, ledger.kernel_time, ledger.unlinked) == (8, 88_000, 0)


def test_overlapping_kernels_count_fully_as_time_and_once_as_busy(trace: Trace, tmp_path: Path) -> None:
    trace.launch(9, 30)
    trace.kernel(9, 505, 100, stream=20)  # over three others on another stream
    ledger = trace.ledger(tmp_path)
    assert device_own(ledger)["fc1", "forward"] == 110
    assert sum(device_own(ledger).values()) * 1000 == ledger.kernel_time == 188_000
    assert ledger.device_busy == (605 - 500 + 3 + 7 + 1) * 1000


def test_one_launch_of_a_graph_is_many_kernels(trace: Trace, tmp_path: Path) -> None:
    trace.launch(9, 70, name="cudaGraphLaunch")
    for start in (700, 710, 720):
        trace.kernel(9, start, 2)
    assert device_own(trace.ledger(tmp_path))["fc2", "forward"] == 26


def test_annotations_on_the_device_are_not_counted(trace: Trace, tmp_path: Path) -> None:
    before = trace.ledger(tmp_path)
    trace.span("forward fc1 (Linear)", 500, 590, tid=7, cat="gpu_user_annotation")
    trace.span("Activity Buffer Request", 0, 5000, tid=0, cat="overhead")
    trace.span("PyTorch Profiler (0)", 0, 9000, tid=0, cat="Trace")
    after = trace.ledger(tmp_path)
    assert device_own(after) == device_own(before)
    assert after.span == before.span and after.calls == before.calls


def test_without_its_launch_a_kernel_belongs_to_its_operator(trace: Trace, tmp_path: Path) -> None:
    """Some profiles do not record calls of the runtime; a kernel then names the operator by its number."""
    trace.span("aten::mm", 70, 75, **{"External id": 41})
    trace.kernel(99, 700, 8, **{"External id": 41})
    assert device_own(trace.ledger(tmp_path))["fc2", "forward"] == 28


def test_a_kernel_without_launch_or_operator_is_counted_as_unlinked(trace: Trace, tmp_path: Path) -> None:
    trace.kernel(99, 700, 8)
    trace.kernel(None, 710, 1)
    ledger = trace.ledger(tmp_path)
    assert ledger.unlinked == 2
    assert device_own(ledger)["(no module)", "other"] == 10


def test_a_launch_at_the_edge_of_a_span_belongs_to_its_module(tmp_path: Path) -> None:
    """Calibration subtracts time at the edges of a span; launches in that time stay the module's."""
    trace = Trace()
    start = trace.calibration(0, outside=2, inside=20) + 10
    trace.module("forward (root) (Net)", start, start + 100)
    trace.launch(1, start + 1)
    trace.launch(2, start + 99)
    trace.kernel(1, 900, 5)
    trace.kernel(2, 910, 5)
    trace.memory(start + 2, 64)
    ledger = trace.ledger(tmp_path)
    assert device_own(ledger) == {("(root)", "forward"): 10}
    assert next(row.memory for row in make_table(ledger).rows if row.module == "(root)") == 64


def test_memory_belongs_to_the_module_that_allocates_and_frees(trace: Trace, tmp_path: Path) -> None:
    trace.memory(30, 1000)
    trace.memory(70, 500, on_device=True)
    trace.memory(80, -100, on_device=True)
    trace.memory(215, 70, tid=ENGINE, on_device=True)
    trace.memory(150, 7)
    rows = {(row.module, row.phase): row for row in make_table(trace.ledger(tmp_path)).rows}
    assert rows["fc1", "forward"].memory == rows["(root)", "forward"].memory == 1000
    assert rows["fc2", "forward"].device_memory == rows["(root)", "forward"].device_memory == 400
    assert rows["fc2", "backward"].device_memory == 70
    assert rows["(no module)", "other"].memory == 7


def test_a_profile_of_the_device_alone_is_refused_with_a_remedy(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(1, 10, 5)
    with pytest.raises(UsageError, match=r"no events of the CPU.*ProfilerActivity\.CPU"):
        trace.ledger(tmp_path)
