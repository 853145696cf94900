"""How a run went whose modules were fed from the reference."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import Key

__all__ = ["Callers", "CallersInStructure", "Isolation"]


class Callers(Protocol):
    """The modules that made calls, by step, micro step, module and number."""

    def get(self, call: tuple[int, int, str, int], /) -> str | None: ...


class CallersInStructure:
    """The modules around calls, as their names and order show them."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._ranks: dict[int, list[int]] = {}
        for rank, step in structure.kinds_in_step:
            self._ranks.setdefault(step, []).append(rank)

    def get(self, call: tuple[int, int, str, int], /) -> str | None:
        """Return the module that made a call; that of the last rank, if several have it."""
        step, micro, module, number = call
        spots = [((rank, step, micro), module, number) for rank in self._ranks.get(step, ())]
        found = [made for spot in spots if (made := self._structure.calls.get(spot)) is not None]
        if not found:
            return None
        last = max(found, key=lambda made: made.first_row)
        return None if last.parent is None else last.parent.module


@dataclass(frozen=True)
class Isolation:
    """How a run with modules fed from the reference went. Names are the reference's."""

    forced: Collection[int] = ()
    """The candidate's rows that were replaced by the reference's values after they were measured."""
    used_inside: Collection[int] = ()
    """Rows of gradients at an output that the module itself uses again: a part of such a gradient is its own."""
    same: Collection[Sequence[int]] = ()
    """Groups of rows that are one gradient, at an output that several calls return unchanged; innermost first."""
    callers: Callers = field(default_factory=dict[tuple[int, int, str, int], str | None])
    """By step, micro step, module and number: the module that made the call; None for code outside the model."""
    cut_off: Container[Key] = ()
    """Inputs outside the autograd graph; and outputs outside it although one of their sources is inside."""
    outside: Container[Key] = ()
    """Outputs outside the graph, of which no source is inside, either."""
    kept_inside: Container[Key] = ()
    """Outputs whose gradient stays inside a module: one that changed its caller's value in place, or a compiled one
    that is the only user of what it returns."""
    tied: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By module: other modules whose parameters it uses as well."""
    holders: Collection[str] = ()
    """Modules that pass on tensors by their attributes, such as an auxiliary loss: these cannot be replaced."""

    differentiated: Collection[tuple[int, int]] = ()
    """Steps and micro steps with a backward that was differentiated again: its gradients were not replaced."""

    @property
    def knows_graph(self) -> bool:
        """Whether it is known which values are outside the autograd graph."""
        return self.cut_off != ()

    def caller(self, call: CallRows) -> str | None:
        _, step, micro = call.scope
        return self.callers.get((step, micro, call.module, call.number))

    def is_cut_off(self, call: CallRows, kind: str, path: str) -> bool:
        _, step, micro = call.scope
        return Key(step, micro, "forward", call.module, call.number, kind, path) in self.cut_off

    def is_outside(self, call: CallRows, path: str) -> bool:
        """Whether neither an output nor anything that it was made from is in the graph."""
        _, step, micro = call.scope
        return Key(step, micro, "forward", call.module, call.number, "output", path) in self.outside

    def keeps_gradient(self, key: Key) -> bool:
        """Whether the gradient of an output stays inside a module, where a check does not see it."""
        return key.kind == "grad_output" and key._replace(phase="forward", kind="output") in self.kept_inside

    def is_detached(self, call: CallRows, path: str) -> bool:
        """Whether an output is outside the graph, for either reason."""
        return self.is_cut_off(call, "output", path) or self.is_outside(call, path)

    def cutter(self, call: CallRows, path: str, structure: Structure, lost: Collection[Key] = ()) -> str | None:
        """Return the module that detached an input: the one that returned it detached, or the caller.

        lost: gradients that only the reference has.
        """
        tensors = {structure.tensor[row] for row in call.of("input") if structure.path[row] == path}
        makers = [
            (maker, structure.path[row])
            for tensor in tensors
            for maker, row in structure.makers.get(tensor, ())
            if maker.end < call.begin  # one that ran inside only passes it through
        ]
        for maker, output in reversed(makers):
            if self.is_cut_off(maker, "output", output):
                return maker.module
        for maker, output in makers[:1]:
            paths = [structure.path[row] for row in maker.of("input")]
            if paths and self.is_outside(maker, output):  # the graph ends further back
                return self.cutter(maker, paths[0], structure, lost)
        # The caller itself may have been given a detached value. The model's own inputs are always detached.
        around = call.parent
        if around is not None and around.parent is not None and around.module == self.caller(call):
            given = [structure.path[row] for row in around.of("input")]
            _, step, micro = around.scope
            names = step, micro, "backward", around.module, around.number, "grad_input"
            sent = [each for each in given if Key(*names, each) in lost]
            if sent and not around.of("grad_input"):  # its own code makes the input of detached ones alone
                tensors |= {structure.tensor[row] for row in around.of("input") if structure.path[row] in sent}
            for row in around.of("input"):
                if structure.tensor[row] in tensors and self.is_cut_off(around, "input", structure.path[row]):
                    return self.cutter(around, structure.path[row], structure, lost)
        return self.caller(call)
