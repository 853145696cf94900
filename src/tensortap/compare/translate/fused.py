"""Modules that do in one what the other side does in two: paddle's `BatchNorm(act="relu")` is a norm and a ReLU.

A run does not record that, but its values show it. If the outputs of two paired modules differ, and one equals the
output of the activation after the other, the two are compared there. If that activation is a function, its result is an
input of the next module, which is compared anyway. Without a next module, the values must be those of a known
activation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tensortap.compare.align.side import Side
from tensortap.compare.translate.activations import ActivationSums, activation_between, is_relu_between
from tensortap.core.records import Key, display_name
from tensortap.mapping.model_mapping import ModelMapping

__all__ = ["Fusion", "Fusions", "find_fusions"]

_APART = 0.01
"""Outputs that differ by less, relatively, went through the same."""
_NEARER = 0.25
"""How much nearer, relatively, the activation's output has to be."""
_WITH_WEIGHTS = ("norm", "conv", "linear")
_OUTPUTS = ("output", "grad_output")
_ROLES = ("reference", "candidate")
CallSpot = tuple[str, int]
"""A module and the number of its call."""


class Fusion(NamedTuple):
    """A pair of modules of which one includes an activation."""

    side: int
    """The side that does both in one: 0 the reference, 1 the candidate."""
    reference: CallSpot
    candidate: CallSpot
    activation: CallSpot | None
    """The other side's own module for what is included; None if that is a function."""
    used_by: tuple[str, int, str] | None = None
    """Then the reference's module, call and argument that is given the result."""

    def words(self) -> str:
        ours, theirs = display_name(self.reference[0]), display_name(self.candidate[0])
        one, other = (ours, theirs) if self.side == 0 else (theirs, ours)
        what = f"what follows {other}" if self.activation is None else display_name(self.activation[0])
        text = f"{one} of the {_ROLES[self.side]} includes {what} of the {_ROLES[1 - self.side]}"
        if self.activation is not None:
            return f"{text}: compared there"
        return text + ("" if self.used_by is None else ": compared where the next module is given it")


@dataclass
class Fusions:
    """The pairing of the candidate's records, given modules that include others."""

    found: list[Fusion] = field(default_factory=list)
    routes: dict[tuple[str, str, int], CallSpot | None] = field(default_factory=dict)
    """(candidate's module, "input" or "output", call) → the reference's module and call; None if there is none."""
    renamed: dict[CallSpot, CallSpot] = field(default_factory=dict)
    """Activations of the reference whose outputs stand for the module before them, as that module's call."""

    @cached_property
    def modules(self) -> set[str]:
        """The candidate's modules whose calls are paired differently."""
        return {module for module, _, _ in self.routes}

    def key(self, key: Key) -> Key:
        """Return a record's identity, with the module that computed it."""
        known = self.renamed.get((key.module, key.call)) if key.kind in _OUTPUTS else None
        return key if known is None else key._replace(module=known[0], call=known[1])

    def maker(self, key: Key) -> str | None:
        """Return the module that computed an argument, if one side computes it in that module and the other side after
        it; else None."""
        if key.kind != "input":
            return None
        spot = (key.module, key.call, key.path)
        return next((fusion.reference[0] for fusion in self.found if fusion.used_by == spot), None)

    def why(self, side: int, key: Key) -> str:
        """Return why a record of a side has no counterpart, if a fusion is the reason; else an empty string."""
        for fusion in self.found:
            own = (fusion.reference, fusion.candidate)[side]
            if side != fusion.side and key.kind in _OUTPUTS and (key.module, key.call) == own:
                return f"the {_ROLES[fusion.side]} has it and what follows in one"
            if side != fusion.side and (key.module, key.call) == fusion.activation and key.kind not in _OUTPUTS:
                return f"the {_ROLES[fusion.side]} has it and what comes before in one"
        return ""


def find_fusions(plan: ModelMapping, reference: Side, candidate: Side) -> Fusions:
    """Compare the outputs of paired modules, and search for an activation after those that differ."""
    finder = _Finder(plan, reference, candidate)
    found = Fusions(
        [fusion for made, given in plan.module_matches.source_of.items() for fusion in finder.of(made, given)]
    )
    for fusion in found.found:
        _route(found, fusion)
    _renumber(found, finder, plan)
    return found


