"""Whatever a step does, the quick way records the same as the careful one: every row, in the same order.

The careful way finds out about each event what it is, and reads each tensor at once. The quick way follows the plan of
the step before, copies small tensors or reads them later, and makes their rows after the step.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import UserDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from support.fake_gpu import choose_language
from support.tapping import ALL_KINDS
from tensortap.capture import native_classes
from tensortap.capture.recording import recorder
from tensortap.capture.watching import templates
from tensortap.capture.watching.planned_watcher import PlannedWatcher
from tensortap.frameworks.torch.gradient_hooks import GradientHooks

CAUSES = (
    "shape",
    "branch",
    "skip",
    "error",
    "in place",
    "unseen",
    "checkpoint",
    "hook",
    "again",
    "evaluate",
    "detach",
    "no backward",
    "two",
    "input",
    "type",
    "strides",
)
STEPS = 40


class Restless(nn.Module):
    """A model that does something else in every step, as `todo` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Identity())
        self.wide = nn.Linear(6, 9000)  # its output is too large to be copied
        self.todo = "plain"

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        y = self.second(self.first(x)) if self.todo != "branch" else self.first(self.second(x))
        if self.todo == "in place":
            y += 1
        if self.todo == "detach":
            y = y.detach()
        if self.todo == "unseen":
            y.data.mul_(2)
        if self.todo == "error":
            raise ZeroDivisionError
        if self.todo == "checkpoint":
            y = checkpoint(self.inner, y, use_reentrant=False)
        elif self.todo == "input":
            y = self.inner[2](y)  # a module that returns its input
        elif self.todo != "skip":
            y = self.inner(y)
        y = self.norm(self.third(y) + x) * scale
        return {"y": y, "wide": self.wide(y[:, :1])}


def record(path: Path, device: str, seed: int, causes: Sequence[str] = CAUSES) -> tuple[list[Any], list[Any], Any]:
    """Train with one cause after the other at random, and return what the run holds."""
    torch.manual_seed(seed)
    choose = random.Random(seed)
    model = Restless().to(device)
    hook = model.third.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    with tt.capture(model, path, kinds=(*ALL_KINDS, "step_grad"), optimizer=optimizer) as tap:
        for _ in range(STEPS):
            model.todo = choose.choice(causes) if choose.random() < 0.4 else "plain"
            x = torch.randn(3 if model.todo == "shape" else 2, 4, 6, device=device)
            if model.todo == "strides":
                x = x.transpose(0, 1).contiguous().transpose(0, 1)
            if model.todo == "two":
                model(x)["y"].sum().backward()
            if model.todo == "hook":
                hook.remove()
            if model.todo == "evaluate":
                with torch.no_grad():
                    model(x)
            try:
                output = model(x, scale=1 if model.todo == "type" else choose.choice((1.0, 1.0, 0.5)))
                loss = output["y"].square().sum() + output["wide"].sum()
                if model.todo != "no backward":
                    loss.backward(retain_graph=model.todo == "again")
                if model.todo == "again":
                    loss.backward()
            except ZeroDivisionError:
                pass
            optimizer.step()
            optimizer.zero_grad()
    run = tt.open(path)
    assert run.finished and not run.failure
    facts = [(path / name).read_bytes() for name in ("rank_0/calls.jsonl", "rank_0/loop.jsonl")]
    return [row_of(each) for each in run], [*facts, [*map(str, tap.coverage)]], tap


def row_of(record: Any) -> tuple[Any, ...]:
    statistics = tuple(repr(record.summary[name]) for name in ("elements", "mean", "std", "min", "max", "l1", "l2"))
    summary = record.summary.digest, record.summary.sketch.tobytes(), *statistics
    return record.key, record.seq, record.cls, record.dtype, record.shape, record.tensor, summary


