"""The tolerance rules, in order. A new rule is one entry of `RULES`.

The judge allows a pair the largest amount of all rules that apply; of equal amounts, the first rule's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.rules import amounts, columns, optimizer_amounts, optimizer_columns
from tensortap.compare.judge.rules.columns import PairColumns
from tensortap.compare.judge.rules.conditions import is_of
from tensortap.compare.judge.rules.evidence import JudgedPair
from tensortap.compare.judge.rules.margins import MOST_ASSUMED, SHORT
from tensortap.compare.judge.rules.names import (
    ACTIVATIONS,
    CAME_IN,
    CANCELLED_GRADIENT,
    UNSEEN_PARAMETERS,
)
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["RULES", "Rule"]


@dataclass(frozen=True)
class Rule:
    """A reason why a pair may differ."""

    name: str
    applies: Callable[[JudgedPair], bool]
    amount: Callable[[JudgedPair], float]
    """The relative error that it allows."""
    for_unrecorded: bool = False
    """Whether it allows for something that was not recorded, and by far more than if it were. A match that needs it is
    none: the records do not show whether the difference is noise or a mistake."""
    in_columns: Callable[[PairColumns], Floats] | None = None
    """The amount for many pairs at once, 0 where it does not apply. Without it, pairs are judged one by one."""


RULES: tuple[Rule, ...] = (
    Rule(
        "measured noise",
        lambda pair: pair.policy.noise is not None,
        amounts.measured_noise,
        in_columns=columns.measured_noise,
    ),
    Rule(
        "rounding of what it was made from",
        lambda pair: True,
        amounts.rounding_of_sources,
        in_columns=columns.rounding_of_sources,
    ),
    Rule(
        "elements that are rounded to the other side inside",
        lambda pair: pair.is_made_by_container and pair.base < SHORT,
        amounts.few_rounded_apart,
        in_columns=columns.few_rounded_apart,
    ),
    Rule(
        "rounding of statistics over all positions",
        is_of("output", "grad_input", further=lambda pair: pair.has_statistics and pair.base < SHORT),
        lambda pair: pair.policy.lengthening("param_grad") * pair.base,
        in_columns=columns.rounding_of_statistics,
    ),
    Rule("rounding of the numbers that it averages", is_of("buffer"), amounts.rounding_of_mean),
    Rule("error of the numbers that it averages", is_of("buffer"), amounts.error_of_averaged),
    Rule(
        "error of parameters before a value that was not recorded",
        is_of("buffer", further=lambda pair: not pair.sources_of("input")),
        lambda pair: min(MOST_ASSUMED, pair.policy.passed_on(pair.evidence.error_of_parameters(pair.row))),
    ),
    Rule(
        CAME_IN,
        lambda pair: True,
        lambda pair: pair.policy.passed_on(pair.incoming),
        in_columns=columns.came_in,
    ),
    Rule(
        "error that came in, against what is left",
        is_of("output", "grad_input"),
        amounts.absolute_error,
        in_columns=columns.absolute_error,
    ),
    Rule(ACTIVATIONS, is_of(*GRADIENT_KINDS), amounts.error_of_activations, in_columns=columns.error_of_activations),
    Rule(
        "rounding of the dtype of activations and gradients",
        is_of("param_grad"),
        amounts.rounding_of_activations,
        in_columns=columns.rounding_of_activations,
    ),
    Rule(
        "error of gradients that were not recorded",
        is_of("param_grad"),
        lambda pair: amounts.assumed(pair, pair.evidence.summed.unrecorded_error(pair.row, pair.sources)),
        in_columns=columns.error_of_unrecorded_gradients,
    ),
    Rule(
        CANCELLED_GRADIENT,
        is_of("grad_output", "grad_input"),
        amounts.rounding_of_cancelled_gradient,
        in_columns=columns.rounding_of_cancelled_gradient,
    ),
    Rule(
        "error that came in, alike at all positions that it sums",
        is_of(
            "param_grad",
            further=lambda pair: pair.is_vector and not pair.evidence.structure.is_at_start(pair.row),
        ),
        amounts.systematic_error,
        in_columns=columns.systematic_error,
    ),
    Rule(
        "rounding of what it sums",
        is_of("param_grad", further=lambda pair: pair.is_vector),
        amounts.rounding_of_sum,
        in_columns=columns.rounding_of_sum,
    ),
    Rule(
        "rounding of what it sums over the micro batches of a step",
        is_of("step_grad", further=lambda pair: pair.is_of_other_split),
        amounts.rounding_of_sum_over_step,
        in_columns=columns.of_pairs_without_sources(amounts.rounding_of_sum_over_step),
    ),
    Rule(
        "error of the norm by which gradients are clipped",
        is_of("step_grad"),
        lambda pair: min(MOST_ASSUMED, 2 * pair.evidence.optimizer.error_of_norm(pair.row)),
        in_columns=optimizer_columns.error_of_norm,
    ),
    Rule(
        "both sides clip all gradients to the same norm",
        is_of("step_grad"),
        lambda pair: 2 * (pair.evidence.optimizer.error_of_clipping(pair.row) or 0.0),
        in_columns=optimizer_columns.error_of_clipping,
    ),
    Rule(
        "its gradient's noise, as an optimizer magnifies it",
        is_of("param"),
        optimizer_amounts.magnified_noise,
        in_columns=optimizer_columns.magnified_noise,
    ),
    Rule(
        "error of parameters that it is tied to",
        is_of("output"),
        lambda pair: min(
            MOST_ASSUMED, pair.policy.passed_on(pair.evidence.error_of_tied_parameters(pair.row, pair.sources))
        ),
        in_columns=columns.no_error,
    ),
    Rule(
        UNSEEN_PARAMETERS,
        is_of("output", "input"),
        lambda pair: pair.evidence.noise_of_unrecorded_parameters(pair.row),
        for_unrecorded=True,
        in_columns=columns.noise_of_unrecorded_parameters,
    ),
)
