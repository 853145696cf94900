"""The evidence behind a tolerance: a pair's numbers, its sources, and how the pairs before it were judged."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.side import Ints
from tensortap.compare.judge.pairs import Floats, Pairs
from tensortap.compare.judge.rules.margins import CANCELS, SHORT
from tensortap.compare.judge.rules.optimizer_gradients import OptimizerGradients
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.rules.summed_gradients import SummedGradients
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure

__all__ = ["Evidence", "JudgedPair"]


_WITH_STATISTICS = re.compile("(Batch|Group|Instance)Norm")
_NO_STEPS: tuple[list[int], list[float]] = [], []


class Evidence:
    """All pairs, and what the judge knows about them so far. Columns are arrays of Python's own: rules read single
    elements."""

    def __init__(
        self, pairs: Pairs, structure: Structure, policy: Policy, reference_moved: Callable[[Ints, Ints], Floats]
    ) -> None:
        self.pairs = pairs
        self.structure = structure
        self.policy = policy
        self.reference_moved = reference_moved
        """How far apart records of the reference are, relative to the first ones; a function of two columns of rows."""
        isolated = pairs.isolated
        self.error = _view(pairs.error)
        self.forced = bytes(len(self.error)) if isolated is None else isolated.forced.tobytes()
        self.propagated = _numbers(pairs.error if isolated is None else np.where(isolated.forced, 0.0, pairs.error))
        """The error that records computed from a row inherit. `discount` alone changes it."""
        self.discounted: set[int] = set()
        """Rows that were discounted."""
        self.l2 = _view(pairs.l2)
        self.distance = _view(pairs.distance)
        self.base = _view(pairs.base)
        self.is_vector = np.less_equal(pairs.dimensions, 1).tobytes()
        self._with_statistics: dict[str, bool] = {}
        self._parameter_errors: dict[tuple[int, int], float] = {}
        self.wrong = bytearray(len(self.error))
        """Set by the judge."""
        self.optimizer = OptimizerGradients(self)
        self.summed = SummedGradients(structure, self.l2, pairs.std, self.base, pairs.elements, pairs.dimensions)

    def is_known(self, row: int) -> bool:
        return self.error[row] == self.error[row]

    def discount(self, row: int) -> None:
        """Let records that were computed from a row inherit no error: how far off it is says nothing about them."""
        self.propagated[row] = 0.0
        self.discounted.add(row)

    def has_statistics(self, cls: str) -> bool:
        """Whether modules of a class compute a mean and a variance over many positions."""
        if cls not in self._with_statistics:
            self._with_statistics[cls] = _WITH_STATISTICS.search(cls) is not None
        return self._with_statistics[cls]

    def step_size(self, row: int) -> float:
        """Return how far a parameter of the reference moved since it was last recorded, relative to its size."""
        structure = self.structure
        rank, step, _ = structure.scope[row]
        module, path = structure.module[row], structure.path[row]
        before = structure.before_step((rank, step, module, "param", path)) if structure.number[row] else None
        if before is None:
            before = structure.state.get((rank, step - 1, module, "param", path, 1))
        return 1.0 if before is None else float(self.reference_moved(np.array([before]), np.array([row]))[0])

    def noise_of_unrecorded_parameters(self, row: int) -> float:
        """Return the error that gradient noise of earlier steps may have caused in unrecorded parameters."""
        rank, step, _ = self.structure.scope[row]
        module = self.structure.module[row]
        if (rank, step, module) in self.structure.parameters_of or not step:
            return 0.0
        return self.noise_before(module, step)

    def noise_before_steps(self, modules: Ints, steps: Ints) -> Floats:
        """Return `noise_before` in columns, by codes of modules; 0 for the first step of all."""
        known, noise, width = self._noise_by_place
        frozen = np.array([word in self.structure.frozen for word in self.structure.module_words], bool)
        of = np.where(frozen[modules], -1, modules) + 1  # 0: all modules
        place = np.searchsorted(known, of * width + np.minimum(steps, width - 1)) - 1
        found = np.zeros(len(of))
        if len(known):
            is_known = (place >= 0) & (known[place] // width == of) & (steps != 0)
            found[is_known] = noise[place[is_known]]
        return found

    @cached_property
    def _noise_by_place(self) -> tuple[Ints, Floats, int]:
        """The worst gradient noise up to each module and step that has gradients: places as numbers, in order, the
        noise, and the factor of the module in a place."""
        codes = {word: code for code, word in enumerate(self.structure.module_words, 1)}
        width = 2 + max((steps[-1] for steps, _ in self._worst_gradients.values() if steps), default=0)
        places: list[Ints] = []
        noise: list[float] = []
        for code, word in sorted((0 if word is None else codes[word], word or "") for word in self._worst_gradients):
            steps, worst = self._worst_gradients[word if code else None]
            places.append(code * width + np.array(steps, np.int64))
            noise += [each**0.5 for each in worst]
        return np.concatenate(places) if places else np.empty(0, np.int64), np.array(noise, float), width

    def noise_before(self, module: str, step: int) -> float:
        """Return the error that gradient noise of the steps before one may have caused in a module's parameters."""
        known = None if module in self.structure.frozen else module  # a frozen one that moves averages others
        steps, worst = self._worst_gradients.get(known, _NO_STEPS)
        before = bisect_left(steps, step)
        return worst[before - 1] ** 0.5 if before else 0.0

    def error_of_tied_parameters(self, row: int, sources: Sequence[int]) -> float:
        """Return the worst error of all matrices before a step, for a module that must use one and has none: one that
        makes floats from integers, such as an embedding whose weight belongs to another module."""
        rank, step, _ = self.structure.scope[row]
        floats = any(self.base[source] for source in sources)
        if floats or not self.base[row] or (rank, step, self.structure.module[row]) in self.structure.parameters_of:
            return 0.0
        return self._worst_parameters.get((rank, step), 0.0)

    def error_of_parameters(self, row: int) -> float:
        """Return the worst error of all right parameters before the step that a buffer is updated in; 0 if it is one
        before the step."""
        structure = self.structure
        rank, step, _ = structure.scope[row]
        if not structure.number[row]:
            return 0.0
        if (rank, step) in self._parameter_errors:
            return self._parameter_errors[rank, step]
        tables = structure.parameters_of.items_in(rank, step)
        held = [each for (of, at, _), rows in tables if (of, at) == (rank, step) for each in rows]
        rows = [each for each in held if structure.kind[each] == "param" and not self.wrong[each]]
        errors = [self.error[each] for each in rows if self.is_known(each)]
        found = max((error for error in errors if error < float("inf")), default=0.0)
        if max(held, default=-1) < row:  # all of them are judged
            self._parameter_errors[rank, step] = found
        return found

    @cached_property
    def unknown(self) -> npt.NDArray[np.bool_] | None:
        """Pairs whose numbers are not known; None if those of all are."""
        found = np.isnan(self.pairs.l2) | np.isnan(self.pairs.distance)
        return found if found.any() else None

    @cached_property
    def mixed_rounding(self) -> float:
        """The rounding of the coarsest dtype that one side alone has anywhere; 0 if there is none."""
        return max((self.base[row] for row in self.pairs.mixed.nonzero()[0].tolist()), default=0.0)

    @cached_property
    def short_rounding(self) -> float:
        """The rounding of the coarsest dtype anywhere; 0 if that is not short."""
        coarsest = max(self.base, default=0.0)
        return coarsest if coarsest >= SHORT else 0.0

    @cached_property
    def _worst_parameters(self) -> dict[tuple[int, int], float]:
        """The worst error of right matrices before a step, by rank and step. Vectors are not looked up."""
        found: dict[tuple[int, int], float] = {}
        dimensions = self.pairs.dimensions
        for (rank, step, _), parameters in self.structure.parameters_of.items():
            rows = [row for row in parameters if self.base[row] and not self.wrong[row] and dimensions[row] > 1]
            errors = [self.error[row] for row in rows if self.is_known(row)]
            found[rank, step] = max(found.get((rank, step), 0.0), *(e for e in errors if e < float("inf")), 0.0)
        return found

    @cached_property
    def _worst_gradients(self) -> dict[str | None, tuple[list[int], list[float]]]:
        """By module, and for all modules under None: the steps with parameter gradients, and the worst error up to
        each, on any rank. An optimizer may use the mean over all ranks."""
        rows, modules, words, steps = self.structure.parameter_gradients
        errors = np.fmin(1.0, np.nan_to_num(np.asarray(self.pairs.error, np.float64)[rows], nan=0.0))
        found: dict[str | None, tuple[list[int], list[float]]] = {None: _worst_so_far(steps, errors)}
        order = np.argsort(modules, kind="stable")
        begins = np.flatnonzero(np.diff(modules[order], prepend=-1))
        for own in np.split(order, begins[1:]) if len(order) else ():
            found[words[int(modules[own[0]])]] = _worst_so_far(steps[own], errors[own])
        return found


