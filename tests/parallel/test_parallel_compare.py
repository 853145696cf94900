"""Real processes in every layout against one process: correct runs match, from tensors and from summaries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from parallel_models import LAYOUTS, WRONG, reference

import tensortap as tt
from tensortap.core.records import Key

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

CORRECT = [name for layouts in LAYOUTS.values() for name in layouts if name not in WRONG]
WITH_TENSORS = [name for name in CORRECT if not name.endswith("summaries")]


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_a_correct_run_matches_from_tensors(runs: Path, name: str) -> None:
    result = tt.compare(runs / reference(name), runs / name)
    assert result.verdict == "match", result.sentence
    assert result.births == [] and not result.counts.get("unjudged")
    named = {each.key for each in result.unmatched if each.why}
    compared = {Key(*(row[name] for name in Key._fields)) for row in result.rows}
    assert {record.key for record in tt.open(runs / reference(name))} <= compared | named


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_run_matches_from_summaries(runs: Path, name: str) -> None:
    result = tt.compare(runs / reference(name, summaries=True), runs / name)
    assert result.births == [] and not result.counts.get("unjudged"), result.sentence
    assert result.verdict == "match", result.sentence


PLANTED = {
    "megatron_missing": ("layers.1.w2", "missing_reduction", "tp"),
    "megatron_averaged": ("layers.1.w2", "mean_for_sum", "tp"),
    "megatron_doubled": ("layers.1.w2", "repeated_reduction", "tp"),
    "megatron_swapped": ("layers.1.w2", "swapped_ranks", "tp"),
    "megatron_backward": ("layers.1.w1", "missing_reduction", "tp"),  # its input has a residual connection
    "ep_swapped": ("moe.experts.0", "expert_placement", "ep"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("known", ["tensors", "summaries"])
def test_a_planted_mistake_is_named_with_its_axis(runs: Path, name: str, known: str) -> None:
    first = tt.compare(runs / reference(name, summaries=known == "summaries"), runs / name).first
    assert first is not None and first.layout is not None
    assert (first.module, first.cause.value, first.layout.axis) == PLANTED[name]


@pytest.mark.parametrize("known", ["tensors", "summaries"])
def test_attention_that_one_rank_scales_differently_is_named(runs: Path, known: str) -> None:
    """The weights of attention are plain tensors, of which each rank has those of its heads."""
    result = tt.compare(runs / reference("hf_tp", summaries=known == "summaries"), runs / "hf_tp_scaled")
    assert result.first is not None and result.first.module == "model.model.layers.1.self_attn", result.sentence
    weights = {
        row["module"]: row["status"]
        for row in result.rows
        if (row["kind"], row["path"], row["step"]) == ("output", "1", 0) and row["module"].endswith("self_attn")
    }
    assert weights == {f"model.model.layers.{at}.self_attn": status for at, status in ((0, "close"), (1, "diverged"))}


def test_context_parallel_gradients_without_a_reduction_are_named(runs: Path) -> None:
    """The processes of this layout train on their own halves of the sequence, and never reduce a gradient."""
    first = tt.compare(runs / "one", runs / "cp_unreduced").first
    assert first is not None and first.layout is not None
    assert (first.cause.value, first.layout.axis, first.key.kind) == ("missing_reduction", "cp", "step_grad")


@pytest.mark.parametrize("name", ["ddp", "tp", "fsdp2_tp"])
def test_replicas_of_a_correct_run_are_healthy(runs: Path, name: str) -> None:
    report = tt.health(runs / name)
    assert not [each for each in report.births if each.status in ("replica", "layout")], report.sentence
