"""The marks of the two wrappers: their exact words, in order, and outputs and gradients left alone."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tensortap.compat.profiler import backward_hook_wrapper, forward_hook_wrapper, remove_hook_wrappers

WORDS = ("before ", "after ")


def marks(run) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
    events = sorted(prof.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith(WORDS)]


def test_names_of_the_marks() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert forward_hook_wrapper(model[0], details="first") is model[0]
    assert backward_hook_wrapper(model[0], "first") is model[0]
    backward_hook_wrapper(forward_hook_wrapper(model[1]))
    assert marks(lambda: model(torch.ones(1, 2)).sum().backward()) == [
        "before forward of Linear: first",
        "after forward of Linear: first",
        "before forward of Linear",
        "after forward of Linear",
        "before backward of Linear",
        "after backward of Linear",
        "before backward of Linear: first",
        "after backward of Linear: first",
    ]


def test_a_nested_class_keeps_its_qualified_name() -> None:
    class Inner(nn.Identity):
        pass

    (before, after) = marks(lambda: forward_hook_wrapper(Inner())(torch.ones(1)))
    name = "test_a_nested_class_keeps_its_qualified_name.<locals>.Inner"
    assert (before, after) == (f"before forward of {name}", f"after forward of {name}")


def test_outputs_and_gradients_stay_as_they_are() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    marked = copy.deepcopy(plain)
    for module in [marked, *marked]:
        forward_hook_wrapper(backward_hook_wrapper(module, "x"), "x")
    x = torch.randn(3, 4)
    outputs = [model(x) for model in (plain, marked)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for left, right in zip(plain.parameters(), marked.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_a_container_encloses_its_parts_and_each_mark_comes_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    for module in (model, *model):
        backward_hook_wrapper(module)
    found = marks(lambda: model(torch.ones(1, 2)).sum().backward())
    assert sorted(found) == sorted(
        f"{w} backward of {c}" for w in ("before", "after") for c in ("Sequential", "Linear", "ReLU")
    )
    assert found.index("before backward of Linear") > found.index("after backward of ReLU")
    assert found.index("after backward of Sequential") >= found.index("after backward of Linear") - 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    model = backward_hook_wrapper(nn.Linear(2, 2))
    x = torch.ones(1, 2, requires_grad=True)
    found = marks(lambda: checkpoint(model, x, use_reentrant=reentrant).sum().backward())
    assert found == ["before backward of Linear", "after backward of Linear"]


def test_an_unused_output_is_closed_when_backward_ends() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x * 3

    model = backward_hook_wrapper(Two())
    x = torch.ones(1, requires_grad=True)
    found = marks(lambda: model(x)[0].sum().backward())
    assert found == [f"{word} backward of {Two.__qualname__}" for word in ("before", "after")]


def test_without_gradients_there_is_nothing_to_mark() -> None:
    model = backward_hook_wrapper(nn.Linear(2, 2))
    with torch.no_grad():
        assert marks(lambda: model(torch.ones(1, 2))) == []


def test_an_exception_does_not_confuse_the_next_call() -> None:
    model = backward_hook_wrapper(nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert marks(lambda: model(torch.ones(1, 2)).sum().backward()) == [
        "before backward of Linear",
        "after backward of Linear",
    ]


def test_paddle_layers(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    profiler = pytest.importorskip("paddle.profiler")
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2))
    backward_hook_wrapper(forward_hook_wrapper(model[1], "last"), "last")
    with profiler.Profiler(targets=[profiler.ProfilerTarget.CPU], on_trace_ready=lambda _: None) as prof:
        model(paddle.ones([1, 2])).sum().backward()
    prof.export(str(tmp_path / "trace.json"), "json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    timed = sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])
    names = [event["name"].rpartition("[")[0] for event in timed]
    assert [name for name in names if name.startswith(WORDS)] == [
        f"{word} {phase} of Linear: last" for phase in ("forward", "backward") for word in ("before", "after")
    ]


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_wrapping_twice_marks_once_under_the_later_name() -> None:
    model = nn.Linear(2, 2)
    for details in ("old", "new", "new"):
        forward_hook_wrapper(backward_hook_wrapper(model, details), details)
    assert marks(lambda: model(torch.ones(1, 2)).sum().backward()) == [
        f"{word} {phase} of Linear: new" for phase in ("forward", "backward") for word in ("before", "after")
    ]


def test_the_marks_can_be_removed_from_a_graph_before_its_backward() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = forward_hook_wrapper(nn.Linear(2, 2))
    for module in (model, *model):
        forward_hook_wrapper(backward_hook_wrapper(module))
    assert remove_hook_wrappers(model[1]) == 2
    waiting = model(torch.ones(1, 2)).sum()
    assert remove_hook_wrappers(model) == 4
    assert marks(waiting.backward) == []
    assert marks(lambda: model(torch.ones(1, 2)).sum().backward()) == []
    assert not hooks(model) and hooks(other)
    assert remove_hook_wrappers(model) == 0
    forward_hook_wrapper(model[0])  # and anew
    assert len(marks(lambda: model(torch.ones(1, 2)))) == 2


def test_a_marked_model_is_freed() -> None:
    model = forward_hook_wrapper(backward_hook_wrapper(nn.Linear(2, 2)))
    model(torch.ones(1, 2)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_paddle_layers_are_marked_once_and_can_be_freed_of_marks(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.Linear(2, 2))
    for _ in range(2):
        backward_hook_wrapper(forward_hook_wrapper(model[1], "last"), "last")
    assert len(model[1]._forward_pre_hooks) == 2  # one for each direction
    assert remove_hook_wrappers(model) == 2
    assert not model[1]._forward_pre_hooks and not model[1]._forward_post_hooks
