"""Each moment of the host goes to one place: exact numbers on traces made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.traces import ENGINE, MAIN, Trace, own, total

ROOT = "forward (root) (Net)"
ANNOTATING = ("(annotating)", "other")
NOTHING = ("(no module)", "other")


def test_own_time_excludes_submodules_and_marks(tmp_path: Path) -> None:
    trace = Trace()
    trace.module(ROOT, 10, 110)
    trace.module("forward fc (Linear)", 30, 60)
    trace.module("forward act (ReLU)", 70, 80)
    ledger = trace.ledger(tmp_path)
    # From 8 to 10 and 110 to 112 around the root; 28-30, 60-62 around fc; 68-70, 80-82 around act.
    assert own(ledger) == {
        ("(root)", "forward"): 100 - 30 - 10 - 8,
        ("fc", "forward"): 30,
        ("act", "forward"): 10,
        ANNOTATING: 12,
    }
    assert total(ledger)["(root)", "forward"] == 92
    assert ledger.span == 104_000  # from the first mark to the last


def test_own_times_sum_to_the_span_of_the_profile(tmp_path: Path) -> None:
    trace = Trace()
    trace.span("aten::zeros", 0, 1)
    trace.module(ROOT, 10, 110)
    trace.module("forward fc (Linear)", 30, 60)
    trace.node("MseLossBackward0", 120, 125)
    trace.node("AddmmBackward0", 130, 160)
    trace.backward(["(root) (Net)", "fc (Linear)"], 135, 155)
    trace.node("torch::autograd::AccumulateGrad", 161, 165)
    trace.span("Optimizer.step#AdamW.step", 170, 190, cat="user_annotation")
    trace.span("Optimizer.zero_grad#AdamW.zero_grad", 191, 192, cat="user_annotation")
    trace.span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 193, 197, cat="user_annotation")
    trace.span("aten::ones", 198, 200)
    ledger = trace.ledger(tmp_path)
    amounts = own(ledger)
    assert sum(amounts.values()) == 200 == ledger.span / 1000
    assert amounts["(optimizer)", "other"] == 20
    assert amounts["(zero_grad)", "other"] == 1
    assert amounts["(data loader)", "other"] == 4
    assert amounts["(AccumulateGrad)", "backward"] == 4
    assert amounts["(no module)", "backward"] == 5
    covered = 104 + 5 + 30 + 4 + 20 + 1 + 4
    assert amounts[NOTHING] == 200 - covered


def test_a_container_without_its_own_work_has_no_own_time(tmp_path: Path) -> None:
    """In a Sequential of ten, calibration attributes the time between two children's marks to hooks."""
    trace = Trace()
    start = trace.calibration(0, outside=2.0, inside=4.0) + 10
    trace.module("forward (root) (Sequential)", start, start + 2 + 10 * 20 - 2)
    for i in range(10):
        begin = start + 4 + 20 * i  # mark, gap, span of 14, gap, mark: 18 of 20
        trace.module(f"forward {i} (Linear)", begin, begin + 14)
    amounts = own(trace.ledger(tmp_path))
    assert all(amounts[str(i), "forward"] == 10 for i in range(10))
    assert ("(root)", "forward") not in amounts


def test_calibration_never_subtracts_more_than_the_time_spent(tmp_path: Path) -> None:
    trace = Trace()
    start = trace.calibration(0, outside=50.0, inside=60.0) + 10
    trace.module(ROOT, start, start + 100)
    trace.module("forward fc (Linear)", start + 40, start + 50)
    ledger = trace.ledger(tmp_path)
    assert all(amount > 0 for amount in own(ledger).values())
    assert sum(own(ledger).values()) == pytest.approx(ledger.span / 1000)


def test_backward_spans_that_only_enclose_a_submodule_count_as_annotation(tmp_path: Path) -> None:
    trace = Trace()
    trace.node("AddmmBackward0", 0, 50)
    trace.backward(["(root) (Net)", "layers.0 (Block)", "layers.0.fc (Linear)"], 10, 40)
    trace.node("AddBackward0", 50, 70)
    trace.backward(["(root) (Net)", "layers.0 (Block)"], 55, 65)
    ledger = trace.ledger(tmp_path)
    # The engine's own time around the spans belongs to the module that made the node: 0-8 and 42-50.
    assert own(ledger) == {
        ("layers.0.fc", "backward"): (38 - 12) + 8 + 8,
        ("layers.0", "backward"): (64 - 56) + 3 + 3,
        ANNOTATING: 2 + 2 + 2 + 2 + 2 + 1 + 1 + 2,
    }
    assert total(ledger)["(root)", "backward"] == 42 + 14
    assert total(ledger)["layers.0", "backward"] == 42 + 14
    calls = {place.module: count for place, count in ledger.calls.items()}
    assert calls == {"(root)": 2, "layers.0": 2, "layers.0.fc": 1}


