"""Differences between the training loops of two runs: settings of optimizers, skipped steps and random states.

They are loop facts of a run, compared at the steps that both runs have. Parameter groups are joined by their
parameters: the runs may sort them into groups in different ways. Differences are reported, never judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from tensortap.core.arguments import OpaqueValue, in_words
from tensortap.store.loop import LoopFacts

__all__ = ["CLIPPED_INSIDE", "LoopDifference", "LoopDifferences", "clips_itself"]

_KERNELS = {"foreach", "fused", "capturable", "differentiable"}
_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
_MEANINGLESS = _KERNELS | _SCHEDULES | {"name"}
"""Settings that choose a kernel, that a scheduler keeps for itself, or that are names."""
_WORDS = {"weight_decay": "weight decay", "learning_rate": "lr"}
_SAME = 1e-6
"""Relative difference up to which two numbers are one setting, computed in two ways."""
_FEW = 3
_OF_UPDATE = {"optimizer", "parameters", "group", "skipped", "frozen", "no_gradient"}
_ALGORITHMS = {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Lamb", "Momentum", "Muon", "NAdam"}
_ALGORITHMS |= {"RAdam", "RMSProp", "RMSprop", "Rprop", "SGD"}
"""Classes of torch and paddle whose names say what they compute. A class of another name, as of a library with fused
kernels, may compute the same as any of them."""
CLIPPED_INSIDE = "the optimizer of one side clips gradients itself, after they were recorded"
_ORTHOGONAL = "muon"
"""Part of the class names of optimizers whose steps are orthogonal matrices."""


class LoopDifference(NamedTuple):
    """A fact about the loop in which the runs differ, from the first step at which they do."""

    step: int
    fact: str
    """group | parameters | optimizer | scaler | skipped | frozen | no_gradient"""
    words: str
    parameters: frozenset[str] = frozenset()
    """The parameters that it concerns, in the reference's names; none: all of them."""
    may_compute_same: bool = False
    """Whether the update may be the same all the same: another class of optimizer may implement the same rule."""

    def concerns(self, parameter: str) -> bool:
        return not self.parameters or parameter in self.parameters


class _Joined(NamedTuple):
    """A group of each side, and the parameters that are in both, in the reference's names."""

    ours: str
    theirs: str
    parameters: tuple[str, ...]


