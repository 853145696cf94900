"""Values that the candidate detaches from the autograd graph, and the reference does not.

What is made of a detached value alone is detached, too. So the first such value, in execution order, shows whose code
detached it: that of the module that returns it, or of the caller that passes it to a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tensortap.compare.judge.counterparts import Pass
from tensortap.compare.judge.detached import DetachedKeys, detached_paths, notes_detached
from tensortap.compare.judge.isolation import Isolation
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.core.records import Key

__all__ = ["Detached", "find_newly_detached"]


class Detached(NamedTuple):
    """A value that a module's own code detached."""

    module: str
    """The module whose code did it."""
    gradients: frozenset[Key]
    """Gradients that never come because of it: of the value itself, and of what it is passed to."""


def find_newly_detached(matched: Matched, structure: Structure, isolation: Isolation, scope: Pass) -> list[Detached]:
    """Return the values of one forward pass that were detached first, in execution order. Values that may be made of
    these are left out. Without the facts of both sides, there are none."""
    if not isolation.knows_graph or not notes_detached(matched.reference):
        return []
    found: list[Detached] = []
    if isinstance(isolation.cut_off, DetachedKeys):
        # Facts are of modules, not of calls: those of modules that are called once are certain.
        found = list(_Search(matched, structure, isolation, scope, called_once=True).found())
    return found or list(_Search(matched, structure, isolation, scope).found())


class _Search:
    """`called_once`: whether values of modules that are called several times in the pass are left out."""

    def __init__(
        self, matched: Matched, structure: Structure, isolation: Isolation, scope: Pass, called_once: bool = False
    ) -> None:
        self._matched, self._structure, self._isolation = matched, structure, isolation
        self._scope, self._called_once = scope, called_once
        self._in_reference: dict[tuple[str, str], set[str]] = {}
        """Paths that the reference detaches, by module and kind."""
        self._tensors: set[int] = set()
        """Numbers of tensors that are newly detached."""
        self._touched: set[CallRows] = set()
        """Calls that were given or have made something newly detached."""

    def found(self) -> Iterator[Detached]:
        structure = self._structure
        for row, key in self._values():
            call = structure.calls.get((self._scope, key.module, key.call))
            if call is None or not self._is_newly(key):
                continue
            if self._called_once and len(structure.calls_of_module.get((self._scope, key.module), ())) > 1:
                continue
            maker = call if key.kind == "output" else call.parent
            follows = structure.tensor[row] in self._tensors or maker in self._touched
            self._tensors.add(structure.tensor[row])
            self._touched.update(each for each in (call, call.parent) if each is not None)
            if maker is not None and not follows:
                yield Detached(maker.module, frozenset(self._gradients(row, key)))

    def _values(self) -> Iterator[tuple[int, Key]]:
        """Yield inputs and outputs of the pass, in execution order."""
        side, own = self._matched.reference, self._matched.alignment.reference
        rank, step, pass_number = self._scope
        here = (side.rank[own] == rank) & (side.step[own] == step) & (side.pass_number[own] == pass_number)
        here &= side.kind.among(("input", "output"))[own] & side.phase.among(("forward",))[own]
        for row in np.flatnonzero(here).tolist():
            yield row, side.key(int(own[row]))

    def _is_newly(self, key: Key) -> bool:
        detached = key in self._isolation.cut_off or (key.kind == "output" and key in self._isolation.outside)
        return detached and key.path not in self._detached_in_reference(key.module, key.kind)

    def _detached_in_reference(self, module: str, kind: str) -> set[str]:
        if (module, kind) not in self._in_reference:
            rank, step, _ = self._scope
            lists = ("inputs",) if kind == "input" else ("outputs", "outputs_of_detached")
            self._in_reference[module, kind] = detached_paths(self._matched.reference, (rank,), step, module, *lists)
        return self._in_reference[module, kind]

    def _gradients(self, row: int, key: Key) -> Iterator[Key]:
        yield key._replace(phase="backward", kind=f"grad_{key.kind}")
        structure = self._structure
        for user in structure.consumers.get(structure.tensor[row], ()):
            for given in user.of("input"):
                if structure.tensor[given] == structure.tensor[row]:
                    _, step, micro = user.scope
                    names = step, micro, "backward", user.module, user.number, "grad_input"
                    yield Key(*names, structure.path[given])
