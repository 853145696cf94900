"""Rules that widen a tolerance, each with what it allows and what it does not: norms over a batch, running means,
optimizers, clipping, padding; and the cap on whatever no measured error backs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from made_runs import Array, Seen, values, write

import tensortap as tt
from tensortap.compare.judge.rules.margins import MOST_ASSUMED
from tensortap.compare.judge.unread import UNREAD_PADDING
from tensortap.core.records import Comparison

EPSILON = 2.0**-23


def compared(tmp_path: Path, ours: list[Seen], theirs: list[Seen]) -> Comparison:
    return tt.compare(write(tmp_path / "a", ours), write(tmp_path / "b", theirs))


def moved(array: Array, off: float, seed: int = 99) -> Array:
    """The array, off by a relative error in a random direction."""
    apart = values(seed, array.shape)
    away: Array = array + (apart * (off * np.linalg.norm(array) / np.linalg.norm(apart))).astype(array.dtype)
    return away


def scaled(array: Array, off: float) -> Array:
    """The array times 1 + off: rows are as far off as the whole."""
    return (array * np.float64(1 + off)).astype(array.dtype)


# --- norms over the batch ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cls", "epsilons", "verdict"),
    [
        ("BatchNorm2d", 40, "match"),
        ("GroupNorm", 40, "match"),
        ("BatchNorm2d", 100, "diverged"),
        ("LayerNorm", 40, "diverged"),
    ],
)
def test_a_norm_over_all_positions_may_round_four_times_as_much(
    tmp_path: Path, cls: str, epsilons: float, verdict: str
) -> None:
    def run(off: float) -> list[Seen]:
        out = moved(values(2, (64, 32)), off)
        return [Seen("norm", values(1, (64, 32)), "input", cls=cls), Seen("norm", out, cls=cls)]

    assert compared(tmp_path, run(0), run(epsilons * EPSILON)).verdict == verdict


@pytest.mark.parametrize(
    ("dtype", "epsilons", "verdict"),
    [
        (np.float32, 0.5, "match"),
        (np.float32, 64.0, "diverged"),
        (ml_dtypes.bfloat16, 0.5, "match"),
        (ml_dtypes.bfloat16, 64.0, "diverged"),
    ],
)
def test_a_running_mean_may_be_off_by_an_epsilon_of_what_it_averages(
    tmp_path: Path, dtype: Any, epsilons: float, verdict: str
) -> None:
    """The numbers are of size 1, and their mean is much smaller."""
    epsilon = EPSILON if dtype is np.float32 else 2.0**-7

    def run(away: float, dtype: Any) -> list[Seen]:
        mean = values(3, (16,)) * np.float32(1e-4 if dtype is np.float32 else 3e-2)
        mean += np.float32(away * epsilon) * np.sign(values(4, (16,)))
        return [
            Seen("bn", values(1, (64, 16)).astype(dtype), "input", cls="BatchNorm1d"),
            Seen("bn", values(2, (64, 16)).astype(dtype), cls="BatchNorm1d"),
            Seen("bn", mean, "buffer", path="running_mean", call=1, cls="BatchNorm1d"),
        ]

    assert compared(tmp_path, run(0, dtype), run(epsilons, dtype)).verdict == verdict


# --- activations ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("off", "parameters", "verdict"), [(5e-5, False, "match"), (5e-4, False, "diverged"), (5e-5, True, "diverged")]
)
def test_what_an_activation_leaves_may_be_off_by_what_it_got(
    tmp_path: Path, off: float, parameters: bool, verdict: str
) -> None:
    """Of numbers around -3, it leaves few: an error of 1e-6 against them all is one of 5e-5 against those."""

    def run(away: float) -> list[Seen]:
        given = values(1, (64, 64)) - np.float32(3)
        left = np.maximum(given, 0)
        assert 30 < np.linalg.norm(given) / np.linalg.norm(left) < 300
        seen = [
            Seen("fc", values(2, (64, 64)), "input"),
            Seen("fc", moved(given, away / 50), tensor=7),
            Seen("act", moved(given, away / 50), "input", cls="ReLU", tensor=7),
            Seen("act", moved(left, away, seed=5), cls="ReLU"),
        ]
        return seen + [Seen("act", values(3, (64,)), "param", path="weight", cls="PReLU")] * parameters

    ours, theirs = run(0), run(off)
    theirs[1:3] = run(5e-5)[1:3]
    result = compared(tmp_path, ours, theirs)
    assert result.verdict == verdict, result.sentence


# --- optimizers and clipping ------------------------------------------------------------------------------------------
def trained(gradient_off: float, parameter_off: float, keep: bool = True) -> list[Seen]:
    """A weight that moves by 1e-2 of its size: its gradient, and where it is after the step."""
    weight = values(1, (32, 32))
    after = scaled(weight, 0) + np.float32(1e-2) * np.sign(values(3, (32, 32)))
    return [
        Seen("fc", weight, "param", path="weight", keep=keep),
        Seen("fc", values(4, (64, 32)), "input", keep=keep),
        Seen("fc", values(5, (64, 32)), keep=keep),
        Seen("fc", moved(values(3, (32, 32)), gradient_off), "param_grad", path="weight", keep=keep),
        Seen("fc", moved(after, parameter_off, 7), "param", path="weight", call=1, keep=keep),
    ]


@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
@pytest.mark.parametrize(
    ("gradient_off", "parameter_off", "verdict"),
    [
        (1e-6, 1e-5, "match"),  # a thousandth of the step
        (1e-6, 1e-2, "diverged"),  # a whole step
        (0.0, 5e-5, "diverged"),  # equal gradients have no noise to magnify
    ],
)
def test_an_optimizer_magnifies_noise_of_gradients_and_nothing_else(
    tmp_path: Path, gradient_off: float, parameter_off: float, verdict: str, keep: bool
) -> None:
    result = compared(tmp_path, trained(0, 0, keep), trained(gradient_off, parameter_off, keep))
    assert result.verdict == verdict, result.sentence
    if verdict == "diverged":
        assert result.first is not None and result.first.key.kind == "param"


@pytest.mark.parametrize(
    ("elements", "steps", "verdict"),
    [
        (1, 1.5, "match"),  # a gradient that is nearly zero, whose sign noise decides
        (1, 4.0, "diverged"),  # no optimizer moves an element by so much
        (1024, 0.05, "diverged"),  # all elements
    ],
)
def test_few_elements_may_take_another_step_as_far_as_a_summary_shows(
    tmp_path: Path, elements: int, steps: float, verdict: str
) -> None:
    ours, theirs = trained(0, 0, keep=False), trained(1e-7, 0, keep=False)
    after = theirs[-1].array.copy()
    after.reshape(-1)[:elements] += np.float32(1e-2 * steps)
    theirs[-1] = replace(theirs[-1], array=after)
    result = compared(tmp_path, ours, theirs)
    assert result.verdict == verdict, result.sentence


@pytest.mark.parametrize(("steps", "verdict"), [(0.01, "match"), (0.3, "diverged")])
def test_a_part_of_a_weight_without_a_gradient_moves_by_noise(tmp_path: Path, steps: float, verdict: str) -> None:
    """No token chose one of four experts: the gradient of its scores is rounding, less than an optimizer's epsilon."""

    def run(candidate: bool) -> list[Seen]:
        weight, gradient = values(1, (4, 64)), values(2, (4, 64))
        after = weight - np.float32(1e-2) * np.sign(gradient)
        gradient[3] = values(3 + candidate, (64,)) * np.float32(1e-9)
        after[3] = weight[3] - np.float32(1e-2 * steps) * np.sign(gradient[3])
        if candidate:
            gradient = moved(gradient, 3e-7)
        return [
            Seen("gate", weight, "param", path="weight", keep=False),
            Seen("gate", values(6, (32, 64)), "input", keep=False),
            Seen("gate", values(7, (32, 4)), keep=False),
            Seen("gate", gradient, "param_grad", path="weight", keep=False),
            Seen("gate", after, "param", path="weight", call=1, keep=False),
        ]

    result = compared(tmp_path, run(False), run(True))
    assert result.verdict == verdict, result.sentence


