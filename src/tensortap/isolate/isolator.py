"""Feeds every module the reference's inputs in place of its own, and passes on the reference's outputs.

The hooks measure each input and output of a module, then replace it by a new tensor that holds the recorded values and
has the same position in the autograd graph. In backward, the gradient that arrives at the new tensor is the gradient of
exactly that input or output: it is measured, and replaced by the recorded one. No module therefore computes with the
results of another, and an input that is wrong before its replacement was made wrong by the code between modules.

The gradient of an output is measured where all its uses meet, including those inside the module, as capture records it.
The gradient of an input is measured where only the module's own uses meet. An output that outer modules return
unchanged has one gradient for all of them, measured at the innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.selection import Selection
from tensortap.capture.watching.clock import Clock, ModuleCall
from tensortap.capture.watching.flatten import Opened, open_arguments, open_value
from tensortap.capture.watching.swap import Swap, swapped
from tensortap.capture.watching.watcher import Watcher
from tensortap.compare.measure.masks import in_convention_of
from tensortap.core.dtypes import numpy_dtype
from tensortap.core.records import Key
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import GradientReplacer, Substitution
from tensortap.isolate.aliases import CallBoundary, TensorAliases
from tensortap.isolate.comparator import Comparator
from tensortap.isolate.loss_scale import times
from tensortap.isolate.perturbation import Perturbation
from tensortap.isolate.reference import Counterpart, ReferenceRecords

__all__ = ["Isolator"]

_GRADIENT_OF = {"input": "grad_input", "output": "grad_output"}
_WHOLE = "iub"
"""NumPy's kinds of dtypes whose numbers count or select elements."""
_DIFFERENTIATED = (
    "a backward ran with create_graph=True: gradients were compared there, but not replaced by the reference's"
)


class TruthPass(Protocol):
    """Takes outermost calls, and the gradients that arrive at their outputs; see `truth.Truth`."""

    runs: bool
    """Whether the exact copy runs: a call of the model itself then comes from the copy's code."""

    def begin(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any], clock: Clock) -> None: ...

    def end(self, call: ModuleCall, chosen: Collection[str], raised: bool) -> None: ...

    def strays(self, site: Site) -> None: ...

    def arrived(self, of: Key, gradient: Any) -> None: ...

    def finish(self) -> None: ...

    def forget(self) -> None: ...


class _ReplacedInput(NamedTuple):
    """An input, and the substitute that the module received."""

    path: str
    own: Any
    substitute: Any
    version: int
    """Version of `substitute` when the module received it."""


class _RunningCall(NamedTuple):
    """A call in progress, and what must be undone when it returns."""

    inputs: list[_ReplacedInput]
    swaps: list[Swap]
    differentiable: bool
    """Whether an input or an own parameter requires gradients: then the outputs should, too."""


