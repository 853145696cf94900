"""The same spans in paddle's profiler."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tensortap.model.profile.annotate import annotate

paddle = pytest.importorskip("paddle")
profiler = pytest.importorskip("paddle.profiler")

OURS = ("forward ", "backward ", "recompute ")


class Block(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 4)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(x)))


class Net(paddle.nn.Layer):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([Block(), Block()])
        self.norm, self.again = paddle.nn.LayerNorm(4), again

    def forward(self, x):
        from paddle.distributed.fleet.utils import recompute

        x = self.norm(x)
        for layer in self.layers:
            x = recompute(layer, x) if self.again else layer(x)
        return self.norm(x)


def spans(run: Callable[[], object], tmp_path: Path) -> list[tuple[str, str]]:
    """(span, the one of ours that encloses it)."""
    path = tmp_path / "trace.json"
    with profiler.Profiler(targets=[profiler.ProfilerTarget.CPU], on_trace_ready=lambda _: None) as prof:
        run()
    prof.export(str(path), "json")
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "PythonUserDefined"]
    found: list[tuple[str, str]] = []
    stack: list[tuple[float, str]] = []
    for event in sorted((e for e in events if e["name"].startswith(OURS)), key=lambda e: (e["ts"], -e["dur"])):
        name = event["name"].rpartition("[")[0]
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        found.append((name, stack[-1][1] if stack else ""))
        stack.append((event["ts"] + event["dur"], name))
    return found


def train(model):
    model(paddle.ones([2, 4])).square().sum().backward()


def test_forward_and_backward_have_spans(tmp_path: Path) -> None:
    model = Net()
    with annotate(model) as handle:
        found = Counter(name for name, _ in spans(lambda: train(model), tmp_path))
        assert not handle._hooks._spans._stack()
    assert found["forward (root) (Net)"] == 1 and found["forward norm (LayerNorm)"] == 2
    for i in (0, 1):
        assert found[f"forward layers.{i}.fc1 (Linear)"] == 1
        assert found[f"backward begins layers.{i}.fc2 (Linear)"] == 1
        assert found[f"backward ends layers.{i}.fc2 (Linear)"] == 1


def test_recomputation_spans_are_named_recompute(tmp_path: Path) -> None:
    model = Net(again=True)
    with annotate(model):
        found = Counter(name for name, _ in spans(lambda: train(model), tmp_path))
    assert found["recompute layers.0.fc1 (Linear)"] == 1 and found["forward layers.0.fc1 (Linear)"] == 1


@pytest.mark.parametrize("again", [False, True])
def test_training_is_bit_identical_and_no_hook_remains(again: bool) -> None:
    results = []
    for marked in (False, True):
        paddle.seed(0)
        model = Net(again)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        handle = annotate(model) if marked else None
        for _ in range(3):
            train(model)
            optimizer.step()
            optimizer.clear_grad()
        if handle is not None:
            gc.collect()
            assert not handle._hooks._calls and not handle._hooks._spans._stack()
            handle.close()
            assert not any(m._forward_pre_hooks or m._forward_post_hooks for m in model.sublayers(include_self=True))
        results.append([p.numpy() for p in model.parameters()])
    assert all((plain == seen).all() for plain, seen in zip(*results, strict=True))


def test_an_exception_leaves_no_span_open(tmp_path: Path) -> None:
    model = Net()

    def stop(*_: object) -> None:
        raise ValueError("no")

    hook = model.layers[1].act.register_forward_post_hook(stop)
    with annotate(model) as handle:
        with pytest.raises(ValueError, match="no"):
            train(model)
        assert not handle._hooks._spans._stack()
        hook.remove()
        found = spans(lambda: train(model), tmp_path)
    assert ("forward (root) (Net)", "") in found
