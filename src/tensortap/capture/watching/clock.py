"""Counts steps, micro steps and calls of modules, and finds the earlier call that a recomputation repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensortap.frameworks.base import Identity
from tensortap.frameworks.capabilities import Edge

__all__ = ["Clock", "ModuleCall"]

_MOST_MICRO_STEPS = 256
"""Micro steps whose calls may still be recomputed; pipelines have far fewer in flight."""


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of one module, from before it runs until after."""

    module: str
    micro: int
    number: int
    order: int
    """Execution order of calls within the step."""
    started_from: Sequence[Identity] = ()
    """Identities of its input tensors, to recognise them in a recomputation."""
    recomputed: bool = False
    """Whether this is itself a recomputation."""
    repeats: ModuleCall | None = None
    """The call that this recomputation repeats, if it is unambiguous."""
    samples: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    """A few elements of its inputs and outputs, by kind and path."""
    caller: str | None = None
    """The module whose code made the call, if it was sampled and did not come from outside."""
    was_recomputed: bool = False
    """Whether a later call has recomputed it."""
    inputs: Mapping[int, int] = field(default_factory=dict)
    """Version of each input tensor by id, to detect an input that is returned unchanged."""
    edges: Sequence[tuple[str, Edge]] = ()
    """The edge at which each input's gradient arrives, by path."""
    mark: int = 0
    """The point in the growth of the autograd graph at which the call began."""
    autograd: bool = True
    """Whether autograd was on."""
    opens: bool = False
    """Whether the call opened a micro step."""
    reached: bool = False
    """Whether autograd reaches one of its inputs."""
    in_graph: bool = False
    """Whether the call runs inside a compiled graph."""
    watched_inside: frozenset[str] = frozenset()
    """Paths of outputs whose gradient comes from inside its graph."""