def clipped(noise: float, off: float) -> list[Seen]:
    """Two gradients, of which one is off by rounding, and what clipping by the norm of both made of the other."""
    one, other = values(1, (32, 32)), values(2, (32, 32))
    return [
        Seen("noisy", moved(one, noise), "param_grad", path="weight"),
        Seen("equal", other, "param_grad", path="weight"),
        Seen("equal", scaled(other, off) * np.float32(0.5), "step_grad", path="weight"),
    ]


@pytest.mark.parametrize(
    ("noise", "off", "verdict"), [(7e-6, 6e-6, "match"), (7e-6, 1e-3, "diverged"), (0, 6e-6, "diverged")]
)
def test_a_clipped_gradient_may_be_off_by_the_error_of_the_norm(
    tmp_path: Path, noise: float, off: float, verdict: str
) -> None:
    """The gradient itself is equal on both sides; only the norm of all gradients is not."""
    assert compared(tmp_path, clipped(0, 0), clipped(noise, off)).verdict == verdict


def clipped_together(clips_to: float, of_big: float) -> list[Seen]:
    """A large gradient and a small one, clipped by the norm of both."""
    big, small = scaled(values(20, (32, 32)) * np.float32(4), of_big), values(21, (32, 32))
    norm = np.hypot(np.linalg.norm(big), np.linalg.norm(small))
    return [
        Seen("big", big, "param_grad", path="weight"),
        Seen("small", small, "param_grad", path="weight"),
        Seen("small", (small * np.float32(clips_to / norm)), "step_grad", path="weight"),
    ]


