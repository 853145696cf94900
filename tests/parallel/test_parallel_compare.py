"""Real processes in every layout against one process: correct runs match, from tensors and from summaries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from parallel_models import LAYOUTS

import tensortap as tt
from tensortap.core.records import Key

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

CORRECT = [name for layouts in LAYOUTS.values() for name in layouts if name != "cp_unreduced"]


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_run_matches_from_tensors(runs: Path, name: str) -> None:
    result = tt.compare(runs / "one", runs / name)
    assert result.verdict == "match", result.sentence
    assert result.births == [] and not result.counts.get("unjudged")
    named = {each.key for each in result.unmatched if each.why}
    compared = {Key(*(row[name] for name in Key._fields)) for row in result.rows}
    assert {record.key for record in tt.open(runs / "one")} <= compared | named


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_run_matches_from_summaries(runs: Path, name: str) -> None:
    result = tt.compare(runs / "summaries", runs / name)
    assert result.births == [], result.sentence
    assert result.verdict == "match" or "the layout over ranks is not known" in result.sentence


def test_context_parallel_gradients_without_a_reduction_are_named(runs: Path) -> None:
    """The processes of this layout train on their own halves of the sequence, and never reduce a gradient."""
    first = tt.compare(runs / "one", runs / "cp_unreduced").first
    assert first is not None and first.layout is not None
    assert (first.cause.value, first.layout.axis, first.key.kind) == ("missing_reduction", "cp", "step_grad")


@pytest.mark.parametrize("name", ["ddp", "tp", "fsdp2_tp"])
def test_replicas_of_a_correct_run_are_healthy(runs: Path, name: str) -> None:
    report = tt.health(runs / name)
    assert not [each for each in report.births if each.status in ("replica", "layout")], report.sentence
