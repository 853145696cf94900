"""Spans of modules in a profile: they nest, they have names, they change nothing and leave nothing."""

from __future__ import annotations

import copy
import gc
import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from support import zoo
from tensortap.errors import UsageError
from tensortap.model.profile.annotate import annotate
from tensortap.model.profile.module_times import module_times

OURS = ("forward ", "backward ", "recompute ")


def profiled(run: Callable[[], object], **options: bool) -> profile:
    with profile(activities=[ProfilerActivity.CPU], **options) as prof:
        run()
    return prof


def trace(prof: profile, tmp_path: Path) -> list[dict]:
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in ("user_annotation", "cpu_op")]


def parents(events: list[dict]) -> list[tuple[str, str]]:
    """(span, the one of ours that encloses it). Fails where two events of a thread overlap without nesting."""
    found = []
    for thread in {event["tid"] for event in events}:
        stack: list[tuple[float, str]] = []
        for event in sorted((e for e in events if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
            begin, end = event["ts"], event["ts"] + event["dur"]
            while stack and stack[-1][0] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1][0] + 1e-2, f"{event['name']} overlaps {stack[-1][1]}"  # rounding, µs
            if event["name"].startswith(OURS):
                outer = next((name for _, name in reversed(stack) if name.startswith(OURS)), "")
                found.append((event["name"], outer))
            stack.append((end, event["name"]))
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.act(self.fc1(x)))