@pytest.mark.parametrize(("clips_to", "status"), [(1.0, "close"), (0.8, "diverged")])
def test_clipping_to_the_same_norm_is_right_however_far_another_gradient_is_off(
    tmp_path: Path, clips_to: float, status: str
) -> None:
    result = compared(tmp_path, clipped_together(1.0, 0.0), clipped_together(clips_to, 0.8))
    row = next(row for row in result.rows if row["kind"] == "step_grad")
    assert row["rel_l2"] > MOST_ASSUMED
    assert row["status"] == status, result.sentence


@pytest.mark.parametrize(("step", "verdict"), [(0, "diverged"), (1, "match")])
def test_a_running_mean_of_unseen_values_may_be_off_as_parameters_are(tmp_path: Path, step: int, verdict: str) -> None:
    """As in a compiled model. An optimizer's step moves a bias before a norm at random: only the mean shows it."""

    def run(candidate: bool) -> list[Seen]:
        seen = []
        for at in (0, 1):
            bias = values(1, (16,))
            if at:
                bias = bias + np.float32(1e-3) * np.sign(values(2 + candidate, (16,)))
            mean = moved(values(4, (16,)), 1e-4 if candidate and at == step else 0)
            noise = values(5 + candidate, (16,)) * np.float32(1e-9)
            seen += [
                Seen("fc", bias, "param", at, "bias"),
                Seen("fc", values(7, (64, 16)), "grad_output", at),
                Seen("fc", noise, "param_grad", at, "bias"),
                Seen("fc", bias + np.float32(1e-3) * np.sign(noise), "param", at, "bias", call=1),
                Seen("bn", mean, "buffer", at, "running_mean", call=1, cls="BatchNorm1d"),
            ]
        return seen

    result = compared(tmp_path, run(False), run(True))
    assert result.verdict == verdict, result.sentence


# --- the cap ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("off", "status"), [(0.2, "close"), (0.4, "diverged")])
def test_nothing_assumed_allows_more_than_a_quarter(tmp_path: Path, off: float, status: str) -> None:
    """Each partial sum of 4,096 short numbers may be rounded: by that, the sum might be off by all of its size."""

    def run(away: float) -> list[Seen]:
        given = values(1, (4096, 8)).astype(ml_dtypes.bfloat16)
        bias = given.astype(np.float32).sum(0)
        return [Seen("fc", given, "grad_output"), Seen("fc", moved(bias, away), "param_grad", path="bias")]

    result = compared(tmp_path, run(0), run(off))
    row = next(row for row in result.rows if row["path"] == "bias")
    assert row["tolerance"] <= MOST_ASSUMED
    assert row["status"] in (("close", "unjudged") if status == "close" else (status,)), result.sentence


# --- padding ----------------------------------------------------------------------------------------------------------
def padded(
    off_step: int | None = None, gradients_off: float = 0.0, hides: bool = True, boolean: bool = False
) -> list[Seen]:
    """Two steps over a batch whose last position is padding; in one, what is made of it differs. `boolean`: the
    convention of another mask, that of an attention beside."""
    mask = np.ones((4, 6), np.int64)
    mask[:, -1] = not hides
    seen = []
    for step in (0, 1):
        out = values(2, (4, 6, 8)).copy()
        if step == off_step:
            out[:, -1] += 1
        causal = np.tril(np.ones((6, 6), bool))
        inner = causal if boolean else np.where(causal, 0, np.finfo(np.float32).min).astype(np.float32)
        seen += [
            Seen("", mask, "input", step, "attention_mask", cls="Model", tensor=1000 * step),
            Seen("attention", inner, "input", step, "attention_mask", cls="Attention"),
            Seen("norm", values(1, (4, 6, 8)), "input", step, cls="RMSNorm"),
            Seen("norm", out, "output", step, cls="RMSNorm"),
        ]
        seen += [
            Seen(f"fc{n}", moved(values(10 + n, (8, 8)), gradients_off * step), "param_grad", step, "weight")
            for n in range(8)
        ]
    return seen


@pytest.mark.parametrize("boolean", [False, True], ids=["same masks", "another convention elsewhere"])
def test_what_differs_at_padding_after_a_step_is_not_judged_if_no_gradient_depends_on_it(
    tmp_path: Path, boolean: bool
) -> None:
    result = compared(tmp_path, padded(), padded(off_step=1, boolean=boolean))
    assert result.verdict == "match", result.sentence
    assert "could not be judged" in result.sentence
    assert any(UNREAD_PADDING in note for note in result.notes)


