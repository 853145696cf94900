"""Plain arguments of calls: kept where they change, under paths as tensors have them."""

from __future__ import annotations

import json
import math
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, everything, hooks_on, tapped
from tensortap.capture.watching.flatten import open_arguments
from tensortap.core.arguments import OpaqueValue


class Takes(nn.Module):
    """Accepts any arguments, and uses only the first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x * self.weight


class Gives(nn.Module):
    """Calls its child with each of the given arguments in turn."""

    def __init__(self, *ways: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.part, self.ways = Takes(), ways

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for args, kwargs in self.ways:
            x = self.part(x, *args, **kwargs)
        return x


def lines(path: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / f"rank_{rank}" / "calls.jsonl").read_text().splitlines()]


def given(path: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the plain arguments that are kept of one call."""
    run, _ = tapped(Gives((args, kwargs)), path, keep="summary", kinds=("input", "output"))
    found = [run.arguments(record) for record in run.records(module="part")]
    assert all(repr(each) == repr(found[0]) for each in found), "of each record of the call"
    assert found[0] is not None
    return found[0]


def test_positions_and_keywords_are_paths(run_path: Path) -> None:
    found = given(run_path, True, None, is_causal=False, scale=0.125, mode="mean", **{"a.b": 1})
    assert repr(found) == repr({"1": True, "2": None, "is_causal": False, "scale": 0.125, "mode": "mean", "a\\.b": 1})


def test_a_container_without_tensors_is_one_value(run_path: Path) -> None:
    x = torch.ones(2)
    found = given(run_path, (x, None, [1, 2]), sizes=[4, (5, 6)], past={"k": x, "v": {"n": 3}}, empty=(), none={})
    assert found == {
        "1.1": None,
        "1.2": [1, 2],
        "sizes": [4, (5, 6)],
        "past.v": {"n": 3},
        "empty": (),
        "none": {},
    }
    run = tt.open(run_path)
    paths = [record.key.path for record in run.records(module="part", kind="input")]
    assert paths == ["0", "1.0", "past.k"], "tensors have the paths that they always had"


def test_all_sorts_of_values(run_path: Path) -> None:
    class Mode(IntEnum):
        FULL = 3

    found = given(
        run_path,
        dtype=torch.bfloat16,
        device=torch.device("cuda:1"),
        both=[torch.float32, torch.device("cpu")],
        nan=math.nan,
        mode=Mode.FULL,
        numpy=np.float32(0.5),
        size=torch.Size([2, 3]),
        cut=slice(1, 2),
        rest=...,
        long="x" * 1000,
    )
    assert repr(found["nan"]) == "nan"
    assert (found["dtype"], found["device"]) == (OpaqueValue("dtype", "bfloat16"), OpaqueValue("device", "cuda:1"))
    assert repr(found["both"]) == "[float32, cpu]"
    assert repr(found["mode"]).endswith("Mode.FULL")
    assert found["numpy"] == np.float32(0.5)
    assert found["size"] == (2, 3)
    assert [repr(found[name]) for name in ("cut", "rest")] == ["a slice object", "an ellipsis object"]
    assert found["long"].note.startswith("1000 characters")


def test_an_object_is_kept_as_its_type_without_calling_it(run_path: Path) -> None:
    class Cache:
        def _fail(self, *_: Any) -> Any:
            raise AssertionError("nobody may call this")

        __repr__ = __str__ = __eq__ = __hash__ = __getattr__ = __bool__ = __len__ = __iter__ = _fail  # type: ignore[assignment]

    found = given(run_path, Cache(), past=Cache(), inside=[Cache(), 1])
    assert [repr(value).replace(Cache.__qualname__, "Cache") for value in found.values()] == [
        "a Cache object",
        "a Cache object",
        "[a Cache object, 1]",
    ]


def test_a_list_is_kept_as_it_was_when_the_call_began(run_path: Path) -> None:
    class Appends(Takes):
        def forward(self, x: torch.Tensor, seen: list[int]) -> torch.Tensor:
            seen.append(1)
            return super().forward(x)

    model = Gives((([],), {}))
    model.part = Appends()  # type: ignore[assignment]
    run, _ = tapped(model, run_path, steps=3)
    assert [line["arguments"] for line in lines(run_path)] == [{"1": []}, {"1": [1]}, {"1": [1, 1]}]
    assert run.arguments(next(run.records(module="part", step=2, kind="output"))) == {"1": [1, 1]}