def _route(fusions: Fusions, fusion: Fusion) -> None:
    (given, call), activation = fusion.candidate, fusion.activation
    if fusion.side == 1:
        fusions.routes[given, "output", call] = activation
        if activation is not None:
            fusions.renamed[activation] = fusion.reference
        return
    fusions.routes[given, "output", call] = None
    if activation is not None:
        fusions.routes[activation[0], "output", activation[1]] = fusion.reference
        fusions.routes[activation[0], "input", activation[1]] = None


def _renumber(fusions: Fusions, finder: _Finder, plan: ModelMapping) -> None:
    """Keep the order of an activation's other calls, without those that are included in a module."""
    for side in (0, 1):
        used: dict[str, set[int]] = defaultdict(set)
        for fusion in fusions.found:
            if fusion.side == 1 - side and fusion.activation is not None:
                used[fusion.activation[0]].add(fusion.activation[1])
        for module, numbers in used.items():
            other = (plan.module_matches.source_of, plan.module_matches.target_of)[side].get(module)
            if other is None:
                continue
            left = [number for number in sorted(finder.flows[side].outputs.get(module, ())) if number not in numbers]
            there = sorted(finder.flows[1 - side].outputs.get(other, ()))
            made, given = (module, other) if side == 0 else (other, module)
            ours, theirs = (left, there) if side == 0 else (there, left)
            for at, number in enumerate(theirs):
                for way in ("input", "output"):
                    fusions.routes.setdefault((given, way, number), (made, ours[at]) if at < len(ours) else None)


