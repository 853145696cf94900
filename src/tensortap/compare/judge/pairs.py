"""The numbers of all pairs that judging needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tensortap.compare.measure.choices import ChoiceSource
from tensortap.compare.measure.kinks import CrossedKink
from tensortap.compare.measure.masks import MaskDifference

__all__ = ["Floats", "IsolatedPairs", "Pairs"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class IsolatedPairs:
    """Further columns over pairs whose modules ran on the reference's own inputs."""

    forced: npt.NDArray[np.bool_]
    """Where the reference's values replaced the candidate's, so that no error propagated."""
    cast: npt.NDArray[np.bool_]
    """Where these values were cast from another dtype, so that they are rounded."""
    tied: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By module: other modules whose parameters it uses as well."""


@dataclass(frozen=True)
class Pairs:
    """Columns over all pairs, in execution order."""

    error: Floats
    """The relative L2 error, or the worst row's over `row_gain` if that is more; 0 where equal, NaN where unknown."""
    row_gain: Floats
    """Factor by which one row may exceed the tolerance."""
    l2: Floats
    """The reference's norm."""
    std: Floats
    """The reference's standard deviation."""
    distance: Floats
    """|candidate - reference|; NaN where unknown."""
    elements: npt.NDArray[np.int64]
    equal: npt.NDArray[np.bool_]
    nonfinite: npt.NDArray[np.bool_]
    """One side has NaN or Inf where the other has not."""
    reshaped: npt.NDArray[np.bool_]
    zeros: npt.NDArray[np.int64]
    """The reference's number of zeros."""
    dimensions: npt.NDArray[np.int8]
    base: Floats
    """The tolerance if all sources are right."""
    limits: Mapping[int, str] = field(default_factory=dict)
    """Pairs about which too little is known to call them right, and why. Their error is a lower bound, or NaN."""
    masks: Mapping[int, MaskDifference] = field(default_factory=dict)
    """Pairs that were compared by what they hide: they are right only if that is the same."""
    shown: Collection[int] = ()
    """Pairs that were measured without the positions that a mask hides."""
    in_other_order: Collection[int] = ()
    """The pairs of `shown` that may be lists of tokens in another order than positions have."""
    other_lengths: Collection[int] = ()
    """Reshaped pairs that differ in the length of their first axis alone, as the tokens of an expert do."""
    kink_of: Callable[[int], CrossedKink | None] = lambda pair: None
    """Returns how a pair differs without the elements that crossed a kink; None if that is not known."""
    selects_other_rows: Callable[[int, Iterable[int]], bool] = lambda pair, sources: False
    """Whether each side of a pair consists of rows of one of these pairs, and the two sides of other rows."""
    is_reordered: Callable[[int, float], bool] = lambda pair, allowed: False
    """Whether a pair has the same rows in another order, up to a relative error."""
    choices: ChoiceSource | None = None
    """Tells how choices of experts differ; None if ties of routers are not looked for."""
    step_noise_of: Callable[[int], float | None] = lambda pair: None
    """Returns the error of an optimizer's step that a pair of gradients explains; None if that is not known."""
    keeps_gradients: bool = False
    """Whether `step_noise_of` reads tensors."""
    l1: Floats = field(default_factory=lambda: np.empty(0))
    """The reference's sum of magnitudes."""
    mismatched: Floats = field(default_factory=lambda: np.empty(0))
    """Share of elements that differ by more than rounding; NaN if not all elements were measured."""
    most_apart_of: Callable[[int], float] = lambda pair: float("nan")
    """Returns the largest difference of two elements; NaN if not all elements were measured."""
    including_activation: Collection[str] = ()
    """Modules that include the activation after them on one side: gradients of their parameters may cross its kinks."""
    candidate_l2: Floats = field(default_factory=lambda: np.empty(0))
    """The candidate's norm."""
    mixed: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, bool))
    """Where the two sides have floats of two dtypes."""

    underflow: Floats = field(default_factory=lambda: np.empty(0))
    """The relative error if all elements are off by the least number of their dtype."""
    is_set_differently: Callable[[int], bool] = lambda pair: False
    """Whether the optimizers of the two sides are known to update a pair of parameters with other settings."""
    moved_within_step: Callable[[int], bool] = lambda pair: False
    """Whether the parameters of a pair's module changed between the micro steps of its step, before it was made."""
    is_orthogonalized: Callable[[int], bool] = lambda pair: False
    """Whether the optimizer makes the steps of a pair of parameters orthogonal, in bfloat16."""
    other_gelus: Collection[int] = ()
    """Outputs in short dtypes that one side computes by a GELU with erf and the other by one with tanh."""
    made_unseen: Mapping[int, str] = field(default_factory=dict)
    """Values, and their gradients, that a module makes which one side alone shows, and that module; see
    `unseen_makers`."""
    isolated: IsolatedPairs | None = None
    """None for a free run."""

    def as_equal(self, rows: Collection[int], limit: str) -> Pairs:
        """Return the pairs with these rows as if they were equal, but for what a limit says."""
        error = self.error.copy()
        error[list(rows)] = 0.0
        return replace(self, error=error, limits={**self.limits, **dict.fromkeys(rows, limit)})

    @property
    def unseen_kinks(self) -> float:
        """Times the root of an activation's error by which kinks may move a gradient, of all that it passed unseen."""
        return float(2.0 * (1 + len(self.including_activation)) ** 0.5)
