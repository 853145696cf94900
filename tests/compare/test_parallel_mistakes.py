"""Mistakes that only parallel runs make: each is named with its module, axis and cause, and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tensortap as tt
from support.parallel_world import run_world


class Mistake(NamedTuple):
    name: str
    sizes: Mapping[str, int]
    cause: str
    module: str
    axis: str
    options: Mapping[str, Any] = {}
    words: str = ""


TP2, TP4, DP2, CP2 = {"tp": 2}, {"tp": 4}, {"dp": 2}, {"cp": 2}
ZIGZAG, SEQUENCE = {"zigzag": True}, {"sequence_parallel": True}
MISTAKES = [
    Mistake(
        *("no_reduce:layers.1.mlp.down", TP4, "missing_reduction", "layers.1.mlp.down", "tp", {}),
        "each of the 4 tp ranks holds a partial sum; their sum is the reference's output: an all-reduce is missing.",
    ),
    Mistake("twice:layers.1.attn.o", TP2, "repeated_reduction", "layers.1.attn.o", "tp"),
    Mistake("mean:layers.1.mlp.down", TP2, "mean_for_sum", "layers.1.mlp.down", "tp"),
    Mistake("no_reduce_backward:layers.1.mlp.gate_up", TP4, "missing_reduction", "layers.1.mlp.gate_up", "tp"),
    Mistake("twice_backward:layers.1.attn.qkv", TP2, "repeated_reduction", "layers.1.attn.qkv", "tp"),
    Mistake("no_gradient_reduce:layers.1.norm1.weight", DP2, "missing_reduction", "layers.1.norm1", "dp"),
    Mistake(
        *("no_gradient_reduce:layers.1.mlp.down.weight", {"dp": 2, "tp": 2}, "missing_reduction"),
        *("layers.1.mlp.down", "dp"),
    ),
    Mistake(
        *("no_sequence_reduce:layers.1.norm1.weight", TP2, "missing_reduction", "layers.1.norm1", "tp", SEQUENCE),
    ),
    Mistake("dp_sum", DP2, "gradient_scale", "", "dp"),
    Mistake("cp_sum", CP2, "gradient_scale", "", "cp"),
    Mistake("rotate:layers.1.mlp.down.weight", TP4, "swapped_ranks", "layers.1.mlp.down", "tp"),
    Mistake("interleave:layers.1.attn.qkv.weight", TP2, "interleaving", "layers.1.attn.qkv", "tp"),
    Mistake("interleave:layers.1.mlp.gate_up.weight", TP2, "interleaving", "layers.1.mlp.gate_up", "tp"),
    Mistake("padding", TP2, "padding", "", "tp"),
    Mistake("cp_order", CP2, "sequence_order", "", "cp", ZIGZAG),
    Mistake("stale:layers.1@1", DP2, "stale_replica", "layers.1", "dp", {"steps": 2}),
    Mistake("flip:layers.1.norm1.weight@1,1", {"dp": 2, "tp": 2}, "replica", "layers.1.norm1", "dp"),
]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_world(tmp_path_factory.mktemp("one") / "run", steps=2)


def find(tmp_path: Path, one: Path, mistake: Mistake, keep: bool) -> Any:
    options = {"steps": 1, **mistake.options}
    candidate = run_world(tmp_path / "b", mistake.sizes, [mistake.name], keep=keep, **options)
    return tt.compare(one, candidate, steps=range(options["steps"]))


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_the_mistake_is_named(tmp_path: Path, one: Path, mistake: Mistake) -> None:
    result = find(tmp_path, one, mistake, keep=True)
    first = result.first
    assert result.verdict == "diverged" and first is not None and first.layout is not None, result.sentence
    assert (first.cause.value, first.module, first.layout.axis) == (mistake.cause, mistake.module, mistake.axis)
    assert mistake.words in result.sentence


@pytest.mark.parametrize("at", [0, 3, 11, 14], ids=[MISTAKES[at].name for at in (0, 3, 11, 14)])
def test_the_mistake_is_named_from_summaries(tmp_path: Path, one: Path, at: int) -> None:
    first = find(tmp_path, one, MISTAKES[at], keep=False).first
    assert first is not None and first.layout is not None
    assert (first.cause.value, first.module) == (MISTAKES[at].cause, MISTAKES[at].module)


def test_a_module_with_the_parameters_of_another_is_named(tmp_path: Path, one: Path) -> None:
    name = "load:layers.1.mlp.down.weight=layers.2.mlp.down.weight"
    result = tt.compare(one, run_world(tmp_path / "b", DP2, [name], steps=1), steps=[0])
    assert result.first is not None and result.first.cause.value == "stage_offset"
    assert "it is equal to that of layers.1.mlp.down in the reference" in result.sentence
