"""Mistakes in models of transformers are found where they were made; right runs raise no alarm.

Some of the zoo in two ways. All of it, with other settings and models: `python benchmarks/field.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

from field.bench.measuring import Bench, Outcome
from field.bench.right import RIGHT
from field.kit.mistake import Mistake, every
from field.kit.mutations import mutations
from field.kit.patches import optimizes, trains
from field.kit.running import training_of
from field.sets import FAMILIES
from field.zoo import MISTAKES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TRIED = ("llama", "gpt2", "mixtral", "resnet")  # they build without torchvision
NEED_TORCHVISION = ("mobilenet_v2", "efficientnet", "tv_swin", "timm_vit", "mnasnet", "tv_vit", "xcit", "eva", "twins")
NAMED_AT_LEAST = 0.95
CHEAP = ("gemm", "attention", "unpadded attention")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("field")
    yield Bench(folder)
    shutil.rmtree(folder)


def failures(outcomes: list[Outcome], right: str) -> str:
    return "\n".join(str(outcome) for outcome in outcomes if outcome.outcome != right)


def test_mistakes_are_named_exactly(bench: Bench) -> None:
    tried = [mistake for mistake in MISTAKES if mistake.family in TRIED][::2]
    outcomes = [bench.judged(mistake, "gemm", "summary") for mistake in tried]
    exact = sum(outcome.outcome == "exact" for outcome in outcomes)
    assert exact / len(outcomes) >= NAMED_AT_LEAST, failures(outcomes, "exact")


def test_mistakes_are_named_exactly_in_isolation(bench: Bench) -> None:
    tried = [mistake for mistake in MISTAKES if mistake.family in TRIED][1::3]
    outcomes = [bench.judged(mistake, "float32", "isolated") for mistake in tried]
    exact = sum(outcome.outcome == "exact" for outcome in outcomes)
    assert exact / len(outcomes) >= NAMED_AT_LEAST, failures(outcomes, "exact")


def test_mistakes_are_named_exactly_beside_another_attention(bench: Bench) -> None:
    tried = [mistake for mistake in MISTAKES if mistake.family == "mistral"]
    outcomes = [bench.judged(mistake, "attention", "summary") for mistake in tried]
    assert not (said := failures(outcomes, "exact")), said


HELD = {
    "ernie_moe": ("lr-too-large",),  # code with several weights, and an output that is used inside
    "lfm2": ("normed-twice", "decay-left-out"),  # an extra call; the weight of a module that is never called
    "olmo": ("not-clipped",),  # few elements of all positions differ, as many as padding has
    "glm": ("gate-and-up-swapped",),  # positions that see nothing differ in every layer
    "m2m": ("encoder-detached",),  # one of several users of an output sends nothing back
    "sew": ("residual-of-attention",),  # the model returns the state that a layer misuses
    "olmo3": ("normed-by-head",),  # the share of differing elements shows that it is not only at hidden positions
}


def test_mistakes_are_named_exactly_beside_another_attention_in_isolation(bench: Bench) -> None:
    tried = [mistake for mistake in MISTAKES if mistake.name in HELD.get(mistake.family, ())]
    assert len(tried) == 8
    outcomes = [bench.judged(mistake, "attention", "isolated") for mistake in tried]
    assert not (said := failures(outcomes, "exact")), said


def test_a_mistake_is_named_after_experts_that_got_hidden_positions(bench: Bench) -> None:
    tried = [mistake for mistake in MISTAKES if (mistake.family, mistake.name) == ("phimoe", "keys-from-values")]
    outcomes = [bench.judged(mistake, "attention", "tensors") for mistake in tried]
    assert tried and not (said := failures(outcomes, "exact")), said


@pytest.mark.parametrize("way", ["tensors", "summary"])
def test_an_optimizer_is_named_beside_padding_before_the_text(bench: Bench, way: str) -> None:
    """What attention makes of positions that see nothing differs before, and explains nothing after the backward."""
    changes = {"lr": optimizes(every, {"lr": 2e-3}), "not-clipped": trains(clip=None)}
    tried = [Mistake(name, "seed_oss", every, "update", change) for name, change in changes.items()]
    outcomes = [bench.judged(mistake, "attention", way) for mistake in tried]
    assert not (said := failures(outcomes, "exact")), said


def test_modules_are_named_from_summaries_beside_padding_before_the_text(bench: Bench) -> None:
    """Largest and smallest elements show from where on more differs than positions that see nothing."""
    names = ("scale-doubled", "gelu-for-silu", "mlp-residual-lost")
    tried = [mistake for mistake in MISTAKES if mistake.family == "seed_oss" and mistake.name in names]
    outcomes = [bench.judged(mistake, "attention", "summary") for mistake in tried]
    assert len(tried) == len(names) and not (said := failures(outcomes, "exact")), said


def test_an_attention_is_named_from_summaries_where_no_position_sees_nothing(bench: Bench) -> None:
    """Heads merged in another order keep the extremes; counts of the mask show that no position is hidden from all."""
    tried = [mistake for mistake in MISTAKES if (mistake.family, mistake.name) == ("eurobert", "heads-not-transposed")]
    outcomes = [bench.judged(mistake, "attention", "summary") for mistake in tried]
    assert tried and not (said := failures(outcomes, "exact")), said


FOUND = [
    ("gemma", "heads-interleaved", "attention", "summary"),  # keeps largest and smallest elements, but not the rest
    ("ernie4_5", "rotary-of-halves", "attention", "summary"),  # the sums of sketches tell it of a single record
    ("glm4_moe", "groups-by-best", "attention", "summary"),  # few tokens choose others, and some see nothing
    ("glm4_moe", "groups-by-best", "float32", "isolated"),  # scores are equal, so no rounding decided
    ("bert_decoder", "tie-lost", "attention", "summary"),  # gradients differ because of the tie alone
    ("bert_decoder", "window-ignored", "attention", "tensors"),  # a mask after positions that see nothing
    ("plbart", "not-causal", "float32", "tensors"),  # no mask, where both attentions need one
    ("llava", "image-detached", "float32", "summary"),  # a value that is returned only for information
    ("llava", "last-features", "float32", "isolated"),  # a layer gets gradients that it has not in the reference
    ("jamba", "bias-not-loaded", "float32", "isolated"),  # code that reads a wrong parameter of another module
    ("ministral3", "labels-shifted-twice", "attention", "tensors"),  # gradients that were wrong in the step before
    ("ministral3", "key-heads-reversed", "attention", "summary"),  # norms do not fit where one side has zeros
    ("llama4", "temperature-not-tuned", "attention", "summary"),  # an attention whose extremes stay the same
    ("llama4", "gate-and-up-swapped", "attention", "tensors"),  # hidden positions of each expert
    ("blenderbot", "activation-skipped", "attention", "isolated"),  # a causal mask that one kernel does without
    ("detr", "positions-of-queries-missing", "float32", "isolated"),  # None in place of a tensor
    ("gemma3n", "values-not-normed", "float32", "isolated"),  # values that a layer puts into a dictionary
    ("prophetnet", "position-of-last", "float32", "isolated"),  # a container that reads the weight of an embedding
    ("granite_swa", "sinks-of-other-heads", "bf16", "summary"),  # a parameter at the start, of a module with a mask
    ("timesfm", "frequencies-shifted", "attention", "summary"),  # numbers that are no choices among scores
    ("zaya", "router-forgets", "float32", "isolated"),  # what lacks a gradient since an input is lost
    ("zaya", "weights-detached", "attention", "summary"),  # tokens sorted by expert, of which some see nothing
    ("layoutlmv3", "direction-reversed", "float32", "summary"),  # a table whose extremes agree, before any attention
    ("qwen3_vl", "erf-for-tanh", "attention", "tensors"),  # before any module that is given a mask
    ("mimo_v2", "last-padding-seen", "bf16", "tensors"),  # a mask that hides something else, where gradients are rough
    ("xlstm", "labels-smoothed", "bf16", "summary"),  # the gradient of a loss, which no attention made
    ("speecht5", "frames-not-shifted", "bf16", "isolated"),  # labels that are left out by their number
    ("fastspeech2", "energy-of-pitch", "float32", "isolated"),  # flags of padding that are no mask of keys
    ("gemma4", "shared-keys-detached", "float32", "tensors"),  # keys that a layer takes from a collection
    ("mllama", "intermediate-of-last", "float32", "isolated"),  # another of several states
    ("mllama", "tiles-not-embedded", "bf16", "summary"),  # a module that is left out, and adds little
]


@pytest.mark.parametrize(("family", "name", "setting", "way"), FOUND)
def test_a_mistake_is_named_exactly(bench: Bench, family: str, name: str, setting: str, way: str) -> None:
    (mistake,) = [each for each in MISTAKES if (each.family, each.name) == (family, name)]
    outcome = bench.judged(mistake, setting, way)
    assert outcome.outcome == "exact", str(outcome)


@pytest.mark.parametrize("way", ["summary", "isolated"])
@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_random_edits_of_a_models_code_are_named(bench: Bench, family: str, way: str) -> None:
    drawn = mutations(family, 3, seed=0)
    assert len(drawn) == 3 and len({mistake.name for mistake in drawn}) == 3
    outcomes = [bench.judged(mistake, "float32", way) for mistake in drawn]
    assert not (said := failures(outcomes, "exact")), said


def test_a_router_that_sorts_tokens_is_named(bench: Bench) -> None:
    tried = [mistake for mistake in MISTAKES if (mistake.family, mistake.name) == ("jetmoe", "softmax-over-all")]
    outcomes = [bench.judged(mistake, "attention", "tensors") for mistake in tried]
    assert tried and not (said := failures(outcomes, "exact")), said


def test_right_runs_with_tokens_sorted_by_expert_do_not_alarm(bench: Bench) -> None:
    """A token whose experts are tied takes them in another order, which moves all tokens after it."""
    tried = [pair for pair in RIGHT if (pair.family, pair.setting) == ("jetmoe", "autocast")]
    outcomes = [pair.judged(bench, way) for pair in tried for way in ("tensors", "summary")]
    assert outcomes and "false alarm" not in {outcome.outcome for outcome in outcomes}, failures(outcomes, "right")


@pytest.mark.parametrize("way", ["tensors", "summary"])
def test_right_runs_with_hidden_tokens_sorted_by_expert_do_not_alarm(bench: Bench, way: str) -> None:
    """Each token has one expert, so that a sorted list is as long as all positions, and has them in another order."""
    (pair,) = [pair for pair in RIGHT if (pair.family, pair.name) == ("zaya", "attention, 2 steps")]
    assert (outcome := pair.judged(bench, way)).outcome == "right", str(outcome)


@pytest.mark.parametrize("way", ["tensors", "summary", "isolated"])
def test_right_runs_with_experts_in_a_batch_do_not_alarm(bench: Bench, way: str) -> None:
    """The activation inside gets the same tokens in another order."""
    (pair,) = [pair for pair in RIGHT if (pair.family, pair.setting) == ("nemotron_h", "batched experts")]
    assert (outcome := pair.judged(bench, way)).outcome == "right", str(outcome)


def test_a_block_that_is_called_twice_may_be_checkpointed(bench: Bench) -> None:
    (pair,) = [pair for pair in RIGHT if (pair.family, pair.setting) == ("perceiver", "checkpointed")]
    assert (outcome := pair.judged(bench, "summary")).outcome == "right", str(outcome)


def test_gradients_of_points_that_sample_rounded_values_do_not_alarm(bench: Bench) -> None:
    """Such a gradient is made from differences of neighbours, which rounding moves by much more."""
    (pair,) = [pair for pair in RIGHT if (pair.family, pair.setting) == ("deformable_detr", "autocast")]
    assert (outcome := pair.judged(bench, "isolated")).outcome == "cannot tell", str(outcome)


def test_right_runs_do_not_alarm(bench: Bench) -> None:
    tried = [pair for pair in RIGHT if pair.family in TRIED and pair.setting in CHEAP and pair.steps < 10]
    outcomes = [pair.judged(bench, "summary") for pair in tried]
    assert not (said := failures(outcomes, "right")), said


def test_right_runs_with_padding_before_the_text_do_not_alarm(bench: Bench) -> None:
    """Tokens that see nothing differ, choose other experts, and are gathered in other places."""
    tried = [pair for pair in RIGHT if (pair.family, pair.setting) == ("qwen3_moe", "attention")]
    outcomes = [pair.judged(bench, "tensors") for pair in tried]
    assert tried and not (said := failures(outcomes, "right")), said


# --- the zoo itself ---------------------------------------------------------------------------------------------------


def test_the_zoo_is_large_and_a_part_of_it_is_held_out() -> None:
    assert len({(mistake.family, mistake.name) for mistake in MISTAKES}) == len(MISTAKES) >= 150
    assert len({(pair.family, pair.name) for pair in RIGHT}) == len(RIGHT) >= 150
    assert sum(mistake.held_out for mistake in MISTAKES) >= 75


def test_places_exist_and_both_sides_start_alike_unless_the_mistake_is_in_the_state() -> None:
    for family in FAMILIES:
        if family in NEED_TORCHVISION:
            continue
        reference = training_of(family)
        for mistake in [mistake for mistake in MISTAKES if mistake.family == family]:
            candidate = training_of(family)
            names = {name for name, _ in reference.model.named_modules(remove_duplicate=False)}
            assert set(mistake.places) <= names, mistake.name
            random = torch.get_rng_state()
            mistake.apply(candidate)
            assert torch.equal(random, torch.get_rng_state()), mistake.name
            right = dict(reference.model.named_parameters()) | dict(reference.model.named_buffers())
            made = dict(candidate.model.named_parameters()) | dict(candidate.model.named_buffers())
            same = all(torch.equal(made[name], value) for name, value in right.items())
            assert same == (mistake.kind != "state"), mistake.name
