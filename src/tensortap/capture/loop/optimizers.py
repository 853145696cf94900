"""The optimizers of a tap: they decide when a step ends, and their steps are reported.

With several optimizers, a step ends when each has stepped at least once. If one steps more often than another, as a
critic does, its further steps belong to the same step. After the first `tap.step()`, only `tap.step()` ends steps.

An optimizer that is added later may replace the others, as in a second phase that trains other parameters. A step
therefore waits for the others only after they have stepped again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks.base import Remove
from tensortap.frameworks.capabilities import OptimizerStep, OptimizerSteps

__all__ = ["Optimizers", "StepCounter", "named_optimizers"]

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


def named_optimizers(optimizer: Any) -> dict[str, Any]:
    """Return one or several optimizers by name: the keys of a mapping, or the places in a list, from "0" on."""
    if isinstance(optimizer, Mapping):
        found = {str(name): each for name, each in optimizer.items()}
    elif isinstance(optimizer, (list, tuple)):
        found = {str(place): each for place, each in enumerate(optimizer)}
    else:
        return {"0": optimizer}
    if not found:
        raise UsageError("optimizer= is empty: leave it out and call tap.step() after each step instead")
    if len({id(each) for each in found.values()}) < len(found):
        raise UsageError("optimizer= has one optimizer twice: a step could never end")
    return found


class StepCounter:
    """Decides when a step ends, from the steps of each optimizer.

    >>> steps = StepCounter(["critic", "generator"])
    >>> [steps.stepped(name) for name in ("critic", "critic", "generator")]
    [False, False, True]
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.counts = dict.fromkeys(names, 0)
        """Steps of each optimizer since the last step ended."""
        self._idle: set[str] = set()
        """Optimizers that have not stepped since another one came. No step waits for them."""
        self._manual = False
        self._just_ended = False

    def stepped(self, name: str) -> bool:
        """Count a step of an optimizer. Return whether it ends the step."""
        self.counts[name] += 1
        self._idle.discard(name)
        ended = all(count for each, count in self.counts.items() if each not in self._idle)
        self._just_ended = ended and not self._manual
        return self._just_ended

    def called(self) -> bool:
        """Count a `tap.step()`. Return whether it ends a step: not if the optimizers have just ended it."""
        ends, self._manual, self._just_ended = not self._just_ended, True, False
        return ends

    def watch(self, names: Sequence[str], newest: str) -> None:
        """Count these optimizers from now on. `newest` has just come."""
        self.counts = {name: self.counts.get(name, 0) for name in names}
        self._idle = {name for name in names if name != newest}

    def clear(self) -> None:
        """Begin a step."""
        self.counts = dict.fromkeys(self.counts, 0)


class Optimizers:
    """Watches the optimizers of a tap."""

    def __init__(self, framework: OptimizerSteps, optimizer: Any, end_step: Callable[[], None]) -> None:
        self._framework = framework
        self._optimizers = named_optimizers(optimizer)
        self._end_step = end_step
        self._hooks: dict[str, Remove] = {}
        self.steps = StepCounter(list(self._optimizers))
        self.before: Callable[[str, Any], None] = lambda *_: None
        """Called with an optimizer's name and the optimizer before each of its steps, in recorded steps."""
        self.after: Callable[[str, OptimizerStep], None] = lambda *_: None
        """Called after each of its steps, in recorded steps."""
        self.ends: Callable[[Mapping[str, int]], None] = lambda *_: None
        """Called with the number of steps of each optimizer, when a recorded step ends."""

    @property
    def several(self) -> bool:
        return len(self._optimizers) > 1

    def place(self, guard: Guard, undo: ExitStack) -> None:
        """Place hooks on the optimizers."""
        self._guard = guard
        undo.callback(self._remove_hooks)
        for name, optimizer in self._optimizers.items():
            self._hook(name, optimizer)
        self._on_end = guard(lambda: self.ends(self.steps.counts))

    def add(self, optimizer: Any, instead_of: Sequence[Any]) -> None:
        """Watch another optimizer from now on. It takes over the name of the first one that it replaces, if any."""
        gone = [name for name, each in self._optimizers.items() if any(each is other for other in instead_of)]
        for name in gone:
            self._hooks.pop(name)()
            del self._optimizers[name]
        free = (str(place) for place in count() if str(place) not in self._optimizers)
        name = gone[0] if gone else next(free)
        self._optimizers[name] = optimizer
        self.steps.watch(list(self._optimizers), name)
        self._hook(name, optimizer)

    def _hook(self, name: str, optimizer: Any) -> None:
        before = partial(self._guard(self._before), name, optimizer)
        after = partial(self._stepped, self._guard(self._after), name)
        self._hooks[name] = self._framework.on_optimizer_step(optimizer, before, after)

    def _remove_hooks(self) -> None:
        for remove in self._hooks.values():
            remove()
        self._hooks.clear()

    def step_ends(self) -> None:
        """Report the end of a step, whether an optimizer or `tap.step()` has ended it."""
        if self.several:
            self._on_end()
        self.steps.clear()

    def _before(self, name: str, optimizer: Any) -> None:
        self.before(name, optimizer)

    def _after(self, name: str, step: OptimizerStep) -> None:
        self.after(name, step)

    def _stepped(self, after: Callable[..., Any], name: str, step: OptimizerStep) -> None:
        after(name, step)
        if self.steps.stepped(name):
            self._end_step()