class LoopDifferences:
    """Differences in the loop facts of one rank of each side. Without facts on both sides there are none."""

    def __init__(
        self, ours: LoopFacts, theirs: LoopFacts, steps: Mapping[int, int], renamed: Callable[[str], str] = str
    ) -> None:
        """
        steps: the candidate's step for each of the reference's that both runs have, in order.
        renamed: returns the candidate's name of a parameter of the reference.
        """
        self._ours, self._theirs = ours, theirs
        self._shifted = steps
        self._steps = list(steps)
        self._renamed = renamed

    @property
    def first_step(self) -> int | None:
        """The first step that both runs have."""
        return self._steps[0] if self._steps else None

    def their_step(self, step: int) -> int:
        """Return the candidate's step for one of the reference's."""
        return self._shifted.get(step, step)

    @cached_property
    def optimizer(self) -> list[LoopDifference]:
        """Differences in optimizers, their settings, the gradient scaler and skipped steps; one for each setting."""
        frozen, members, without = list(self._frozen()), list(self._members()), list(self._without_gradient())
        found = [*self._classes(), *frozen, *_not_among(members, frozen), *_not_among(without, [*frozen, *members])]
        found += [*self._clippings(), *self._settings(), *self._scalers(), *self._skipped()]
        return sorted(found, key=lambda each: each.step)

    @cached_property
    def frozen_modules(self) -> frozenset[str]:
        """The modules of parameters that one side alone freezes, and those around them, in the reference's names."""
        names = [name for each in self.optimizer if each.fact == "frozen" for name in each.parameters]
        owners = {name.rpartition(".")[0] for name in names}
        return frozenset(owners.union(*(_around(owner) for owner in owners)))

    @cached_property
    def orthogonalized(self) -> frozenset[str]:
        """The reference's parameters whose steps an optimizer makes orthogonal, in bfloat16, as Muon does."""
        names: set[str] = set()
        for of in self._ours.subjects("parameters"):
            for step in self._steps[:1]:
                optimizer = self._ours.value("optimizer", step, of.rpartition(".")[0]) or {}
                settings = self._ours.value("group", step, of) or {}
                if _ORTHOGONAL in str(optimizer.get("class", "")).lower() and settings.get("use_muon", True):
                    names.update((self._ours.value("parameters", step, of) or {}).get("names") or ())
        return frozenset(names)

    @cached_property
    def random(self) -> dict[str, int]:
        """By generator: the first step that starts with another random state."""
        found = {}
        for of in self._common("random"):
            for step in self._steps:
                ours, theirs = self._values("random", of, of, step)
                if ours is not None and theirs is not None and ours != theirs:
                    found[of] = step
                    break
        return found

    @cached_property
    def draws_random(self) -> bool:
        """Whether the reference draws random numbers in its steps: a generator's state changes from one to the next."""
        for of in self._common("random"):
            states = [self._ours.value("random", step, of) for step in self._steps]
            if any(one is not None and other is not None and one != other for one, other in pairwise(states)):
                return True
        return False

    @property
    def may_draw_random(self) -> bool:
        """Whether the reference draws random numbers, as far as is known: one step does not show it."""
        return len(self._steps) < 2 or self.draws_random

    def moved_within_step(self, module: str, step: int, micro: int) -> bool:
        """Whether the parameters of a module may have changed within a step, before a micro step, on either side."""
        for side, at in ((self._ours, step), (self._theirs, self.their_step(step))):
            value = side.value("moved", at, module)
            if value is not None and int(value.get("micro") or 0) <= micro:
                return True
        return False

    def of_module(self, module: str, until: int) -> list[LoopDifference]:
        """Return the differences that make another update of a module's own parameters, up to a step."""
        return [
            each
            for each in self.of_updates(until)
            if not each.parameters or any(name.rpartition(".")[0] == module for name in each.parameters)
        ]

    def of_update(self, parameter: str, until: int) -> list[LoopDifference]:
        """Return the differences that make another update of a parameter, up to a step."""
        return [each for each in self.of_updates(until) if each.concerns(parameter)]

    def of_updates(self, until: int) -> list[LoopDifference]:
        """Return the differences that make another update of any parameter, up to a step."""
        return [each for each in self.optimizer if each.fact in _OF_UPDATE and each.step <= until]

    def _common(self, fact: str) -> list[str]:
        theirs = set(self._theirs.subjects(fact))
        return [of for of in self._ours.subjects(fact) if of in theirs]

    def _values(
        self, fact: str, ours: str, theirs: str, step: int
    ) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
        return self._ours.value(fact, step, ours), self._theirs.value(fact, self._shifted[step], theirs)

    def _optimizers(self) -> list[tuple[str, str]]:
        """Return the optimizers that correspond: by key, or the only one of each side."""
        ours, theirs = self._ours.subjects("optimizer"), self._theirs.subjects("optimizer")
        if len(ours) == len(theirs) == 1:
            return [(ours[0], theirs[0])]
        return [(of, of) for of in ours if of in theirs]

    def _classes(self) -> Iterator[LoopDifference]:
        for ours, theirs in self._optimizers():
            for step in self._steps:
                values = self._values("optimizer", ours, theirs, step)
                left, right = ((value or {}).get("class") for value in values)
                if left and right and left != right:
                    words = f"the optimizer is {left} in the reference and {right} in the candidate"
                    known = {left, right} <= _ALGORITHMS
                    yield LoopDifference(step, "optimizer", words, may_compute_same=not known)
                    break

    def _clippings(self) -> Iterator[LoopDifference]:
        """Yield optimizers that clip gradients themselves, as paddle's do, in another way than the other side's."""
        for ours, theirs in self._optimizers():
            for step in self._steps:
                values = self._values("optimizer", ours, theirs, step)
                left, right = ((value or {}).get("clipping") for value in values)
                if None not in values and left != right:
                    sides = f"{left or 'none'} in the reference and {right or 'none'} in the candidate"
                    yield LoopDifference(step, "optimizer", f"the optimizer's clipping is {sides}")
                    break

    def _members(self) -> Iterator[LoopDifference]:
        """Yield parameters that only one side's optimizers hold. Groups with unnamed parameters may hold them."""
        for step in self._steps[:1]:
            (ours, unnamed), (theirs, others) = _held(self._ours, step), _held(self._theirs, self._shifted[step])
            if not ours or not theirs or unnamed or others:
                continue
            names = {self._renamed(name): name for name in ours}
            alone = [names[name] for name in names if name not in theirs]
            if alone:
                yield LoopDifference(step, "parameters", _unheld(alone, "candidate", "reference"), frozenset(alone))
            alone = [name for name in theirs if name not in names]
            if alone:
                yield LoopDifference(step, "parameters", _unheld(alone, "reference", "candidate"), frozenset(alone))

    def _frozen(self) -> Iterator[LoopDifference]:
        """Yield parameters that require a gradient on one side alone, at the first step that has any."""
        yield from self._in_one(
            "frozen", [("", "")], "names", "the {side} freezes {many} that the {other} trains ({names})"
        )

    def _without_gradient(self) -> Iterator[LoopDifference]:
        """Yield parameters that an optimizer holds and that had a gradient on one side alone when it stepped."""
        words = "the {side}'s optimizer got no gradient for {many} in step {step}, and the {other}'s did ({names})"
        yield from self._in_one("no_gradient", self._optimizers(), "no_gradient", words, of_fact="step_grad")

    def _in_one(
        self, name: str, subjects: Sequence[tuple[str, str]], key: str, words: str, of_fact: str = ""
    ) -> Iterator[LoopDifference]:
        """Yield the parameters that a fact lists on one side alone, at the first step at which a side lists any."""
        for ours, theirs in subjects:
            said: set[str] = set()
            for step in self._steps:
                values = self._values(of_fact or name, ours, theirs, step)
                if None in values:
                    continue
                left, right = (dict.fromkeys((value or {}).get(key) or ()) for value in values)
                names = {self._renamed(each): each for each in left}
                alone = {
                    "reference": [names[each] for each in names if each not in right],
                    "candidate": [each for each in right if each not in names],
                }
                for side, other in (("reference", "candidate"), ("candidate", "reference")):
                    if not alone[side] or side in said:
                        continue
                    said.add(side)
                    found = alone[side]
                    text = words.format(side=side, other=other, many=_many(found), names=_listed(found), step=step)
                    yield LoopDifference(step, name, text, frozenset(found))

    def _joined(self, step: int) -> list[_Joined]:
        ours, theirs = _held(self._ours, step)[0], _held(self._theirs, self._shifted[step])[0]
        joined: dict[tuple[str, str], list[str]] = {}
        for name, group in ours.items():
            other = theirs.get(self._renamed(name))
            if other is not None:
                joined.setdefault((group, other), []).append(name)
        return [_Joined(*groups, tuple(names)) for groups, names in joined.items()]

    def _settings(self) -> Iterator[LoopDifference]:
        """Yield one difference for each setting, at the first step that has one."""
        first: dict[str, tuple[int, list[_Joined], list[tuple[Any, Any]]]] = {}
        times: Counter[str] = Counter()
        joined: list[_Joined] = []
        total, known = 0, (-1, -1)
        for step in self._steps:
            if (last := self._last_change(step)) != known:
                joined, known = self._joined(step), last
                total = sum(len(each.parameters) for each in joined)
            here: dict[str, list[tuple[_Joined, tuple[Any, Any]]]] = {}
            for each in joined:
                for name, pair in self._others(each, step):
                    here.setdefault(name, []).append((each, pair))
            for name, parts in here.items():
                times[name] += 1
                first.setdefault(name, (step, [part[0] for part in parts], [part[1] for part in parts]))
        for name, (step, groups, pairs) in first.items():
            later = sum(each >= step for each in self._steps)
            when = f"from step {step}" if times[name] == later and later > 1 else f"in step {step}"
            if 1 < times[name] < later:
                when = f"in {times[name]} steps, the first is step {step}"
            affected = [parameter for each in groups for parameter in each.parameters]
            words = _setting_words(name, pairs, [each.parameters for each in groups], when, len(affected) == total)
            yield LoopDifference(step, "group", words, frozenset(affected))

    def _last_change(self, step: int) -> tuple[int, int]:
        """Return the last steps, up to this one, at which the groups of either side got other parameters."""
        return _last_change(self._ours, step), _last_change(self._theirs, self._shifted[step])

    def _others(self, joined: _Joined, step: int) -> Iterator[tuple[str, tuple[Any, Any]]]:
        ours, theirs = self._values("group", joined.ours, joined.theirs, step)
        if ours is None or theirs is None or ours is theirs:
            return
        left, right = _flat(ours), _flat(theirs)
        for name, value in left.items():
            if name in right and not _is_same(value, right[name]):
                yield name, (value, right[name])

    def _scalers(self) -> Iterator[LoopDifference]:
        for ours, theirs in self._optimizers():
            for step in self._steps:
                values = self._values("scaler", ours, theirs, step)
                left, right = (None if value is None else value.get("scale") for value in values)
                if not _is_same(left, right):
                    here = [_scale(scale) for scale in (left, right)]
                    words = f"the gradient scaler's scale is {here[0]} in the reference and {here[1]} in the candidate"
                    yield LoopDifference(step, "scaler", f"{words} from step {step}")
                    break

    def _skipped(self) -> Iterator[LoopDifference]:
        for ours, theirs in self._optimizers():
            found: dict[str, list[int]] = {}
            for step in self._steps:
                values = self._values("skipped", ours, theirs, step)
                left, right = (None if value is None else value.get("skipped") for value in values)
                if left is not None and right is not None and left != right:
                    found.setdefault("reference" if left else "candidate", []).append(step)
            for side, steps in found.items():
                more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
                words = f"the {side} alone skipped the update of step {steps[0]}{more}"
                yield LoopDifference(steps[0], "skipped", words)


