"""Counts: which step, which micro step, which call of which module; and which earlier call a recomputation repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tensortap.frameworks.base import Identity
from tensortap.frameworks.capabilities import Edge

__all__ = ["Clock", "ModuleCall"]

_REMEMBERED = 256
"""Micro steps whose calls may still be repeated; pipelines have far fewer under way."""


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of one module, from before it runs until after."""

    module: str
    micro: int
    number: int
    order: int
    """Execution order of calls within the step."""
    started_from: Sequence[Identity] = ()
    """What its input tensors were, to know them again when the call is repeated."""
    replay: bool = False
    """Whether this is itself a repetition."""
    replayed: bool = False
    """Whether it has been repeated."""
    inputs: Mapping[int, int] = field(default_factory=dict)
    """By address, the version of each input tensor: to see whether one of them comes out again as it is."""
    edges: Sequence[tuple[str, Edge]] = ()
    """Where each input's gradient arrives, by path."""
    mark: int = 0
    """The point in the autograd graph at which the call began."""
    autograd: bool = True
    """Whether autograd was on."""


@dataclass(slots=True)
class Clock:
    """Time as a run counts it. One for each tap."""

    step: int = 0
    _forwards: int = 0
    _order: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)
    _past: dict[str, list[ModuleCall]] = field(default_factory=dict)
    _cursor: int = -1
    _open: list[ModuleCall] = field(default_factory=list)
    backward_micro: int | None = None
    """The micro step whose gradient was the last to be seen, if one was since the last forward."""
    reentrant: bool = False
    """Whether the step has repeated a call that first ran without autograd: backward then comes in pieces."""

    @property
    def micro(self) -> int:
        return max(0, self._forwards - 1)

    @property
    def idle(self) -> bool:
        """Whether no call is under way."""
        return not self._open

    @property
    def gradient_micro(self) -> int:
        """The micro step whose backward is running: with pipelined schedules not always the newest."""
        return self.micro if self.backward_micro is None else self.backward_micro

    def next_step(self) -> None:
        self.step += 1
        self._forwards = self._order = 0
        self._numbers.clear()
        for calls in self._past.values():
            calls.clear()
        self._open.clear()
        self._cursor = -1
        self.backward_micro = None
        self.reentrant = False

    def calls_of(self, module: str) -> int:
        """How often the module has been called in the newest micro step."""
        return self._numbers.get(module, 0)

    def enter(self, module: str, inputs: Sequence[Identity]) -> ModuleCall:
        """A module is about to run. The root's forward, unless it calls itself, opens a micro step."""
        if module == "" and not any(call.module == "" for call in self._open):
            self._forwards += 1
            self._numbers.clear()
            if self._forwards % _REMEMBERED == 0:
                self._forget()
            self.backward_micro = None
        number = self._numbers.get(module, 0)
        self._numbers[module] = number + 1
        call = ModuleCall(module, max(0, self._forwards - 1), number, self._order, inputs)
        self._order += 1
        if (past := self._past.get(module)) is None:
            past = self._past[module] = []
        past.append(call)
        self._open.append(call)
        return call

    def _forget(self) -> None:
        """A loop that never ends its step, as in evaluation, must not be remembered for ever."""
        for module, calls in self._past.items():
            self._past[module] = [call for call in calls if call.micro > self.micro - _REMEMBERED]

    def enter_again(self, module: str, inputs: Sequence[Identity]) -> ModuleCall:
        """A module runs again inside backward: the call it repeats, or a new one if there was none to repeat.

        Regions are recomputed in reverse, the calls inside a region in order. A region starts from the very tensors
        that it started from the first time, so an input that is known again tells where in the step we are; from
        there the calls follow one another as they did.
        """
        past = self._past.get(module)
        if not past:
            return self.enter(module, inputs)
        known = [call for call in past if inputs and list(call.started_from) == list(inputs)]
        later = [call for call in past if call.order > self._cursor]
        first = next((c for c in known if not c.replayed), None) or next(iter(known), None)
        first = first or next((c for c in later if not c.replayed), None) or next(iter(later), None) or past[-1]
        first.replayed = True
        self.reentrant = self.reentrant or not first.autograd
        self._cursor = first.order
        call = ModuleCall(module, first.micro, first.number, first.order, replay=True)
        self._open.append(call)
        return call

    def caller(self) -> str | None:
        """The module whose code called the one that was entered last; None if that was called from outside."""
        return self._open[-2].module if len(self._open) > 1 else None

    def leave(self, module: str) -> ModuleCall | None:
        """The module has run. Calls that were never left, because something flew past their hooks, go with it."""
        if self._open and self._open[-1].module == module:
            return self._open.pop()
        for index in range(len(self._open) - 2, -1, -1):
            if self._open[index].module == module:
                call = self._open[index]
                del self._open[index:]
                return call
        return None
