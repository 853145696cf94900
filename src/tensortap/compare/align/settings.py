"""Settings in which two runs differ: plain attributes, parameters that are tied on one side alone, the training loop.

They are loop facts of a run. They are reported, never judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.distinct import distinct
from tensortap.compare.align.loop import LoopDifferences
from tensortap.compare.align.side import Side
from tensortap.core.arguments import ArgumentDifference
from tensortap.store.loop import LoopFacts

__all__ = ["SettingDifferences", "TieDifference"]

_MEANINGLESS = ("training", "config._name_or_path", "config._attn_implementation_autoset")
"""Attributes that say nothing about what a module computes; the mode of a call is recorded with it."""


class TieDifference(NamedTuple):
    """A parameter that is another one's tensor on one side alone; in that side's names."""

    name: str
    other: str
    side: str

    def words(self) -> str:
        return f"{self.name} is tied to {self.other} in the {self.side} alone"


class SettingDifferences:
    """Differences in the loop facts of two runs: about modules, at the first step in common; about the loop, at all."""

    def __init__(self, reference: Side, candidate: Side, alignment: Alignment, comparable: bool = True) -> None:
        """`comparable` is False for two frameworks, whose attributes have other names and conventions."""
        self._reference = reference
        self._candidate = candidate
        self._alignment = alignment
        self._comparable = comparable and bool(len(alignment.reference))

    @cached_property
    def attributes(self) -> dict[str, tuple[ArgumentDifference, ...]]:
        """By module, in the reference's names: the attributes that both sides have, and that differ."""
        found = {}
        for ours, theirs in self._modules_alike if self._comparable else ():
            values = self._value("reference", "attributes", ours), self._value("candidate", "attributes", theirs)
            if None not in values and (others := tuple(_others(*values))):  # type: ignore[arg-type]
                found[ours] = others
        return found

    def attributes_at(self, module: str, step: int) -> tuple[ArgumentDifference, ...]:
        """Return the attributes of a module of the reference that differ at a step."""
        return next((tuple(_others(*values)) for values in self._attributes_of(module, step)), ())

    def are_same(self, module: str) -> bool:
        """Whether a module is known to have the same attributes on both sides, and no other configuration around it."""
        known = self._comparable and self._value("reference", "attributes", module) is not None
        if not known or module not in self._alike or module in self.attributes:
            return False
        return not any(not outer or f"{module}.".startswith(f"{outer}.") for outer in self._configured_otherwise)

    @cached_property
    def _configured_otherwise(self) -> list[str]:
        """The modules whose configuration differs: it is that of the modules inside, too."""
        return [name for name, others in self.attributes.items() if any(o.path.startswith("config.") for o in others)]

    @cached_property
    def _alike(self) -> set[str]:
        return {ours for ours, theirs in self._modules_alike if self._value("candidate", "attributes", theirs)}

    def modes(self, module: str, step: int) -> tuple[bool, bool] | None:
        """Return whether a module is in training mode at a step, in the reference and in the candidate, if that
        differs."""
        found = self._attributes_of(module, step)
        modes = [(ours.get("training"), theirs.get("training")) for ours, theirs in found]
        return next(((bool(a), bool(b)) for a, b in modes if None not in (a, b) and a != b), None)

    def _attributes_of(self, module: str, step: int) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Return the attributes of a module of the reference and of its counterpart at a step; none if not known."""
        if not self._comparable:
            return []
        found = [
            (
                self._loop("reference").value("attributes", step, ours),
                self._loop("candidate").value("attributes", self.loop.their_step(step), theirs),
            )
            for ours, theirs in self._modules_alike
            if ours == module
        ]
        return [(ours, theirs) for ours, theirs in found if ours is not None and theirs is not None]

    @cached_property
    def ties(self) -> list[TieDifference]:
        """Parameters that are tied on one side alone, among modules that both sides have."""
        if not self._comparable:
            return []
        ours, theirs = (self._value(side, "ties", "") for side in ("reference", "candidate"))
        if ours is None or theirs is None:
            return []
        names = dict(self.modules())
        renamed = {_renamed(name, names): _renamed(str(other), names) for name, other in ours.items()}
        only_ours = [
            TieDifference(name, str(other), "reference")
            for name, other in ours.items()
            if not _tied(theirs, _renamed(name, names), _renamed(str(other), names))
        ]
        only_theirs = [
            TieDifference(name, str(other), "candidate")
            for name, other in theirs.items()
            if not _tied(renamed, name, str(other))
        ]
        return only_ours + only_theirs

    @property
    def untied_parameters(self) -> set[tuple[str, str]]:
        """All parameters that are tied on one side alone, by module and name there."""
        names = (name for tie in self.ties for name in (tie.name, tie.other))
        return {(module, path) for module, _, path in (name.rpartition(".") for name in names)}

    @cached_property
    def loop(self) -> LoopDifferences:
        """Differences between the training loops, of the first rank that was compared."""
        if not self._comparable:
            return LoopDifferences(LoopFacts(), LoopFacts(), {})
        ours, theirs = self._loop("reference"), self._loop("candidate")
        alignment, left, right = self._alignment, self._reference, self._candidate
        steps = {pair[0]: pair[1] for pair in distinct(left.step[alignment.reference], right.step[alignment.candidate])}
        names = dict(self.modules()) if ours and theirs else {}
        return LoopDifferences(ours, theirs, steps, lambda name: _renamed(name, names))

    @cached_property
    def _modules_alike(self) -> list[tuple[str, str]]:
        """Return the modules that both sides have, without those that only share weights under two names: one of these
        may be a part of the other."""
        called = self._reference.kind.among(("input", "output"))[self._alignment.reference]
        ours, theirs = self._reference.names("module"), self._candidate.names("module")
        rows = self._alignment.reference[called], self._alignment.candidate[called]
        both = {(ours.words[a], theirs.words[b]) for a, b in distinct(ours.codes[rows[0]], theirs.codes[rows[1]])}
        return [pair for pair in self.modules() if pair[0] == pair[1] or pair in both]

    def modules(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each module that both sides have, on either side."""
        ours, theirs = self._reference.names("module"), self._candidate.names("module")
        codes = ours.codes[self._alignment.reference], theirs.codes[self._alignment.candidate]
        for left, right in distinct(*codes):
            yield ours.words[left], theirs.words[right]

    def _value(self, name: str, fact: str, of: str) -> Mapping[str, Any] | None:
        return self._loop(name).value(fact, self._first_steps[name], of)

    @cached_property
    def _first_steps(self) -> dict[str, int]:
        """By side: the first step that was compared."""
        sides = ("reference", self._reference), ("candidate", self._candidate)
        return {name: int(side.step[getattr(self._alignment, name)].min()) for name, side in sides}

    def _loop(self, name: str) -> LoopFacts:
        side = self._reference if name == "reference" else self._candidate
        return side.run.loop(int(side.rank[getattr(self._alignment, name)[0]]))


def _others(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[ArgumentDifference]:
    for name, value in ours.items():
        if name in theirs and name not in _MEANINGLESS and repr(value) != repr(theirs[name]):
            yield ArgumentDifference(name, value, theirs[name])


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    """Return a parameter's name with its module's name on the other side."""
    module, dot, own = name.rpartition(".")
    return f"{modules.get(module, module)}{dot}{own}"


def _tied(ties: Mapping[str, Any], name: str, other: str) -> bool:
    """Whether two names are one tensor; either may stand for it."""
    return _root(ties, name) == _root(ties, other)


def _root(ties: Mapping[str, Any], name: str) -> str:
    seen = {name}
    while (other := ties.get(name)) is not None and str(other) not in seen:
        name = str(other)
        seen.add(name)
    return name