@pytest.fixture
def carefully(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a context in which every event and every tensor is looked at anew, at once."""

    @contextmanager
    def all_of_it() -> Iterator[None]:
        with monkeypatch.context() as changed:
            changed.setattr(PlannedWatcher, "uses_plans", False)
            changed.setattr(templates, "_MOST_MISSES", -1)
            changed.setattr(recorder.Recorder, "take", lambda *_: False)
            changed.setattr(recorder, "MOST_READ", -1)
            changed.setattr(native_classes, "load", lambda: None)
            yield

    yield all_of_it


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets an entry for each step: whether it followed its plan to the end."""
    steps: list[bool] = []
    see_end = PlannedWatcher._see_end

    def seen(self: PlannedWatcher) -> None:
        following = self._follower.following
        see_end(self)
        if self.armed:
            steps.append(following and self._log is None and self._follower.at == len(self._follower.events))

    monkeypatch.setattr(PlannedWatcher, "_see_end", seen)
    return steps


@pytest.mark.parametrize(("seed", "language"), [(0, "C++"), (1, "C++"), (2, "C++"), (3, "C"), (4, "Python")])
def test_steps_that_differ_are_recorded_alike(
    tmp_path: Path, carefully: Any, followed: list[bool], seed: int, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_language(monkeypatch, language)
    quick, facts, _ = record(tmp_path / "quick", "cpu", seed)
    assert 5 < sum(followed) < STEPS - 2, "some steps follow their plan, and some leave it"
    with carefully():
        careful, expected, _ = record(tmp_path / "careful", "cpu", seed)
    assert len(quick) > 20 * STEPS and {row[0].step for row in quick} >= set(range(STEPS - 1))
    assert [row[0] for row in quick] == [row[0] for row in careful]
    for ours, theirs in zip(quick, careful, strict=True):
        assert ours == theirs
    assert facts == expected


def test_a_root_that_is_not_recorded_has_its_place_in_the_plan(tmp_path: Path, followed: list[bool]) -> None:
    model = Restless()
    with tt.capture(model, tmp_path / "run", modules=["first", "second"]) as tap:
        for _ in range(6):
            model(torch.randn(2, 4, 6))["y"].sum().backward()
            tap.step()
    assert followed[2:6] == [True] * 4
    assert {row.key.module for row in tap.run} == {"first", "second"}


class Mode(Enum):
    FULL, HALF = 1, 2


class Parts(NamedTuple):
    x: torch.Tensor
    scale: float


@dataclass
class Loss:
    value: torch.Tensor
    counts: list[int]
    name: str | None = None


class Asked(nn.Module):
    """A module that is given values of many kinds, of which some differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, parts: Parts, shape: torch.Size, cache: UserDict[int, Any], **given: Any) -> Loss:
        self.linear = self.linear.to(torch.float32)  # sets the child that it has
        y = self.linear(parts.x) * parts.scale
        cache[len(cache)] = y
        return Loss(y.square().sum(), [int(given["step"]), 1], str(shape))


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Asked(), Asked()
        self.caches: list[weakref.ref[Any]] = []

    def forward(self, x: torch.Tensor, step: int) -> Loss:
        cache: UserDict[int, Any] = UserDict()
        self.caches.append(weakref.ref(cache))
        given = {"mode": Mode.HALF if step == 6 else Mode.FULL, "at": range(step), "eps": -0.0 if step % 3 else 0.0}
        given |= {"step": step // 2, "ratio": float("nan"), "done": step > 7, "kept": object()}
        for asked in (self.first, self.second):
            loss = asked(Parts(x, 0.5), x.shape, cache=cache, **given)
            x = cache[len(cache) - 1]
        return loss


def record_arguments(path: Path) -> tuple[list[Any], bytes]:
    torch.manual_seed(0)
    model = Asking()
    with tt.capture(model, path, kinds=ALL_KINDS) as tap:
        for step in range(12):
            model(torch.randn(2 + step // 4, 6), step).value.backward()
            tap.step()
        gc.collect()
        assert not [step for step, cache in enumerate(model.caches) if cache() is not None], "nothing is kept alive"
    return [row_of(each) for each in tap.run], (path / "rank_0/calls.jsonl").read_bytes()


@pytest.mark.parametrize("language", ["C++", "C", "Python"])
def test_other_plain_arguments_do_not_end_a_plan(
    tmp_path: Path, carefully: Any, followed: list[bool], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_language(monkeypatch, language)
    quick, arguments = record_arguments(tmp_path / "quick")
    assert followed[2:] == [True] * 10
    with carefully():
        careful, expected = record_arguments(tmp_path / "careful")
    assert quick == careful
    assert arguments == expected and b"Mode.HALF" in arguments and b"-0.0" in arguments


@pytest.mark.parametrize("language", ["C++", "C"])
def test_outputs_that_are_views_leave_no_work_to_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    choose_language(monkeypatch, language)
    placed: list[torch.Tensor] = []
    place, watch_view = GradientHooks.place, GradientHooks.watch_view
    monkeypatch.setattr(GradientHooks, "place", lambda self, *args: placed.append(args[0]) or place(self, *args))
    if language == "C++":
        monkeypatch.setattr(
            GradientHooks, "watch_view", lambda self, *args: placed.append(args[0]) or watch_view(self, *args)
        )
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh())
    assert model[0](torch.randn(2, 4, 6))._is_view()
    with tt.capture(model, tmp_path / "run", kinds=("grad_output",)) as tap:
        for _ in range(5):
            model(torch.randn(2, 4, 6)).sum().backward()
            tap.step()
    assert 0 < len(placed) <= 2 * 4, "those of the first two steps, of four modules"
    assert len([row for row in tap.run if row.key.module == "0"]) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(4))
def test_steps_that_differ_are_recorded_alike_on_a_gpu(
    tmp_path: Path, carefully: Any, followed: list[bool], seed: int
) -> None:
    """A tensor that is changed while its read waits has no record, and a notice; everything else is equal."""
    causes = [cause for cause in CAUSES if cause != "unseen"]
    quick, facts, tap = record(tmp_path / "quick", "cuda", seed, causes)
    assert 5 < sum(followed) < STEPS - 5
    with carefully():
        careful, expected, _ = record(tmp_path / "careful", "cuda", seed, causes)
    ours, theirs = ({row[0]: row for row in rows} for rows in (quick, careful))
    missing = [key for key in theirs if key not in ours]
    assert not [key for key in ours if key not in theirs] and len(missing) < len(theirs) / 100
    assert not missing or any("was changed in place" in notice for notice in tap.notices)
    for key, row in ours.items():
        assert (row[0], *row[2:5], row[6]) == (theirs[key][0], *theirs[key][2:5], theirs[key][6])
    assert facts == expected