@dataclass(slots=True)
class Clock:
    """The counters of one tap."""

    step: int = 0
    _forwards: int = 0
    _order: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)
    _past: dict[str, list[ModuleCall]] = field(default_factory=dict)
    _cursor: int = -1
    _open: list[ModuleCall] = field(default_factory=list)
    _rooted: bool = False
    """Whether the root was called in the newest micro step."""
    backward_ran: bool = False
    """Whether a gradient came since the newest micro step began."""
    backward_micro: int | None = None
    """The micro step of the last gradient, if one came since the last forward."""
    reentrant: bool = False
    """Whether the step has recomputed a call that first ran without autograd: backward then comes in pieces."""
    _guessed: set[str] = field(default_factory=set)
    """Modules of which a recomputation in the step may have repeated any of several calls."""
    _is_placed: bool = False
    """Whether it is known which call the last recomputation repeated: those of its region follow."""

    @property
    def micro(self) -> int:
        return max(0, self._forwards - 1)

    @property
    def idle(self) -> bool:
        """Whether no call is in progress."""
        return not self._open

    @property
    def gradient_micro(self) -> int:
        """The micro step whose backward is running, which is not always the newest with pipelined schedules."""
        return self.micro if self.backward_micro is None else self.backward_micro

    def next_step(self) -> None:
        self.step += 1
        if self._order:  # nothing was counted in a step that is not recorded
            self._numbers.clear()
            for calls in self._past.values():
                calls.clear()
        self._forwards = self._order = 0
        self._guessed.clear()
        self._is_placed = False
        self._open.clear()
        self._cursor = -1
        self.backward_micro = None
        self.reentrant = self._rooted = self.backward_ran = False

    def restart(self) -> None:
        """Forget everything that was counted."""
        self.next_step()
        self.step = 0

    def calls_of(self, module: str) -> int:
        """Return the number of calls of the module in the newest micro step."""
        return self._numbers.get(module, 0)

    def enter(self, module: str, inputs: Sequence[Identity], recomputing: bool = False) -> ModuleCall:
        """Count a call that begins.

        A micro step begins with the first call of a step, with each further forward of the root (unless the root calls
        itself), and with the first call from outside after a backward. The last covers programs that call parts of a
        model, never its root.
        """
        root = module == "" and not any(call.module == "" for call in self._open)
        opens = False
        if root or not self._open:
            opens = not self._forwards or (root and self._rooted) or (self.backward_ran and not recomputing)
            if opens:
                self._open_micro_step()
            self._rooted = self._rooted or root
        number = self._numbers.get(module, 0)
        self._numbers[module] = number + 1
        call = ModuleCall(module, self._forwards - 1, number, self._order, inputs, opens=opens)
        self._order += 1
        if (past := self._past.get(module)) is None:
            past = self._past[module] = []
        past.append(call)
        self._open.append(call)
        return call

    def _open_micro_step(self) -> None:
        self._forwards += 1
        self._numbers.clear()
        if self._forwards % _MOST_MICRO_STEPS == 0:
            self._drop_old_calls()
        self.backward_micro = None
        self._rooted = self.backward_ran = False

    def _drop_old_calls(self) -> None:
        """Drop calls of early micro steps, so that a loop that never ends its step does not grow for ever."""
        for module, calls in self._past.items():
            self._past[module] = [call for call in calls if call.micro > self.micro - _MOST_MICRO_STEPS]

    def enter_recomputation(self, module: str, inputs: Sequence[Identity]) -> ModuleCall:
        """Return the call that a module repeats inside backward, or a new one if there is none to repeat.

        Regions are recomputed in reverse, the calls inside a region in order. A region starts from the same tensors as
        the first time, so a recognised input shows the position in the step. From there the calls follow one another
        as before.
        """
        past = self._past.get(module)
        if not past:
            return self.enter(module, inputs, recomputing=True)
        known = [call for call in past if inputs and list(call.started_from) == list(inputs)]
        later = [call for call in past if call.order > self._cursor]
        waiting = sum(not call.was_recomputed for call in past)
        first = next((c for c in known if not c.was_recomputed), None) or next(iter(known), None)
        first = first or next((c for c in later if not c.was_recomputed), None) or next(iter(later), None) or past[-1]
        follows = self._is_placed and first in later and not first.was_recomputed
        if waiting > 1 and first not in known and not follows:
            self._guessed.add(module)  # which of them is left afterwards is a guess, too
        certain = first if waiting == 1 and not first.was_recomputed and module not in self._guessed else None
        self._is_placed = first in known or follows or certain is not None
        return self._recompute(first, certain)

    def recompute_again(self, module: str, order: int) -> ModuleCall:
        """Enter the recomputation of the call with this order, as `enter_recomputation` found it in another step."""
        past = self._past[module]
        return self._recompute(next((call for call in past if call.order == order), past[-1]), None)

    def _recompute(self, first: ModuleCall, certain: ModuleCall | None) -> ModuleCall:
        first.was_recomputed = True
        self.reentrant = self.reentrant or not first.autograd
        self._cursor = first.order
        call = ModuleCall(first.module, first.micro, first.number, first.order, recomputed=True, repeats=certain)
        self._open.append(call)
        return call

    def enter_graph(self) -> bool:
        """Begin a run of a compiled graph that is not part of a call. Return whether a micro step begins with it."""
        opens = not self._forwards or self._rooted or self.backward_ran
        if opens:
            self._open_micro_step()
        return opens

    def count_in_graph(
        self, module: str, micro: int, number: int, recomputed: bool, outermost: bool = False
    ) -> ModuleCall:
        """Count a call inside a compiled graph, which has a number already. Calls of a graph come in any order."""
        call = ModuleCall(module, micro, number, self._order, recomputed=recomputed, in_graph=True)
        self._order += 1
        past = self._past.setdefault(module, [])
        if recomputed:
            same = [each for each in past if (each.micro, each.number) == (micro, number)]
            call.repeats = same[0] if len(same) == 1 else None
        else:
            past.append(call)
            self._numbers[module] = max(number + 1, self._numbers.get(module, 0))
            self._rooted = self._rooted or (outermost and module == "")
        return call

    @property
    def innermost(self) -> ModuleCall | None:
        """The call that was entered last and has not returned."""
        return self._open[-1] if self._open else None

    @property
    def calling(self) -> ModuleCall | None:
        """The call whose code made the innermost one; None if that came from outside."""
        return self._open[-2] if len(self._open) > 1 else None

    def copy(self) -> Clock:
        """Return a clock that numbers the calls that come next as this one will."""
        counted = Clock(self.step, self._forwards, self._order, dict(self._numbers))
        counted._rooted, counted.backward_ran = self._rooted, self.backward_ran
        return counted

    def caller(self) -> str | None:
        """Return the module that called the one that was entered last; None if it was called from outside."""
        return None if self.calling is None else self.calling.module

    def leave(self, module: str) -> ModuleCall | None:
        """End a module's call, together with inner calls whose hooks an exception skipped."""
        if self._open and self._open[-1].module == module:
            return self._open.pop()
        for index in range(len(self._open) - 2, -1, -1):
            if self._open[index].module == module:
                call = self._open[index]
                del self._open[index:]
                return call
        return None