def clips_itself(facts: LoopFacts) -> bool:
    """Whether an optimizer clips gradients, as paddle's do, after they were recorded."""
    changes = [change for of in facts.subjects("optimizer") for change in facts.changes("optimizer", of)]
    return any(change.value.get("clipping") for change in changes)


def _held(facts: LoopFacts, step: int) -> tuple[dict[str, str], int]:
    """Return the group of each parameter, and the number of parameters without a name."""
    found, unnamed = {}, 0
    for of in facts.subjects("parameters"):
        value = facts.value("parameters", step, of) or {}
        unnamed += int(value.get("others") or 0)
        found.update(dict.fromkeys(value.get("names") or (), of))
    return found, unnamed


def _last_change(facts: LoopFacts, step: int) -> int:
    changes = (each.step for of in facts.subjects("parameters") for each in facts.changes("parameters", of))
    return max((each for each in changes if each <= step), default=-1)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name, without those that do not matter; betas one by one, as beta1 and beta2."""
    found = {}
    for name, value in settings.items():
        if name in _MEANINGLESS or isinstance(value, OpaqueValue):
            continue
        if name == "betas" and isinstance(value, (tuple, list)):
            found.update({f"beta{place}": part for place, part in enumerate(value, 1)})
        else:
            found[_WORDS.get(name, name)] = value
    return found


def _is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=_SAME) or (ours != ours and theirs != theirs)
    return repr(ours) == repr(theirs)


def _setting_words(
    name: str, pairs: Sequence[tuple[Any, Any]], parameters: Sequence[Sequence[str]], when: str, everywhere: bool
) -> str:
    ours, theirs = pairs[0]
    alike = [each for each, pair in zip(parameters, pairs, strict=True) if pair == pairs[0]]
    names = [parameter for each in alike for parameter in each]
    rest = sum(map(len, parameters)) - len(names)
    if name == "weight decay" and not everywhere and not (ours and theirs) and not rest:
        many = _many(names)
        if theirs:
            return f"weight decay applies to {many} that it does not apply to in the reference ({_listed(names)})"
        return f"weight decay does not apply to {many} that it applies to in the reference ({_listed(names)})"
    words = f"{name} is {in_words(ours)} in the reference and {in_words(theirs)} in the candidate {when}"
    if not everywhere or rest:
        words += f", for {_listed(names)}"
    return words + (f", and differs for {rest} more" if rest else "")


def _unheld(names: Sequence[str], side: str, other: str) -> str:
    return f"the optimizer of the {side} does not hold {_many(names)} that the {other}'s holds ({_listed(names)})"


def _many(names: Sequence[str]) -> str:
    return f"{len(names)} parameter{'s' * (len(names) > 1)}"


def _around(module: str) -> Iterator[str]:
    """Yield the modules around one, but for the root."""
    while module := module.rpartition(".")[0]:
        yield module


def _not_among(found: Sequence[LoopDifference], others: Sequence[LoopDifference]) -> list[LoopDifference]:
    """Return the differences whose parameters no other one has: these have said why."""
    return [each for each in found if not any(each.parameters <= other.parameters for other in others)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def _scale(scale: Any) -> str:
    return "1, without a scaler," if scale is None else in_words(scale)