class _Replacement(NamedTuple):
    """The replacement of one tensor, however often it is among a call's inputs or outputs."""

    substitute: Any | None
    """None if the tensor cannot be replaced."""
    boundary: CallBoundary | None
    """The keys under which its gradient is recorded; None if it has no gradient of its own."""


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
        reference: ReferenceRecords,
        perturbation: Perturbation | None,
    ) -> None:
        super().__init__(framework, tree, chosen, selection, clock, book, comparator.record)
        self._substitution: Substitution = require(framework, Substitution, "an isolating check")
        self._reference = reference
        self._comparator = comparator
        self._perturbation = perturbation
        self._watched_gradients = self._kinds & set(_GRADIENT_OF.values())
        self._kinds -= self._watched_gradients  # they are measured at the replaced tensors instead
        self._running: dict[int, _RunningCall] = {}
        self._arrived: dict[Key, Any] = {}
        self._aliases = TensorAliases(framework.version)
        self._unseen = {reference.rename(each.name) for each in tree.sites if each.inside is not None}
        """Modules inside compiled ones, in the reference's names."""
        self._feeds = True
        self.truth: TruthPass | None = None
        """Computes the exact result of every outermost call, if it is wanted."""
        self.loss_scale: Callable[[int], float] = lambda _: 1.0
        """Step → by how much a scaler makes the model's gradients larger than the reference's."""

    def _see_end(self) -> None:
        super()._see_end()
        if self.truth is not None:
            self.truth.finish()

    def _drop_step_hooks(self) -> None:
        super()._drop_step_hooks()
        if self.truth is not None:
            self.truth.forget()
        self._running.clear()
        self._arrived.clear()
        self._aliases.clear()

    # --- forward -----------------------------------------------------------------------------------------------
    def _begin_call(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.truth is not None and self.truth.runs:
            self.truth.strays(site)
            return None
        return super()._begin_call(site, args, kwargs)

    def _end_call(self, site: Site, output: Any) -> Any:
        return None if self.truth is not None and self.truth.runs else super()._end_call(site, output)

    def _before(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.truth is not None and self._clock.idle and not self._framework.recomputing():
            self._begin_truth(self.truth, site, args, kwargs)
        opened = open_arguments(args, kwargs, self._framework.is_tensor)
        call = self._enter(site, opened)
        if site.name not in self._sites:
            return None
        self._comparator.called(call, self._clock.step, self._clock.caller())
        tensors = self._replace_all(site, call, "input", opened)
        swaps: list[Swap] = []
        inputs = [
            _ReplacedInput(path, own, substitute, self._framework.version(substitute))
            for (path, own), substitute in zip(opened.tensors, tensors, strict=True)
            if own is not substitute
        ]
        self._running[id(call)] = _RunningCall(inputs, swaps, self._is_differentiable(site, tensors))
        if not inputs:
            return None
        others = iter(tensors)
        args = swapped(tuple(args), others, self._framework.is_tensor, swaps)
        named = dict(kwargs)
        return args, swapped(named, others, self._framework.is_tensor, swaps)

    def _begin_truth(self, truth: TruthPass, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._clock.backward_ran:  # all gradients of the calls before have come
            self._record_pieces()
            truth.finish()
        truth.begin(site, args, kwargs, self._clock)

    def _after(self, site: Site, output: Any) -> Any:
        call = self._clock.leave(site.name)
        replaced = self._replace_outputs(site, call, output)
        if self.truth is not None and self._clock.idle and call is not None and not call.recomputed:
            self.truth.end(call, list(self._sites), raised=output is None)
        return replaced

    def _replace_outputs(self, site: Site, call: ModuleCall | None, output: Any) -> Any:
        if site.name == "":
            self._remarks.collect()
        if call is None or site.name not in self._sites:
            return None
        opened = open_value(output, self._framework.is_tensor)
        self._leave(site, call, opened)
        if call.autograd and self._holds_tensors(site.owner):
            self._comparator.note_holder(site.name)
        running = self._running.pop(id(call), _RunningCall([], [], False))
        tensors = self._replace_all(site, call, "output", opened, running.inputs, running.differentiable)
        self._copy_in_place_changes(running.inputs, opened, tensors)
        for swap in running.swaps:
            swap.restore()
        if all(own is substitute for (_, own), substitute in zip(opened.tensors, tensors, strict=True)):
            return None
        return swapped(output, iter(tensors), self._framework.is_tensor, [])

    def _replace_all(
        self,
        site: Site,
        call: ModuleCall,
        kind: str,
        opened: Opened,
        inputs: Sequence[_ReplacedInput] = (),
        differentiable: bool = True,
    ) -> list[Any]:
        """Return a substitute for each tensor, or the tensor itself if the reference has none of its shape.

        Those that autograd does not reach are noted. `differentiable`: whether it should.
        Whole numbers may be lengths or indexes of another tensor. If that one has another shape, they stay with it.
        """
        # An input that a module returns unchanged is its caller's own tensor: the module did not compute it.
        unchanged = {id(i.substitute): i for i in inputs if self._framework.version(i.substitute) == i.version}
        found: dict[tuple[int, int], _Replacement] = {}
        tensors = []
        keys = [
            Key(self._clock.step, call.micro, "forward", site.name, call.number, kind, path)
            for path, _ in opened.tensors
        ]
        counterparts = [self._reference.get(key) for key in keys]
        reshaped = any(
            counterpart is not None and counterpart.shape != tuple(tensor.shape)
            for counterpart, (_, tensor) in zip(counterparts, opened.tensors, strict=True)
        )
        for key, counterpart, (_, tensor) in zip(keys, counterparts, opened.tensors, strict=True):
            if counterpart is None or counterpart.location is None or counterpart.shape != tuple(tensor.shape):
                tensors.append(tensor)
                continue
            is_whole = numpy_dtype(counterpart.dtype).kind in _WHOLE
            # The code around a reordered tensor knows which token is where.
            if (reshaped and is_whole) or self._comparator.is_reordered(key):
                tensors.append(tensor)
                continue
            # A tensor passed twice stays one: modules test for it, and its gradient is the sum of both uses.
            original = self._aliases.original(tensor, counterpart.tensor)
            identity = id(original), counterpart.tensor
            if (known := found.get(identity)) is None:
                known = self._replace(tensor, original, key, counterpart, site, unchanged.get(id(original)))
                found[identity] = known
            elif known.boundary is not None and kind == "output":
                known.boundary.keys.append(key)
            if known.substitute is not None:
                self._comparator.mark_forced(key)
            if call.autograd and not self._framework.requires_gradient(tensor):
                self._comparator.note_detached(key, from_inside=differentiable)
            elif kind == "output" and (self._aliases.is_changed(tensor) or self._is_read_inside_alone(site, key)):
                self._comparator.note_kept_inside(key)
            tensors.append(tensor if known.substitute is None else known.substitute)
        return tensors

    def _is_read_inside_alone(self, site: Site, key: Key) -> bool:
        """Whether a compiled layer may be the only code that uses an output of its own."""
        return site.compiled and bool(site.name) and not self._reference.given_outside(key)

    def _holds_tensors(self, module: Any) -> bool:
        """Whether a module has an attribute that autograd reaches and that is neither parameter nor buffer."""
        is_tensor, reached = self._framework.is_tensor, self._framework.requires_gradient
        own = {id(parameter) for _, parameter in self._framework.parameters(module)}
        values = [each for each in vars(module).values() if is_tensor(each) and id(each) not in own]
        return any(reached(each) for each in values)

    def _is_differentiable(self, site: Site, inputs: Sequence[Any]) -> bool:
        own = [parameter for _, parameter in self._framework.parameters(site.owner)]
        return any(self._framework.requires_gradient(tensor) for tensor in (*inputs, *own))

    def _replace(
        self,
        tensor: Any,
        original: Any,
        key: Key,
        counterpart: Counterpart,
        site: Site,
        passed_through: _ReplacedInput | None,
    ) -> _Replacement:
        """Replace a tensor, which itself is an alias of `original`.

        passed_through: the input that this output is, if the module returns it unchanged.
        """
        if self._framework.unreadable(tensor):
            return _Replacement(None, None)
        boundary = CallBoundary(site, [key])
        if key.kind == "input":
            exchange = self._guard(partial(self._exchange, [boundary]))
            return _Replacement(self._substitute(tensor, key, counterpart, site, exchange), boundary)
        arrive = self._guard(partial(self._arrive, key))
        if passed_through is not None:
            own = passed_through.own
            substitute = self._substitute(own, key, counterpart, site, arrive)
            recorded_input = self._reference.get(key._replace(kind="input", path=passed_through.path))
            same = recorded_input is not None and recorded_input.tensor == counterpart.tensor
            if substitute is not None and same:
                self._aliases.add_substitute(substitute, own, counterpart.tensor)
            return _Replacement(substitute, None)
        if (inner := self._aliases.boundaries(original, counterpart.tensor)) is not None:
            inner.append(boundary)  # an inner module returned it, and its gradient is measured there for this one, too
            substitute = self._substitute(tensor, key, counterpart, site, arrive)
            if substitute is not None:
                self._aliases.add_substitute(substitute, tensor, counterpart.tensor)
            return _Replacement(substitute, boundary)
        boundaries = [boundary]
        remove = self._substitution.replace_gradient(original, self._guard(partial(self._exchange, boundaries)))
        substitute = self._substitute(tensor, key, counterpart, site, arrive)
        if remove is not None:
            self._step_hooks.append(remove)
            if substitute is not None:
                self._aliases.add_output(substitute, counterpart.tensor, boundaries)
        return _Replacement(substitute, boundary)

    def _substitute(
        self, tensor: Any, key: Key, counterpart: Counterpart, site: Site, exchange: GradientReplacer
    ) -> Any | None:
        values = self._values(counterpart, key)
        if self._comparator.is_mask(key):
            values = in_convention_of(self._framework.host(tensor), values)
        substitute = self._substitution.substitute(tensor, values, exchange)
        if substitute is None:
            self._book.remark(site.name, f"{key.kind} {key.path} cannot be replaced by the reference's")
        return substitute

    def _copy_in_place_changes(self, inputs: list[_ReplacedInput], opened: Opened, tensors: list[Any]) -> None:
        """Copy in-place changes of substitutes to the caller's own tensors."""
        returned = {id(own): substitute for (_, own), substitute in zip(opened.tensors, tensors, strict=True)}
        for _, own, substitute, version in inputs:
            if self._framework.version(substitute) != version:
                self._substitution.overwrite(own, returned.get(id(substitute), substitute))
                self._aliases.add_changed(own)

    # --- backward ----------------------------------------------------------------------------------------------
    def _exchange(self, boundaries: Sequence[CallBoundary], gradient: Any) -> npt.NDArray[np.generic] | None:
        """Measure the gradient of a replaced tensor, and return the recorded one to propagate instead."""
        of = boundaries[0].keys[0]
        kind = _GRADIENT_OF[of.kind]
        if of.step != self._clock.step or kind not in self._watched_gradients:
            return None
        self._clock.backward_micro = of.micro
        if self._framework.unreadable(gradient):
            return None
        seen = self._measure(boundaries, kind, gradient)
        if not seen:
            return None
        key, counterpart = seen[0]
        site = boundaries[0].site
        if kind == "grad_output" and self._may_be_read_inside(site, of, key):
            return None
        if self._comparator.was_added(key):  # the first part was replaced by the recorded sum
            return np.zeros_like(self._framework.host(gradient))
        if counterpart is None or counterpart.location is None or counterpart.shape != tuple(gradient.shape):
            return None
        if self._comparator.is_part(key):
            return None
        if self._substitution.is_differentiable(gradient):  # the recorded one has no graph to differentiate again
            self._book.notice(_DIFFERENTIATED)
            self._comparator.differentiated.add((of.step, of.micro))
            return None
        for each, _ in seen:
            self._comparator.mark_forced(each)
        return times(self._values(counterpart, key), self.loss_scale(of.step))

    def _measure(
        self, boundaries: Sequence[CallBoundary], kind: str, gradient: Any
    ) -> list[tuple[Key, Counterpart | None]]:
        """Measure a gradient against each of its records."""
        seen = []
        here: Any | None = gradient
        share = self._share(boundaries[0]) if kind == "grad_output" else None
        for boundary in boundaries:
            arrived = self._arrived.pop(boundary.keys[0], None)
            for of in boundary.keys:
                key = of._replace(phase="backward", kind=kind)
                if self._reference.get(key) is None:
                    continue
                self._book.gradient(boundary.site.name)
                key, counterpart = self._comparator.measure(gradient, key, boundary.site, share)
                seen.append((key, counterpart))
                if kind == "grad_output" and here is not None:
                    self._comparator.note_inner_use(key, arrived, here)
            here = arrived  # the part from outside this call is the whole gradient of the next outer one
        self._comparator.note_same([key for key, _ in seen])
        return seen

    def _may_be_read_inside(self, site: Site, of: Key, key: Key) -> bool:
        """Whether code inside a graph may read a value that the graph returns, so that a gradient, which was measured
        by its key, lacks a share that the recorded one has."""
        if site.compiled and not site.name:
            return True
        shown = site.compiled or not self._unseen.isdisjoint(self._reference.makers(of))
        return shown and self._comparator.is_off(key)

    def _share(self, boundary: CallBoundary) -> Counterpart | None:
        """Return the share of a gradient that comes from outside a compiled layer: what its code inside the graph does
        with its own outputs does not arrive at them."""
        name = boundary.site.name
        if not (boundary.site.compiled and name and self._reference.shows_inside(name)):
            return None
        return self._reference.from_outside(boundary.keys[0]._replace(phase="backward", kind="grad_output"))

    def _arrive(self, of: Key, gradient: Any) -> None:
        """Note the gradient of an output from outside its module, before the module's own uses add to it."""
        if _GRADIENT_OF[of.kind] in self._watched_gradients:
            self._arrived[of] = gradient
        if self.truth is not None:
            self.truth.arrived(of, gradient)

    def _values(self, counterpart: Counterpart, key: Key) -> npt.NDArray[np.generic]:
        values = self._reference.values(counterpart)
        return values if self._perturbation is None else self._perturbation.apply(values, key)