def test_recomputation_is_a_separate_phase(tmp_path: Path) -> None:
    """Without reentry: the first node that needs a saved tensor runs the block again."""
    trace = Trace()
    trace.node("AddmmBackward0", 0, 200)
    trace.backward(["block (Block)", "block.fc (Linear)"], 10, 190)
    trace.module("recompute block (Block)", 40, 140)
    trace.module("recompute block.fc (Linear)", 60, 120)
    ledger = trace.ledger(tmp_path)
    assert own(ledger) == {
        ("block.fc", "backward"): (189 - 11 - 104) + 8 + 8,
        ("block", "recompute"): 100 - 64,
        ("block.fc", "recompute"): 60,
        ANNOTATING: 2 + 1 + 1 + 2 + 4 + 4,
    }
    assert total(ledger)["block", "recompute"] == 96
    assert total(ledger)["block.fc", "backward"] == 90  # recomputation is not in it


def test_nodes_inside_a_node_of_reentrant_checkpointing(tmp_path: Path) -> None:
    trace = Trace()
    trace.node("CheckpointFunctionBackward", 0, 200)
    trace.backward(["(root) (Net)"], 10, 190)
    trace.module("recompute block (Block)", 30, 60)
    trace.node("MulBackward0", 80, 120)
    trace.backward(["block (Block)"], 90, 110)
    trace.node("torch::autograd::AccumulateGrad", 130, 140)
    ledger = trace.ledger(tmp_path)
    amounts = own(ledger)
    assert amounts["block", "backward"] == 20 + 8 + 8
    assert amounts["(AccumulateGrad)", "backward"] == 10
    assert amounts["block", "recompute"] == 30
    assert amounts["(root)", "backward"] == 200 - 4 - 34 - 40 - 10  # the node's own, with the engine around it
    assert total(ledger)["(root)", "backward"] == 200 - 4 - 34 - 4


def test_a_thread_that_waits_for_backward_is_not_idle(tmp_path: Path) -> None:
    trace = Trace()
    trace.module(ROOT, 10, 50)
    trace.node("MulBackward0", 60, 160, tid=ENGINE)
    trace.backward(["(root) (Net)"], 70, 150, tid=ENGINE)
    trace.span("Optimizer.step#SGD.step", 170, 180)
    ledger = trace.ledger(tmp_path)
    amounts = own(ledger)
    assert amounts["(root)", "backward"] == 96
    assert amounts[NOTHING] == (60 - 52) + (170 - 160)
    assert sum(amounts.values()) == ledger.span / 1000


def test_a_users_span_with_a_similar_name_is_not_a_modules(tmp_path: Path) -> None:
    trace = Trace()
    trace.module(ROOT, 10, 110)
    trace.span("forward pass (mine)", 20, 100, cat="user_annotation")
    amounts = own(trace.ledger(tmp_path))
    assert amounts == {("(root)", "forward"): 100, ANNOTATING: 4}


def test_spans_without_any_marks_count_as_module_spans(tmp_path: Path) -> None:
    trace = Trace()
    trace.span(ROOT, 0, 100)
    trace.span("forward fc (Linear)", 10, 40)
    assert own(trace.ledger(tmp_path)) == {("(root)", "forward"): 70, ("fc", "forward"): 30}


def test_a_module_inside_itself_is_counted_once(tmp_path: Path) -> None:
    trace = Trace()
    trace.module(ROOT, 10, 110)
    trace.module(ROOT, 30, 90)
    ledger = trace.ledger(tmp_path)
    assert own(ledger)["(root)", "forward"] == total(ledger)["(root)", "forward"] == 96
    assert list(ledger.calls.values()) == [2]


def test_modules_on_two_threads_do_not_mix(tmp_path: Path) -> None:
    trace = Trace()
    for tid in (MAIN, ENGINE):
        trace.module(ROOT, 10, 110, tid=tid)
        trace.module("forward fc (Linear)", 30, 60, tid=tid)
    amounts = own(trace.ledger(tmp_path))
    assert amounts["(root)", "forward"] == 2 * 66 and amounts["fc", "forward"] == 60


@pytest.mark.parametrize(
    ("spans", "steps"),
    [
        ([("ProfilerStep#2", 0, 100), ("ProfilerStep#3", 100, 200), ("ProfilerStep#4", 200, 201)], 2),
        ([("Optimizer.step#SGD.step", 60, 70), ("Optimizer.step#SGD.step", 160, 170)], 2),
        ([], 4),
    ],
)
def test_steps_are_those_of_the_profiler_or_the_optimizer_or_calls(
    spans: list[tuple[str, float, float]], steps: int, tmp_path: Path
) -> None:
    trace = Trace()
    for start in (10, 30, 110, 130):
        trace.module(ROOT, start, start + 10)
    for name, start, end in spans:
        trace.span(name, start, end)
    assert trace.ledger(tmp_path).steps == steps


def test_rows_are_in_the_order_of_the_first_call_not_of_the_file(tmp_path: Path) -> None:
    trace = Trace()
    trace.node("MulBackward0", 100, 140, tid=ENGINE)
    trace.backward(["(root) (Net)", "last (Linear)"], 110, 130, tid=ENGINE)
    trace.module("forward last (Linear)", 60, 70)
    trace.module("forward first (Linear)", 20, 40)
    trace.module(ROOT, 10, 80)
    modules = [place.module for place in trace.ledger(tmp_path).calls]
    assert modules == ["(root)", "first", "last", "(root)", "last"]
