"""Amounts of the tolerance rules in columns: for many pairs of one kind at once, as `JudgedPair` has them for one.

A rule of `RULES` that has a function here allows the same to the last bit either way. The judge uses it only for pairs
whose sources are all right, so how sources were judged is not asked. Roots and sums are Python's own, because those of
NumPy may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Ints
from tensortap.compare.judge.pairs import Floats
from tensortap.compare.judge.row_lists import largest
from tensortap.compare.judge.rules.evidence import Evidence, JudgedPair
from tensortap.compare.judge.rules.margins import (
    CANCELLED,
    CANCELS,
    ENLARGED,
    MOST_ASSUMED,
    MOST_CANCELLED,
    NEGLIGIBLE,
    ROUNDED_APART,
    SHARE_ROUNDED_APART,
    SHORT,
    SYSTEMATIC,
)
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.steps.facts import BY_CONTAINER, HAS_PARAMETERS, HAS_STATE
from tensortap.core.records import GRADIENT_KINDS

__all__ = ["Bools", "PairColumns", "root"]

Bools = npt.NDArray[np.bool_]


@dataclass
class PairColumns:
    """Pairs of one kind, in execution order. None of their numbers, nor of those of their sources, is NaN."""

    evidence: Evidence
    kind: str
    rows: Ints
    sources: Ints
    """The sources of all pairs, one pair after the other."""
    counts: Ints
    """Number of sources of each pair."""
    flags: npt.NDArray[np.uint8]
    """The flags of each pair, as `steps.facts` sets them."""
    judged: int
    """All pairs before this one are judged; those from there on count as right."""

    @cached_property
    def base(self) -> Floats:
        return self.evidence.pairs.base[self.rows]

    @cached_property
    def l2(self) -> Floats:
        return self.evidence.pairs.l2[self.rows]

    @cached_property
    def incoming(self) -> Floats:
        """The worst error among the sources, which are all right, as far as it is known."""
        return self.worst(self.propagated)

    @cached_property
    def propagated(self) -> Floats:
        """The error that each source propagates, 0 if it is not known."""
        return np.nan_to_num(np.frombuffer(self.evidence.propagated)[self.sources], nan=0.0, posinf=np.inf)

    @cached_property
    def is_vector(self) -> Bools:
        return np.asarray(self.evidence.pairs.dimensions[self.rows] <= 1)

    def has(self, flag: int) -> Bools:
        return np.asarray((self.flags & flag) != 0)

    def are_of(self, *kinds: str) -> Bools:
        """Return which of the sources are of one of these kinds."""
        codes, words = self.evidence.structure.kind_codes, self.evidence.structure.kind_words
        found: Bools = np.array([word in kinds for word in words], bool)[codes[self.sources]]
        return found

    def worst(self, values: Floats) -> Floats:
        """Return for each pair the largest of its sources' values, which are not negative; 0 without sources."""
        return largest(values, self.counts)

    def worst_of(self, values: Floats, *kinds: str) -> Floats:
        """Return for each pair the largest of its sources' values, of those that are of some kinds."""
        return self.worst(np.where(self.are_of(*kinds), values, 0.0))

    @cached_property
    def summed(self) -> tuple[Ints, Ints]:
        """The gradients at outputs among the sources, and how many of them each pair has."""
        chosen = self.are_of("grad_output")
        owners = np.repeat(np.arange(len(self.rows)), self.counts)[chosen]
        return self.sources[chosen], np.bincount(owners, minlength=len(self.rows))

    @cached_property
    def summands(self) -> Floats:
        """How many numbers each element of a vector's gradient sums."""
        rows, counts = self.summed
        elements = self.evidence.pairs.elements
        ends = np.cumsum(counts)
        total = np.concatenate([[0], np.cumsum(elements[rows])])
        given = total[ends] - total[ends - counts]
        return np.asarray(given / np.maximum(1, elements[self.rows]))

    @cached_property
    def terms(self) -> Floats:
        """The norm of the numbers that a vector's gradient sums. Each pair must have gradients at outputs."""
        rows, counts = self.summed
        squares = [each**2 for each in self.evidence.pairs.l2[rows].tolist()]
        ends = np.cumsum(counts).tolist()
        begins = [0, *ends[:-1]]
        totals = [sum(squares[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        return np.asarray(np.sqrt(np.array(totals, np.float64)))

    @property
    def unrecorded_error(self) -> Floats:
        """The relative error of the gradients that a parameter's gradient sums, if they were not recorded; else 0."""
        return np.zeros(len(self.rows))

    @property
    def rounding_of_terms(self) -> Floats:
        """The absolute error that rounding may make in the sum of a vector's gradient."""
        columns = self.evidence.pairs
        errors = columns.error[self.sources]
        errors = np.where(errors < np.inf, errors, 0.0)
        longest = Policy.lengthening("param_grad") * self.worst_of(columns.base[self.sources], "grad_output")
        coarsest = np.maximum(self.base, longest)
        passed = Policy.passed_on(1.0) * self.worst_of(errors, "grad_output")
        return np.maximum(coarsest, passed) * self.terms

    @cached_property
    def cancels(self) -> Bools:
        if self.kind != "param_grad":
            return np.zeros(len(self.rows), bool)
        return self.is_vector & (CANCELS * self.l2 < self.terms)

    def assumed(self, amount: Floats) -> Floats:
        """Limit what a rule allows that no measured error backs."""
        return np.where(self.cancels, amount, np.minimum(amount, MOST_ASSUMED))


def root(values: Floats) -> Floats:
    return np.array([value**0.5 for value in values.tolist()], float)


def measured_noise(pairs: PairColumns) -> Floats:
    noise = pairs.evidence.policy.noise
    return np.zeros(len(pairs.rows)) if noise is None else np.asarray(noise)[pairs.rows].astype(np.float64)


def rounding_of_sources(pairs: PairColumns) -> Floats:
    return np.where(pairs.has(BY_CONTAINER), pairs.evidence.mixed_rounding, 0.0)


def few_rounded_apart(pairs: PairColumns) -> Floats:
    elements = np.maximum(np.asarray(pairs.evidence.pairs.elements)[pairs.rows], 1)
    share = np.minimum(1.0, np.maximum(ROUNDED_APART / elements, SHARE_ROUNDED_APART))
    allowed = pairs.evidence.short_rounding / 2 * root(share)
    return np.where(pairs.has(BY_CONTAINER) & (pairs.base < SHORT), allowed, 0.0)


def rounding_of_statistics(pairs: PairColumns) -> Floats:
    structure = pairs.evidence.structure
    codes, words = structure.class_codes(pairs.rows)
    with_statistics = np.array([pairs.evidence.has_statistics(word) for word in words], bool)[codes]
    return np.where(with_statistics & (pairs.base < SHORT), Policy.lengthening("param_grad") * pairs.base, 0.0)


def came_in(pairs: PairColumns) -> Floats:
    return Policy.passed_on(1.0) * pairs.incoming


def absolute_error(pairs: PairColumns) -> Floats:
    given = "input" if pairs.kind == "output" else "grad_output"
    distance = pairs.worst_of(pairs.evidence.pairs.distance[pairs.sources], given)
    excluded = pairs.has(HAS_PARAMETERS | BY_CONTAINER) | ~(pairs.l2 > 0) | ~(distance < np.inf)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(excluded, 0.0, np.minimum(MOST_ASSUMED, ENLARGED * distance / pairs.l2))


def error_of_activations(pairs: PairColumns) -> Floats:
    return pairs.evidence.pairs.unseen_kinks * root(pairs.worst_of(pairs.propagated, "input", "output"))


def rounding_of_activations(pairs: PairColumns) -> Floats:
    return pairs.worst_of(pairs.evidence.pairs.base[pairs.sources], "input", "output", "grad_output") / 8


def error_of_unrecorded_gradients(pairs: PairColumns) -> Floats:
    return pairs.assumed(pairs.unrecorded_error)


def no_error(pairs: PairColumns) -> Floats:
    """The amount of a rule that allows nothing if float inputs are known."""
    return np.zeros(len(pairs.rows))


def rounding_of_cancelled_gradient(pairs: PairColumns) -> Floats:
    known, l2 = pairs.evidence.pairs, pairs.l2
    sizes = np.where(known.elements[pairs.sources] > 1, known.l2[pairs.sources], 0.0)
    given = pairs.worst_of(sizes, *GRADIENT_KINDS)
    smaller = (CANCELLED * l2 > 0) & (CANCELLED * l2 < given)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        times = np.where(smaller, CANCELLED * given / l2, 0.0)
    if not pairs.evidence.policy.mapped:
        times = np.where(l2 < NEGLIGIBLE * given, times, np.minimum(times, MOST_CANCELLED))
    return times * pairs.base


def systematic_error(pairs: PairColumns) -> Floats:
    meant = pairs.is_vector & (pairs.l2 > 0) & ~pairs.evidence.structure.are_at_start(pairs.rows)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        amount = SYSTEMATIC * pairs.incoming * root(pairs.summands) * pairs.terms / pairs.l2
    return np.where(meant, pairs.assumed(amount), 0.0)


def rounding_of_sum(pairs: PairColumns) -> Floats:
    columns, rounding = pairs.evidence.pairs, pairs.rounding_of_terms
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = pairs.assumed(rounding / pairs.l2)
    of_zero = np.where((pairs.l2 == 0) & (columns.distance[pairs.rows] <= rounding), np.inf, 0.0)
    return np.where(pairs.is_vector, np.where(pairs.l2 > 0, share, of_zero), 0.0)


def of_pairs_without_sources(amount: Callable[[JudgedPair], float]) -> Callable[[PairColumns], Floats]:
    """Return the amounts of a rule that applies to few pairs, asked one by one: to those without any source."""

    def amounts(pairs: PairColumns) -> Floats:
        found = np.zeros(len(pairs.rows))
        for place in np.flatnonzero(pairs.counts == 0).tolist():
            found[place] = amount(JudgedPair(pairs.evidence, int(pairs.rows[place]), (), 0.0))
        return found

    return amounts


def noise_of_unrecorded_parameters(pairs: PairColumns) -> Floats:
    found = np.zeros(len(pairs.rows))
    meant = np.flatnonzero(~pairs.has(HAS_STATE))
    found[meant] = pairs.evidence.noise_before_steps(*pairs.evidence.structure.modules_and_steps(pairs.rows[meant]))
    return found