class _Flow:
    """Inputs and outputs of a side's modules in its first forward pass."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.outputs: dict[str, dict[int, int]] = defaultdict(dict)
        """Rows of modules that return one tensor, by module and call."""
        self.inputs: dict[tuple[str, int, str], int] = {}
        self.users: dict[int, list[tuple[str, int, str]]] = defaultdict(list)
        """Calls that were given a tensor, with the path of the argument."""
        several: set[str] = set()
        for row in self._rows():
            module, call, path = side.module[row], int(side.call[row]), side.path[row]
            if side.kind[row] == "input":
                self.inputs[module, call, path] = row
                self.users[int(side.tensor_id[row])].append((module, call, path))
            elif call in self.outputs[module]:
                several.add(module)
            else:
                self.outputs[module][call] = row
        for module in several:
            del self.outputs[module]

    def _rows(self) -> list[int]:
        side = self.side
        forward = np.flatnonzero(side.kind.among(("input", "output")) & side.phase.among(("forward",)))
        if not len(forward):
            return []
        first = forward[np.lexsort((side.seq[forward], side.micro[forward], side.step[forward], side.rank[forward]))[0]]
        scope = [column[forward] == column[first] for column in (side.rank, side.step, side.micro)]
        found: list[int] = forward[np.logical_and.reduce(scope)].tolist()
        return found


class _Finder:
    """Measures outputs of both sides against each other."""

    def __init__(self, plan: ModelMapping, reference: Side, candidate: Side) -> None:
        self._plan = plan
        self.flows = _Flow(reference), _Flow(candidate)

    def of(self, made: str, given: str) -> Iterator[Fusion]:
        if not self._has_weights(made):  # an activation itself, which may have others nearby
            return
        ours, theirs = self.flows[0].outputs.get(made, {}), self.flows[1].outputs.get(given, {})
        for call in sorted(ours.keys() & theirs.keys()):
            if (apart := self._apart(ours[call], theirs[call])) is None:
                continue
            for side in (1, 0):
                found = self._find_after if apart > _APART else self._find_identity
                if (fusion := found(side, (made, given), call, apart)) is not None:
                    yield fusion
                    break

    def _has_weights(self, made: str) -> bool:
        """Whether a module has weights; by its class, if the run has recorded no weights at all."""
        modules = self._plan.module_matches.target.modules
        if not any(module.tensors for module in modules.values()):
            return any(word in modules[made].cls.lower() for word in _WITH_WEIGHTS)
        return any(modules[name].tensors for name in (made, *self._plan.module_matches.target.leaves(made)))

    def _find_after(self, side: int, names: tuple[str, str], call: int, apart: float) -> Fusion | None:
        """Return the fusion, if a side's output is what the other side has after its own."""
        whole, other = self.flows[side], self.flows[1 - side]
        rows = whole.outputs[names[side]][call], other.outputs[names[1 - side]][call]
        for activation, after in self._activations(1 - side, rows[1]):
            if self._nearer(side, rows[0], after, apart):
                return Fusion(side, (names[0], call), (names[1], call), activation)
        placed = (self._plan.module_matches.source_of, self._plan.module_matches.target_of)[side]
        for module, number, path in whole.users.get(int(whole.side.tensor_id[rows[0]]), ()):
            given = other.inputs.get((placed.get(module, "\0"), number, path))
            if given is not None and self._nearer(side, rows[0], given, apart):
                made = module if side == 0 else placed[module]
                return Fusion(side, (names[0], call), (names[1], call), None, (made, number, path))
        if self._is_activation(side, *rows):
            return Fusion(side, (names[0], call), (names[1], call), None)
        return None

    def _find_identity(self, side: int, names: tuple[str, str], call: int, apart: float) -> Fusion | None:
        """Return the fusion with an activation that changes nothing, like a ReLU of positive numbers. It shows in the
        input of the next module: a tensor of the module itself on one side, of the activation on the other."""
        whole, other = self.flows[side], self.flows[1 - side]
        rows = whole.outputs[names[side]][call], other.outputs[names[1 - side]][call]
        placed = (self._plan.module_matches.source_of, self._plan.module_matches.target_of)[side]
        users = whole.users.get(int(whole.side.tensor_id[rows[0]]), ())
        given = [other.inputs.get((placed.get(module, "\0"), number, path)) for module, number, path in users]
        tensors = {int(other.side.tensor_id[row]) for row in given if row is not None}
        tensors.discard(int(other.side.tensor_id[rows[1]]))  # a module that returns its input is not a step
        for activation, after in self._activations(1 - side, rows[1]):
            if int(other.side.tensor_id[after]) in tensors:
                return Fusion(side, (names[0], call), (names[1], call), activation)
        return None

    def _activations(self, side: int, row: int) -> Iterator[tuple[CallSpot, int]]:
        """Yield modules without weights that use an output, with the rows of their own outputs."""
        flow, outline = self.flows[side], (self._plan.module_matches.target, self._plan.module_matches.source)[side]
        for module, number, _ in flow.users.get(int(flow.side.tensor_id[row]), ()):
            plain = not outline.children(module) and not outline.modules[module].tensors
            after = flow.outputs.get(module, {}).get(number)
            if plain and after is not None:
                yield (module, number), after

    def _is_activation(self, side: int, row: int, other: int) -> bool:
        """Whether a side's output is the activation of the other's. No module with weights may use it: its input would
        have shown that."""
        whole, apart = self.flows[side], self.flows[1 - side]
        outline = (self._plan.module_matches.target, self._plan.module_matches.source)[side]
        users = [name for name, _, _ in whole.users.get(int(whole.side.tensor_id[row]), ())]
        if any(outline.modules[name].tensors for name in users):
            return False
        if not whole.side.kept[row] or not apart.side.kept[other]:
            return is_relu_between(_sums(apart.side, other), _sums(whole.side, row))
        return activation_between(apart.side.array(other), whole.side.array(row)) is not None

    def _nearer(self, side: int, row: int, other: int, apart: float) -> bool:
        found = self._apart(*((row, other) if side == 0 else (other, row)))
        return found is not None and found <= _NEARER * apart

    def _apart(self, ours: int, theirs: int) -> float | None:
        """Return the relative distance of two records by their sketches; None if they cannot be compared."""
        left, right = self.flows[0].side, self.flows[1].side
        if left.shape_hash[ours] != right.shape_hash[theirs]:
            return None
        if left.digest[ours] == right.digest[theirs]:
            return 0.0
        size = float(left.l2[ours])
        if not left.has_sketch[ours] or not right.has_sketch[theirs] or not size > 0:
            return None
        sums = min(left.sketch_size, right.sketch_size)
        one, other = left.sketches_at(np.array([ours]), sums)[0], right.sketches_at(np.array([theirs]), sums)[0]
        return float(np.linalg.norm(one.astype(np.float64) - other)) / size


def _sums(side: Side, row: int) -> ActivationSums:
    columns = side.elements, side.zeros, side.min, side.max, side.mean, side.l1
    return ActivationSums(*(float(column[row]) for column in columns))
