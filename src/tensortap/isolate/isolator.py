"""Gives every module the reference's inputs in place of its own, and passes the reference's outputs on.

Each tensor that goes into a module or comes out of it is looked at first, then replaced by a new one that holds the
recorded values and stands in the same place of the autograd graph. What comes back through it in backward is the
gradient of exactly that module's input or output: it, too, is looked at and then replaced by the recorded one. So no
module ever works with what another one has made, and an input that is off before it is replaced was made so by the code
between modules.

The gradient at an output is taken where all its uses meet, also those inside the module, as capture records it; the one
at an input where only the module's own uses do. An output that the modules around return as it is has one gradient for
all of them, taken at the innermost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.capture.clock import Clock, ModuleCall
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.flatten import Opened, open_arguments, open_value
from tensortap.capture.selection import Selection
from tensortap.capture.swap import Swap, swapped
from tensortap.capture.tree import Site, Tree
from tensortap.capture.watcher import Watcher
from tensortap.core.records import Key
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import GradientReplacer, Substitution
from tensortap.isolate.comparator import Comparator
from tensortap.isolate.perturbation import Perturbation
from tensortap.isolate.reference import Counterpart, Reference
from tensortap.isolate.sameness import Level, Sameness

__all__ = ["Isolator"]

_GRADIENT_OF = {"input": "grad_input", "output": "grad_output"}
_DIFFERENTIATED = (
    "a backward ran with create_graph=True: gradients were compared there, but not replaced by the reference's"
)


class _Given(NamedTuple):
    """A tensor that a module got in place of another one."""

    path: str
    own: Any
    forced: Any
    version: int
    """Of `forced`, when the module got it."""


class _Open(NamedTuple):
    """What must be put in order once the module has run."""

    given: list[_Given]
    swaps: list[Swap]
    differentiable: bool
    """Whether an input or a parameter of its own takes part in autograd: then so should what comes of them."""


class _Found(NamedTuple):
    """What comes of one tensor, however often it is among a call's."""

    forced: Any | None
    """What takes its place; None if nothing can."""
    level: Level | None
    """Under which keys its gradient is recorded; None if it has none of its own."""