class Net(nn.Module):
    """A residual, an in-place activation, a module called twice, a dict output; checkpointed on demand."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self._reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.embed(ids))
        for layer in self.layers:
            if self._reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self._reentrant)
        y = self.norm(x)
        y += 1
        return {"y": y, "unused": x * 2}


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def train(model: nn.Module) -> None:
    model(IDS)["y"].square().sum().backward()


def test_forward_spans_mirror_the_modules(tmp_path: Path) -> None:
    model = Net()
    with annotate(model):
        prof = profiled(lambda: train(model))
    spans = Counter(parents(trace(prof, tmp_path)))
    root = "forward (root) (Net)"
    assert {pair: count for pair, count in spans.items() if pair[0].startswith("forward")} == {
        (root, ""): 1,
        ("forward embed (Embedding)", root): 1,
        ("forward norm (LayerNorm)", root): 2,
        **{(f"forward layers.{i} (Block)", root): 1 for i in (0, 1)},
        **{
            (f"forward layers.{i}.{own}", f"forward layers.{i} (Block)"): 1
            for i in (0, 1)
            for own in ("fc1 (Linear)", "act (ReLU)", "fc2 (Linear)")
        },
    }


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_spans_nest_and_every_module_has_one(reentrant: bool | None, tmp_path: Path) -> None:
    model = Net(reentrant)
    with annotate(model):
        prof = profiled(lambda: train(model))
    pairs = {pair for pair in parents(trace(prof, tmp_path)) if pair[0].startswith("backward")}
    blocks = [
        f"layers.{i}{own}" for i in (0, 1) for own in (" (Block)", ".fc1 (Linear)", ".act (ReLU)", ".fc2 (Linear)")
    ]
    labels = ["(root) (Net)", "embed (Embedding)", "norm (LayerNorm)", *blocks]
    assert {name for name, _ in pairs} == {f"backward {label}" for label in labels}
    for name, outer in pairs:
        if ".fc" in name or ".act" in name:
            assert outer == f"backward {name.split()[1].rpartition('.')[0]} (Block)"
        elif "(root)" not in name:
            assert outer == "backward (root) (Net)"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_spans_are_named_recompute(reentrant: bool, tmp_path: Path) -> None:
    model = Net(reentrant)
    with annotate(model):
        prof = profiled(lambda: train(model))
    spans = Counter(name for name, _ in parents(trace(prof, tmp_path)))
    for i in (0, 1):
        assert spans[f"forward layers.{i} (Block)"] == 1
        assert spans[f"recompute layers.{i} (Block)"] == 1
        assert spans[f"recompute layers.{i}.fc1 (Linear)"] == 1
    assert not any("recompute norm" in name or "recompute (root)" in name for name in spans)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_is_bit_identical(reentrant: bool | None) -> None:
    results = []
    for marked in (False, True):
        torch.manual_seed(0)
        model = Net(reentrant)
        optimizer = torch.optim.Adam(model.parameters())
        handle = annotate(model) if marked else None
        for _ in range(3):
            optimizer.zero_grad()
            train(model)
            optimizer.step()
        if handle is not None:
            handle.close()
        results.append([*(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters())])
    assert all(torch.equal(plain, marked) for plain, marked in zip(*results, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        zoo.InPlaceModule,
        zoo.InPlaceAfter,
        zoo.BehindAutograd,
        zoo.Views,
        zoo.Structured,
        zoo.Shared,
        zoo.PassThrough,
        zoo.Statistics,
        zoo.Residual,
        *(partial(zoo.Checkpointed, mode) for mode in (None, "reentrant", "non-reentrant")),
    ],
)
def test_awkward_models_keep_their_gradients(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    gradients = []
    for marked in (False, True):
        torch.manual_seed(0)
        model, x = make(), zoo.batch()
        x.requires_grad_(True)

        def run(model: nn.Module = model, x: torch.Tensor = x) -> None:
            zoo.loss_of(model(x)).backward()

        if marked:
            with annotate(model):
                prof = profiled(run)
            assert any(name.startswith("backward") for name, _ in parents(trace(prof, tmp_path)))
        else:
            run()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, seen in zip(*gradients, strict=True):
        assert (plain is None) == (seen is None)
        assert plain is None or torch.equal(plain, seen)


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called) for m in model.modules()
    )


def test_no_hook_remains_even_on_a_graph_before_its_backward(tmp_path: Path) -> None:
    model = Net()
    with annotate(model):
        waiting = model(IDS)["y"].sum()
        assert hooks(model)
    assert not hooks(model)
    prof = profiled(waiting.backward)
    assert not parents(trace(prof, tmp_path))


def test_a_call_lives_no_longer_than_its_graph() -> None:
    model = Net(False)
    with annotate(model) as handle:
        for _ in range(3):
            train(model)
        gc.collect()
        assert not handle._hooks._calls
        assert not handle._hooks._spans._stack()


class Fails(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.inner, self.error, self.fail = nn.Sequential(nn.Linear(4, 4)), error, True
        self.inner[0].register_forward_hook(self._raise)

    def _raise(self, *_: object) -> None:
        if self.fail:
            raise self.error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_no_span_open_for_the_next_step(error: type[BaseException], tmp_path: Path) -> None:
    model = Fails(error)
    x = torch.ones(1, 4)

    def run() -> None:
        with pytest.raises(error):
            model(x)
        model.fail = False
        model(x).sum().backward()

    with annotate(model) as handle:
        prof = profiled(run)
        assert not handle._hooks._spans._stack()
    pairs = parents(trace(prof, tmp_path))
    assert pairs.count(("forward (root) (Fails)", "")) == 2  # the second span is not inside the first
    assert pairs.count(("forward inner.0 (Linear)", "forward inner (Sequential)")) == 2


def test_an_exception_in_backward_leaves_nothing_for_the_next_step(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4)

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *_: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Stops.apply(x)

    model.insert(1, Broken())

    def run() -> None:
        with pytest.raises(ValueError, match="no"):
            model(x).sum().backward()
        model(x)

    with annotate(model) as handle:
        prof = profiled(run)
        assert not handle._hooks._spans._stack()
    # No hook runs when a node raises, so its spans end late, at the next forward; they still nest.
    pairs = parents([event for event in trace(prof, tmp_path) if event["name"].startswith(OURS)])
    assert pairs.count(("forward (root) (Sequential)", "")) == 2


def test_a_module_inside_itself(tmp_path: Path) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, more: int = 1) -> torch.Tensor:
            return self.fc(self(x, more - 1) if more else x)

    model = Again()
    with annotate(model):
        prof = profiled(lambda: model(torch.ones(1, 2)).sum().backward())
    root = "forward (root) (Again)"
    assert Counter(p for p in parents(trace(prof, tmp_path)) if p[0].startswith("forward")) == {
        (root, ""): 1,
        (root, root): 1,
        ("forward fc (Linear)", root): 2,
    }
    (row,) = [row for row in module_times(prof).rows if row.module == "(root)"]
    outer = max(e.time_range.elapsed_us() for e in prof.events() if e.name == root)
    assert row.calls == 2 and row.forward.own < row.forward.total <= outer  # a module inside itself counts once


def test_forwards_on_two_threads_do_not_mix(tmp_path: Path) -> None:
    model, ready = Net(), threading.Barrier(2)
    errors = []

    def work() -> None:
        try:
            ready.wait()
            for _ in range(5):
                train(model)
        except Exception as error:
            errors.append(error)

    def run() -> None:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with annotate(model) as handle:
        prof = profiled(run)
        assert not handle._hooks._spans._stack()
    assert not errors
    parents(trace(prof, tmp_path))


def test_only_the_selected_modules_and_phases_have_spans(tmp_path: Path) -> None:
    model = Net()
    with annotate(model, modules="layers.*.fc?", backward=False):
        prof = profiled(lambda: train(model))
    assert {name for name, _ in parents(trace(prof, tmp_path))} == {
        f"forward layers.{i}.fc{j} (Linear)" for i in (0, 1) for j in (1, 2)
    }
    with annotate(model, forward=False):
        prof = profiled(lambda: train(model))
    assert {name.split()[0] for name, _ in parents(trace(prof, tmp_path))} == {"backward"}
    with pytest.raises(UsageError, match="nothing to mark"):
        annotate(model, forward=False, backward=False)
    with pytest.raises(UsageError, match="did you mean"):
        annotate(model, modules="layer.0")


def test_a_retained_graph_is_marked_each_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with annotate(model):
        loss = model(torch.ones(1, 2)).sum()
        counts = []
        for keep in (True, False):
            prof = profiled(lambda keep=keep: loss.backward(retain_graph=keep))
            counts.append(Counter(parents(trace(prof, tmp_path))))
    assert counts[0] == counts[1] and ("backward 1 (Tanh)", "backward (root) (Sequential)") in counts[0]


def test_annotating_twice_marks_once(tmp_path: Path) -> None:
    model = Net()
    with annotate(model):
        once = Counter(parents(trace(profiled(lambda: train(model)), tmp_path)))
    with annotate(model), annotate(model) as inner:
        assert Counter(parents(trace(profiled(lambda: train(model)), tmp_path))) == once
        inner.close()
        assert Counter(parents(trace(profiled(lambda: train(model)), tmp_path))) == once  # the outer one is in use
    assert not hooks(model)


def test_annotating_again_after_losing_the_handle() -> None:
    model = Net()
    annotate(model)
    assert hooks(model)
    annotate(model).close()
    assert not hooks(model)
    annotate(model).close()  # and anew
    assert not hooks(model)


def test_a_name_of_a_list_that_matches_nothing_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    annotate(nn.Sequential(nn.ReLU(), nn.Tanh()), modules=["0", "relu"]).close()
    assert capsys.readouterr().err == "tensortap: modules: 'relu' matches no module of the model\n"


def test_other_marks_on_annotated_modules_are_refused() -> None:
    model = Net()
    with annotate(model):
        before = hooks(model)
        for wrong in (
            lambda: annotate(model, backward=False),
            lambda: annotate(model, modules="layers.*"),
            lambda: annotate(model.layers[0]),
            lambda: annotate(nn.Sequential(model)),
        ):
            with pytest.raises(UsageError, match=r"already annotated.*close"):
                wrong()
        assert hooks(model) == before
    annotate(model, modules="layers.*").close()
    assert not hooks(model)


def test_a_copy_of_an_annotated_model_is_another_model(tmp_path: Path) -> None:
    model = Net()
    with annotate(model):
        copied = copy.deepcopy(model)
        with annotate(copied):
            prof = profiled(lambda: train(copied))
        assert parents(trace(prof, tmp_path)).count(("forward (root) (Net)", "")) == 1


def test_several_models_in_one_profile_have_names() -> None:
    models = {"G": nn.Sequential(nn.Linear(2, 2)), "D": nn.Sequential(nn.Linear(2, 2))}
    with annotate(models["G"], name="G"), annotate(models["D"], name="D"):
        with pytest.raises(UsageError, match="already annotated"):
            annotate(models["G"], name="other")
        prof = profiled(lambda: models["D"](models["G"](torch.ones(1, 2))).sum().backward())
    calls = {row.module: row.calls for row in module_times(prof).rows if row.calls}
    assert calls == {"G": 1, "G.0": 1, "D": 1, "D.0": 1}


def test_a_class_with_an_odd_name_keeps_its_row() -> None:
    model = nn.Sequential(type("Odd(1)", (nn.Linear,), {})(2, 2))
    with annotate(model):
        prof = profiled(lambda: model(torch.ones(1, 2)))
    assert ("0", "Odd[1]") in {(row.module, row.cls) for row in module_times(prof).rows}