def test_only_changes_are_written(run_path: Path) -> None:
    run, _ = tapped(
        Gives(((), {"n": 1}), ((), {"n": 1}), ((), {"n": True}), ((), {}), ((), {"n": 1})), run_path, steps=2
    )
    assert [(line["step"], line["call"], line["arguments"]) for line in lines(run_path)] == [
        (0, 0, {"n": 1}),
        (0, 2, {"n": True}),
        (0, 3, {}),
        (0, 4, {"n": 1}),
        (1, 2, {"n": True}),
        (1, 3, {}),
        (1, 4, {"n": 1}),
    ]
    for step in range(2):
        outputs = [run.arguments(r) for r in run.records(module="part", kind="output", step=step)]
        assert repr(outputs) == repr([{"n": 1}, {"n": 1}, {"n": True}, {}, {"n": 1}])
        gradients = {r.key.call: run.arguments(r) for r in run.records(module="part", kind="grad_output", step=step)}
        assert repr(gradients[2]) == repr({"n": True}), "a gradient belongs to the call of its output"


def test_modules_that_get_tensors_alone_leave_no_line(run_path: Path) -> None:
    run, _ = tapped(zoo.Residual(), run_path)
    assert lines(run_path) == []
    assert {str(run.arguments(r)) for r in run.records(kind="output")} == {"{}"}


def test_micro_steps_are_distinguished(run_path: Path) -> None:
    model = Gives(((), {"n": 0}))
    with tt.capture(model, run_path) as tap:
        for micro in range(3):
            model.ways = (((), {"n": micro // 2}),)
            model(torch.ones(2, requires_grad=True)).sum().backward()
        tap.step()
    run = tt.open(run_path)
    assert [run.arguments(r) for r in run.records(module="part", kind="output")] == [{"n": 0}, {"n": 0}, {"n": 1}]
    assert len(lines(run_path)) == 2


def test_the_selection_counts(run_path: Path) -> None:
    model = Gives(((), {"n": 1}))
    with tt.capture(model, run_path, modules="(root)", steps=[1]) as tap:
        for _ in range(3):
            model(torch.ones(2, requires_grad=True)).sum().backward()
            tap.step()
    assert lines(run_path) == []
    with tt.capture(model, run_path, modules="part", steps=[1], overwrite=True, kinds=("grad_output",)) as tap:
        for _ in range(3):
            model(torch.ones(2, requires_grad=True)).sum().backward()
            tap.step()
    assert [(line["step"], line["module"]) for line in lines(run_path)] == [(1, "part")]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_not_a_separate_call(run_path: Path, reentrant: bool) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.calls = Takes(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1  # another number when it runs again
            return self.part(x, n=self.calls)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.region = Region()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.region, x, use_reentrant=reentrant)
            return x

    model = Whole()
    run, _ = tapped(model, run_path, torch.ones(2, 3, requires_grad=True))
    assert model.region.calls == 4
    assert [(line["call"], line["arguments"]) for line in lines(run_path)] == [(0, {"n": 1}), (1, {"n": 2})]
    assert {r.key.call: run.arguments(r) for r in run.records(module="region.part", kind="grad_output")} == {
        0: {"n": 1},
        1: {"n": 2},
    }


def test_two_ranks(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        tapped(Gives(((), {"rank": rank})), run_path)
    run = tt.open(run_path)
    assert [run.arguments(r) for r in run.records(module="part", kind="output")] == [{"rank": 0}, {"rank": 1}]


def test_plain_arguments_change_neither_training_nor_records(tmp_path: Path) -> None:
    """One pass flattens tensors and plain values: plain values must not change which tensors it finds."""
    x = torch.ones(2, 3)
    plain, _ = tapped(Gives(((), {})), tmp_path / "a", x, kinds=ALL_KINDS)
    model = Gives(((None, 3), {"past": [None], "mode": "x"}))
    other, _ = tapped(model, tmp_path / "b", x, kinds=ALL_KINDS)
    assert everything(plain) == everything(other)
    assert hooks_on(model) == 0


def test_a_plain_value_never_takes_the_path_of_a_tensor() -> None:
    x = torch.ones(1)
    opened = open_arguments(
        ({1: None, "1": x, "a": {"b": 1}},), {"0": 5}, lambda value: isinstance(value, torch.Tensor)
    )
    assert [path for path, _ in opened.tensors] == ["0.1"], "and not 0.1~2"
    assert opened.plain == [("0.1", None), ("0.a", {"b": 1}), ("0", 5)]


def test_nested_in_itself(run_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert "a list object" in repr(given(run_path, loop)["1"])


def test_a_killed_run_has_all_flushed_records(run_path: Path) -> None:
    model = Gives(((), {"n": 0}))
    tap = tt.capture(model, run_path)
    for step in range(3):
        model.ways = (((), {"n": step}),)
        model(torch.ones(2, requires_grad=True)).sum().backward()
        tap.step()
    tap.flush()
    file = run_path / "rank_0" / "calls.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step":3,"micro":0,"mod')  # as a kill may leave it
    run = tt.open(run_path)
    assert [run.arguments(r) for r in run.records(module="part", kind="output")] == [{"n": step} for step in range(3)]
    tap.close()