@pytest.mark.parametrize(
    "candidate",
    [
        {"off_step": 0},  # nothing has moved the embedding of padding yet
        {"off_step": 1, "gradients_off": 0.05},  # the loss reads it
        {"off_step": 1, "hides": False},  # there is no padding
    ],
    ids=["at the start", "gradients differ", "nothing hidden"],
)
def test_it_is_judged_otherwise(tmp_path: Path, candidate: dict[str, float]) -> None:
    hides = bool(candidate.get("hides", True))
    result = compared(tmp_path, padded(hides=hides), padded(**candidate))  # type: ignore[arg-type]
    assert result.first is not None and result.first.key.module == "norm", result.sentence


def attending(boolean: bool, gradients_off: float, dtype: Any) -> list[Seen]:
    """An attention that makes something else of one position, which its mask hides from everything."""
    causal = np.tril(np.ones((6, 6), bool), -1)  # the first position sees nothing
    inner = causal if boolean else np.where(causal, 0, np.finfo(np.float32).min).astype(np.float32)
    mask = np.ones((4, 6), np.int64)
    mask[:, 0] = 0
    out = values(2, (4, 6, 8)).astype(dtype)
    if boolean:
        out[:, 0] = 0
    seen = [
        Seen("", mask, "input", path="attention_mask", cls="Model", tensor=1000),
        Seen("attention", values(1, (4, 6, 8)).astype(dtype), "input", cls="Attention"),
        Seen("attention", inner, "input", path="attention_mask", cls="Attention"),
        Seen("attention", out, cls="Attention"),
        Seen("attention", moved(values(3, (4, 6, 8)), gradients_off).astype(dtype), "grad_output", cls="Attention"),
    ]
    return seen + [
        Seen("attention", moved(values(10 + n, (8, 8)), gradients_off), "param_grad", path=f"weight{n}")
        for n in range(8)
    ]


@pytest.mark.parametrize(
    ("dtype", "gradients_off", "verdict"),
    [
        (np.float32, 1e-6, "match"),
        (np.float32, 0.06, "diverged"),
        (ml_dtypes.bfloat16, 0.02, "match"),
        (ml_dtypes.bfloat16, 0.06, "incomparable"),  # rounding, or the loss reads it
        (ml_dtypes.bfloat16, 0.5, "diverged"),
    ],
)
def test_what_differs_beside_a_mask_in_another_convention(
    tmp_path: Path, dtype: Any, gradients_off: float, verdict: str
) -> None:
    result = compared(tmp_path, attending(False, 0, dtype), attending(True, gradients_off, dtype))
    assert result.verdict == verdict, result.sentence


def test_a_wrong_buffer_before_the_first_step_is_not_excused(tmp_path: Path) -> None:
    """Buffers are no parameters: a table that is wrong from the start is a mistake."""

    def run(off: float) -> list[Seen]:
        return [
            Seen("fc", values(1, (16, 16)), "param", path="weight"),
            Seen("rotary", moved(values(2, (64, 16)), off), "buffer", path="cos", cls="Rotary"),
            Seen("rotary", moved(values(2, (64, 16)), off), "output", cls="Rotary"),
        ]

    result = compared(tmp_path, run(0), run(0.1))
    assert result.first is not None and result.first.key.kind == "buffer", result.sentence


@pytest.mark.parametrize(("off", "verdict"), [(1e-5, "match"), (4e-3, "match"), (1e-2, "diverged")])
def test_a_matrix_whose_gradient_is_a_product_with_short_numbers(tmp_path: Path, off: float, verdict: str) -> None:
    """Under autocast, a Linear after a norm gets float32 and a gradient in bfloat16, and both sides keep float32. It
    casts its input to bfloat16, so that its own gradient is a bfloat16 number, too."""

    def seen(factor: float) -> list[Seen]:
        weight = values(4, (64, 32)).T @ values(1, (64, 16))
        weight[0] *= np.float32(factor)
        return [
            Seen("fc", values(1, (64, 16)), "input"),
            Seen("fc", values(2, (64, 32)).astype(ml_dtypes.bfloat16), "output"),
            Seen("fc", values(4, (64, 32)).astype(ml_dtypes.bfloat16), "grad_output"),
            Seen("fc", weight, "param_grad", path="weight"),
        ]

    result = tt.compare(write(tmp_path / "a", seen(1.0)), write(tmp_path / "b", seen(1 + off * 32**0.5)))
    assert result.verdict == verdict, result.sentence