def _worst_so_far(steps: Ints, errors: Floats) -> tuple[list[int], list[float]]:
    """Return the distinct steps, in order, and the worst error up to each."""
    order = np.argsort(steps, kind="stable")
    known, begins = np.unique(steps[order], return_index=True)
    worst = np.maximum.accumulate(np.maximum.reduceat(errors[order], begins)) if len(known) else errors
    return known.tolist(), worst.tolist()


def _view(column: Floats) -> Sequence[float]:
    """Return a column whose elements are numbers of Python's own."""
    found: Sequence[float] = np.ascontiguousarray(column, np.float64).data
    return found


def _numbers(column: Floats) -> array[float]:
    return array("d", np.ascontiguousarray(column, np.float64).tobytes())


class JudgedPair:
    """The pair whose tolerance is wanted. Rules ask for the same things, so what is worked out is kept.

    incoming: the worst error among its sources that are right.
    """

    def __init__(self, evidence: Evidence, row: int, sources: Sequence[int], incoming: float) -> None:
        self.evidence, self.row, self.sources, self.incoming = evidence, row, sources, incoming
        self.policy = evidence.policy
        self.kind = evidence.structure.kind[row]
        self.base, self.l2 = evidence.base[row], evidence.l2[row]
        self.is_vector = bool(evidence.is_vector[row])

    @property
    def incoming_state(self) -> float:
        """The worst error among the parameters that it was made from, and that are right."""
        evidence = self.evidence
        rows = [row for row in self.sources_of("param") if not evidence.wrong[row] and evidence.is_known(row)]
        return max((evidence.propagated[row] for row in rows), default=0.0)

    def sources_of(self, *kinds: str) -> list[int]:
        known = self.evidence.structure.kind
        return [source for source in self.sources if known[source] in kinds]

    @cached_property
    def summands(self) -> float:
        """How many numbers each element of a parameter's gradient sums, if it is a vector."""
        elements = self.evidence.pairs.elements
        given = sum(int(elements[source]) for source in self.sources_of("grad_output"))
        return given / max(1, int(elements[self.row]))

    @cached_property
    def terms(self) -> float:
        """The norm of the numbers that a vector's gradient sums; 0 if it is unknown."""
        return self.evidence.summed.size(self.row, self.sources)

    @cached_property
    def cancels(self) -> bool:
        """Whether it is a sum that is small against its terms. A sum with random signs is about as large as they are
        together."""
        sums = self.kind == "param_grad" or self.is_of_other_split
        return sums and self.is_vector and CANCELS * self.l2 < self.terms

    @property
    def is_of_other_split(self) -> bool:
        """Whether it is the gradient of a step whose micro batches are not comparable: nothing else of it is known."""
        return self.kind == "step_grad" and not self.sources

    @property
    def has_statistics(self) -> bool:
        """Whether its module computes a mean and a variance over many positions."""
        return self.evidence.has_statistics(self.evidence.structure.class_of(self.row))

    @property
    def has_matrix(self) -> bool:
        """Whether its module multiplies by a matrix of its own, as far as that was recorded."""
        own = (*self._own_parameters, *self.held_inside)
        return any(self.evidence.pairs.dimensions[row] > 1 for row in own)

    @property
    def own_matrices(self) -> int:
        """How many matrices its module has of its own, as far as that was recorded."""
        dimensions, paths = self.evidence.pairs.dimensions, self.evidence.structure.path
        return len({paths[row] for row in self._own_parameters if dimensions[row] > 1})

    @property
    def paths_of_parameters(self) -> set[str]:
        """The paths of its module's own parameters, as far as these or their gradients were recorded."""
        kinds, paths = self.evidence.structure.kind, self.evidence.structure.path
        return {paths[row] for row in self._own_parameters if kinds[row] in ("param", "param_grad")}

    @property
    def has_parameters(self) -> bool:
        """Whether its module has parameters of its own, as far as that was recorded."""
        return bool(self._own_parameters)

    @property
    def _own_parameters(self) -> list[int]:
        structure = self.evidence.structure
        scope, module = structure.scope[self.row], structure.module[self.row]
        return structure.parameters_of.get((*scope[:2], module), []) + structure.own_gradients.get((scope, module), [])

    @cached_property
    def held_inside(self) -> list[int]:
        """Rows of parameters, and of their gradients, of modules inside the code that made it which are never called:
        those of a compiled model, or of a cell that multiplies by the weights itself."""
        structure = self.evidence.structure
        calls = structure.users_of_own(self.row) if self.kind == "buffer" else structure.made_in(self.row)
        if not calls and (own := structure.call_of(self.row)) is not None:
            calls = [own]
        held = [row for call in calls for row in structure.held_inside(call)]
        return list(dict.fromkeys(held))

    @property
    def row_length(self) -> int:
        """The length of its last axis; 1 for a vector, whose elements are rows of their own."""
        return 1 if self.is_vector else max(1, self.evidence.structure.row_length(self.row))

    @property
    def is_made_by_container(self) -> bool:
        """Whether the own code of a module that calls others made it."""
        structure = self.evidence.structure
        if self.kind == "param_grad":
            own = structure.calls_of_module.get((structure.scope[self.row], structure.module[self.row]), ())
            return any(call.children for call in own)
        call = structure.call_of(self.row)
        if call is None or self.kind not in ("input", "output", "grad_input", "grad_output"):
            return False
        if self.kind in ("input", "grad_output"):
            return call.parent is not None
        return bool(call.children)

    @property
    def tied_calls(self) -> list[CallRows]:
        """Calls of other modules whose share the gradient of a tied parameter has, in an isolated check."""
        structure, isolated = self.evidence.structure, self.evidence.pairs.isolated
        if self.kind != "param_grad" or isolated is None:
            return []
        scope, module = structure.scope[self.row], structure.module[self.row]
        users = [user for user, owners in isolated.tied.items() if module in owners]
        return [call for user in users for call in structure.calls_of_module.get((scope, user), ())]

    @property
    def rows_of_its_code(self) -> list[int]:
        """Rows of the calls whose code made it, of the modules that these call, and of users of a tied parameter."""
        structure = self.evidence.structure
        calls = list(structure.made_in(self.row))
        if (own := structure.call_of(self.row)) is not None:
            calls.append(own)
        calls += self.tied_calls
        for call in calls:  # and those inside, as the list grows
            calls += call.children
        return [row for call in calls for rows in call.rows.values() for row in rows]

    @cached_property
    def right_activations(self) -> list[int]:
        wrong = self.evidence.wrong
        return [source for source in self.sources_of("input", "output") if not wrong[source]]