class Isolator(Watcher):
    """The hooks of an isolating check."""

    def __init__(
        self,
        framework: Framework,
        tree: Tree,
        chosen: Collection[str],
        selection: Selection,
        clock: Clock,
        book: CoverageBook,
        comparator: Comparator,
        reference: Reference,
        perturbation: Perturbation | None,
    ) -> None:
        super().__init__(framework, tree, chosen, selection, clock, book, comparator.record)
        self._substitution: Substitution = require(framework, Substitution, "an isolating check")
        self._reference = reference
        self._comparator = comparator
        self._perturbation = perturbation
        self._watched_gradients = self._kinds & set(_GRADIENT_OF.values())
        self._kinds -= self._watched_gradients  # they are seen on their way through the replaced tensors
        self._under_way: dict[int, _Open] = {}
        self._arrived: dict[Key, Any] = {}
        self._sameness = Sameness(framework.version)
        self._feeds = True

    def _drop_step_hooks(self) -> None:
        super()._drop_step_hooks()
        self._under_way.clear()
        self._arrived.clear()
        self._sameness.clear()

    # --- forward -----------------------------------------------------------------------------------------------
    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        opened = open_arguments(args, kwargs, self._framework.is_tensor)
        call = self._enter(site, opened)
        if site.name not in self._sites:
            return None
        self._comparator.called(call, self._clock.step, self._clock.caller())
        tensors = self._force(site, call, "input", opened)
        swaps: list[Swap] = []
        given = [
            _Given(path, own, forced, self._framework.version(forced))
            for (path, own), forced in zip(opened.tensors, tensors, strict=True)
            if own is not forced
        ]
        self._under_way[id(call)] = _Open(given, swaps, self._is_differentiable(site, tensors))
        if not given:
            return None
        others = iter(tensors)
        args = swapped(tuple(args), others, self._framework.is_tensor, swaps)
        named = dict(kwargs)
        return args, swapped(named, others, self._framework.is_tensor, swaps)

    def _after(self, site: Site, output: Any) -> Any:
        call = self._clock.leave(site.name)
        if site.name == "":
            self._collect_remarks()
        if call is None or site.name not in self._sites:
            return None
        opened = open_value(output, self._framework.is_tensor)
        self._leave(site, call, opened)
        under_way = self._under_way.pop(id(call), _Open([], [], False))
        tensors = self._force(site, call, "output", opened, under_way.given, under_way.differentiable)
        self._hand_back(under_way.given, opened, tensors)
        for swap in under_way.swaps:
            swap.restore()
        if all(own is forced for (_, own), forced in zip(opened.tensors, tensors, strict=True)):
            return None
        return swapped(output, iter(tensors), self._framework.is_tensor, [])

    def _force(
        self,
        site: Site,
        call: ModuleCall,
        kind: str,
        opened: Opened,
        given: Sequence[_Given] = (),
        may_be_cut: bool = True,
    ) -> list[Any]:
        """For each tensor, the one that takes its place: itself where the reference has none of its shape. One that
        takes no part in autograd is told of, if it `may_be_cut` off right here."""
        # What a module returns as it was given goes back to its caller's own tensor: the module has no part in it.
        unchanged = {id(g.forced): g for g in given if self._framework.version(g.forced) == g.version}
        found: dict[tuple[int, int], _Found] = {}
        tensors = []
        for path, tensor in opened.tensors:
            key = Key(self._clock.step, call.micro, "forward", site.name, call.number, kind, path)
            counterpart = self._reference.get(key)
            if counterpart is None or counterpart.location is None or counterpart.shape != tuple(tensor.shape):
                tensors.append(tensor)
                continue
            # One tensor given twice stays one: modules look at that, and its gradient is the sum of both uses.
            original = self._sameness.original(tensor, counterpart.tensor)
            spot = id(original), counterpart.tensor
            if (known := found.get(spot)) is None:
                known = self._replace(tensor, original, key, counterpart, site, unchanged.get(id(original)))
                found[spot] = known
            elif known.level is not None and kind == "output":
                known.level.keys.append(key)
            if known.forced is not None:
                self._comparator.mark_forced(key)
            if call.autograd and may_be_cut and not self._framework.requires_gradient(tensor):
                self._comparator.note_cut_off(key)
            tensors.append(tensor if known.forced is None else known.forced)
        return tensors

    def _is_differentiable(self, site: Site, inputs: Sequence[Any]) -> bool:
        own = [parameter for _, parameter in self._framework.parameters(site.owner)]
        return any(self._framework.requires_gradient(tensor) for tensor in (*inputs, *own))

    def _replace(
        self, tensor: Any, original: Any, key: Key, counterpart: Counterpart, site: Site, given: _Given | None
    ) -> _Found:
        """A tensor in the place of another one, which stands for its `original`; `given` is the input that it is, where
        the module returns one as it was."""
        if self._framework.unreadable(tensor):
            return _Found(None, None)
        level = Level(site, [key])
        if key.kind == "input":
            exchange = self._guard(partial(self._exchange, [level]))
            return _Found(self._forced(tensor, key, counterpart, site, exchange), level)
        arrive = self._guard(partial(self._arrive, key))
        if given is not None:
            forced = self._forced(given.own, key, counterpart, site, arrive)
            taken = self._reference.get(key._replace(kind="input", path=given.path))
            if forced is not None and taken is not None and taken.tensor == counterpart.tensor:
                self._sameness.stands_for(forced, given.own, counterpart.tensor)
            return _Found(forced, None)
        if (around := self._sameness.levels(original, counterpart.tensor)) is not None:
            around.append(level)  # a module inside has returned it, and looks at its gradient for this one, too
            forced = self._forced(tensor, key, counterpart, site, arrive)
            if forced is not None:
                self._sameness.stands_for(forced, tensor, counterpart.tensor)
            return _Found(forced, level)
        levels = [level]
        remove = self._substitution.replace_gradient(original, self._guard(partial(self._exchange, levels)))
        forced = self._forced(tensor, key, counterpart, site, arrive)
        if remove is not None:
            self._step_hooks.append(remove)
            if forced is not None:
                self._sameness.returned(forced, counterpart.tensor, levels)
        return _Found(forced, level)

    def _forced(
        self, tensor: Any, key: Key, counterpart: Counterpart, site: Site, exchange: GradientReplacer
    ) -> Any | None:
        forced = self._substitution.substitute(tensor, self._values(counterpart, key), exchange)
        if forced is None:
            self._book.remark(site.name, f"{key.kind} {key.path} cannot be replaced by the reference's")
        return forced

    def _hand_back(self, given: list[_Given], opened: Opened, tensors: list[Any]) -> None:
        """A module that changes its input in place changes what its caller holds: so must the replaced one's."""
        returned = {id(own): forced for (_, own), forced in zip(opened.tensors, tensors, strict=True)}
        for _, own, forced, version in given:
            if self._framework.version(forced) != version:
                self._substitution.overwrite(own, returned.get(id(forced), forced))

    # --- backward ----------------------------------------------------------------------------------------------
    def _exchange(self, levels: Sequence[Level], gradient: Any) -> npt.NDArray[np.generic] | None:
        """A gradient comes back through a replaced tensor: look at it, and send the recorded one on instead."""
        of = levels[0].keys[0]
        kind = _GRADIENT_OF[of.kind]
        if of.step != self._clock.step or kind not in self._watched_gradients:
            return None
        self._clock.backward_micro = of.micro
        if self._framework.unreadable(gradient):
            return None
        seen = self._look(levels, kind, gradient)
        if not seen:
            return None
        key, counterpart = seen[0]
        if counterpart is None or counterpart.location is None or counterpart.shape != tuple(gradient.shape):
            return None
        if self._substitution.is_differentiable(gradient):  # the recorded one has no past to differentiate again
            self._book.notice(_DIFFERENTIATED)
            return None
        for each, _ in seen:
            self._comparator.mark_forced(each)
        return self._values(counterpart, key)

    def _look(self, levels: Sequence[Level], kind: str, gradient: Any) -> list[tuple[Key, Counterpart | None]]:
        """Measure a gradient against each of its records."""
        seen = []
        here: Any | None = gradient
        for level in levels:
            arrived = self._arrived.pop(level.keys[0], None)
            for of in level.keys:
                key = of._replace(phase="backward", kind=kind)
                if self._reference.get(key) is None:
                    continue
                self._book.gradient(level.site.name)
                key, counterpart = self._comparator.look(gradient, key, level.site)
                seen.append((key, counterpart))
                if kind == "grad_output" and here is not None:
                    self._comparator.note_inner_use(key, arrived, here)
            here = arrived  # what comes from outside the one is all that comes to the next
        self._comparator.note_same([key for key, _ in seen])
        return seen

    def _arrive(self, of: Key, gradient: Any) -> None:
        """What a module's caller sends back to an output, before the module's own uses of it are added."""
        if _GRADIENT_OF[of.kind] in self._watched_gradients:
            self._arrived[of] = gradient

    def _values(self, counterpart: Counterpart, key: Key) -> npt.NDArray[np.generic]:
        values = self._reference.values(counterpart)
        return values if self._perturbation is None else self._perturbation.of(values, key)
