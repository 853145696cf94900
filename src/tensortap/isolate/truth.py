"""The truth of a check: the model's own modules in float64, each on the reference's recorded inputs and gradients.

While the model runs, tensors that differ from the reference's are kept in their own dtype. When an outermost call and
its backward are over, a float64 copy of the model runs on the same arguments, fed from the reference like the model
itself (`exact_pass.py`), and then backward from the gradients that the model got. Each tensor of the copy is then the
exact result of one module, or of the code of one container, and the distance of both sides from it is measured. The
copy does not run if nothing differs, and runs no backward if no gradient does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.watching.clock import Clock, ModuleCall
from tensortap.core.interrupts import interrupt_in
from tensortap.core.records import Key, display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import ExactExecution
from tensortap.isolate.exact_pass import CalledOriginal, ExactPass
from tensortap.isolate.loss_scale import times
from tensortap.isolate.reference import ReferenceRecords
from tensortap.kernels.pairs.truth import TruthMeasure, measure_truth

__all__ = ["FLOAT64", "Truth"]

FLOAT64 = "float64"
_FORWARD = ("input", "output")
_BACKWARD = ("grad_input", "grad_output", "param_grad")
_REPEATED = "a forward with several backward passes: their gradients have no truth"

Array = npt.NDArray[Any]


@dataclass
class _OutermostCall:
    """A call of the model, kept until its gradients are known."""

    site: Site
    copy: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    clock: Clock
    call: ModuleCall | None = None
    chosen: Collection[str] = ()
    gradients: dict[str, Array] = field(default_factory=dict)
    """Output → the gradient that arrived from outside the model."""
    repeated: bool = False
    """Whether gradients arrived more than once."""

    @property
    def micro(self) -> int:
        return -1 if self.call is None else self.call.micro

    def is_of(self, key: Key) -> bool:
        """Whether a tensor is among what this call itself takes or returns."""
        call = self.call
        return call is not None and (key.module, key.micro, key.call) == (self.site.name, call.micro, call.number)


class Truth:
    """Runs the float64 copy after each outermost call, and collects the distances of both sides from its results."""

    def __init__(self, framework: Framework, model: Any, reference: ReferenceRecords, given: Any) -> None:
        """Prepare the truth. `given` is "float64", or the reference's model, whose modules then run in float64."""
        self._framework = framework
        self._exact: ExactExecution = require(framework, ExactExecution, "a truth")
        if framework.world() > 1:
            raise UsageError("truth= needs a single process: its extra forward would wait for the other ranks")
        self._model = model
        self.of_reference = not isinstance(given, str)
        """Whether the reference's own model computes the truth, not the model that is checked."""
        self._rename = reference.rename
        if self.of_reference:
            self._model = _checked_model(given, framework)
            reference = ReferenceRecords(reference.run, reference.rank, lambda name: name)
        elif given != FLOAT64:
            raise UsageError(f'truth: {given!r} is neither "{FLOAT64}" nor a model')
        self._reference = reference
        self._gradients = frozenset(_BACKWARD) & set(reference.kinds)
        self.measured: dict[int, TruthMeasure] = {}
        """Row → distances of both sides from the truth."""
        self.random: dict[str, None] = {}
        """Modules whose own code draws random numbers: they have no truth."""
        self.rounded: dict[str, dict[str, None]] = {}
        """Operations that have no float64 kernel → modules whose own code runs them: they have no truth, either."""
        self.failures: dict[str, None] = {}
        """Why the copy could not be made, or could not run."""
        self._failed: dict[str, None] = {}
        """Modules that differ from the reference's and have no truth, because the copy failed."""
        self._differing: dict[Key, tuple[int, Array]] = {}
        self._begun: _OutermostCall | None = None
        self._waiting: list[_OutermostCall] = []
        """Calls whose gradients are still to come."""
        self.runs = False
        self._pass: ExactPass | None = None
        self.is_mask: Callable[[Key], bool] = lambda _: False
        """Returns whether a tensor of the candidate is a mask, which each model takes in its own convention."""
        self.is_reordered: Callable[[Key], bool] = lambda _: False
        """Returns whether a tensor of the candidate has its tokens in an order of its own."""
        self.loss_scale: Callable[[int], float] = lambda _: 1.0
        """Step → by how much a scaler makes the model's gradients larger than the reference's."""

    # --- the calls of the model --------------------------------------------------------------------------------
    def begin(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any], clock: Clock) -> None:
        """Copy the model and the arguments of an outermost call, before it can change either."""
        self._begun = None
        try:
            copy = self._exact.exact_copy(self._model)
            own_args, own_kwargs = self._exact.exact_value((args, dict(kwargs)))
            self._begun = _OutermostCall(site, copy, own_args, own_kwargs, clock.copy())
        except Exception as error:
            self._note_failure("the model cannot be copied", error)

    def differs(self, row: int, key: Key, values: Array) -> None:
        """Keep a tensor that differs from the reference's, until its truth is known. The row is the candidate's."""
        if key.kind in _FORWARD or key.kind in self._gradients:
            self._differing[self._own(key)] = row, np.array(values)

    def end(self, call: ModuleCall, chosen: Collection[str], raised: bool) -> None:
        """Take note that the outermost call returned. Unless a backward will follow, its copy runs now."""
        begun, self._begun = self._begun, None
        if begun is None or raised:
            self._give_up()
            return
        begun.call, begun.chosen = call, chosen
        self._waiting.append(begun)
        if not (self._gradients and call.autograd):
            self.finish()

    def arrived(self, of: Key, gradient: Any) -> None:
        """Take the gradient of an output that comes from outside its module; those of an outermost call start the
        copy's backward."""
        for call in self._waiting:
            if call.is_of(of):
                call.repeated = call.repeated or of.path in call.gradients
                values = np.array(self._framework.host(gradient))
                call.gradients[of.path] = times(values, 1 / self.loss_scale(of.step))

    def finish(self) -> None:
        """Run the copies of all calls that ended, if anything differed in them."""
        waiting, self._waiting = self._waiting, []
        totals = _ParameterGradients(self._framework)
        for call in waiting:
            if self._differing:
                self._run(call, totals)
        for key, gradient in totals.by_key([call.micro for call in waiting], self._differing, self._reference):
            self._measure(gradient, key)
        self._give_up()

    def forget(self) -> None:
        """Forget all calls, because the step is over or failed."""
        self._begun = None
        self._waiting.clear()
        self._differing.clear()

    # --- the float64 copy --------------------------------------------------------------------------------------
    def _run(self, call: _OutermostCall, totals: _ParameterGradients) -> None:
        name, chosen = call.site.name, call.chosen
        if self.of_reference:
            name, chosen = self._rename(name), [self._rename(each) for each in chosen]
        tree = Tree(self._framework, call.copy)
        called = next((each for each in tree.sites if each.name == name), None)
        if called is None:
            self.failures[f"the truth's model has no {display_name(name)}"] = None
            return
        backward = any(key.kind in _BACKWARD for key in self._differing) and bool(call.gradients)
        if backward and call.repeated:
            self.failures[_REPEATED], backward = None, False
        kinds = (*_FORWARD, *(self._gradients if backward else ()))
        told = self.is_mask, self.is_reordered
        exact = ExactPass(self._framework, tree, chosen, kinds, call.clock, self._reference, *told)
        self._pass = exact
        exact.seen, exact.spoilt = self._measure, self._note_spoilt
        exact.parameter_gradient = totals.add
        self.runs, before = True, dict(self.measured)
        try:
            exact.run(self._exact, called, (call.args, call.kwargs), call.gradients if backward else {})
        except CalledOriginal as error:
            self.measured = before
            self._note_failure("the model cannot be copied", error)
        except Exception as error:
            self._note_failure("the model does not run in float64", error)
        finally:
            self.runs, self._pass = False, None

    def strays(self, site: Site) -> None:
        """Take note that the copy's code calls the model that it was copied from."""
        if self._pass is not None:
            self._pass.called_original = display_name(site.name)

    def _measure(self, tensor: Any, key: Key) -> None:
        """Measure both sides against a tensor of the copy."""
        found = self._reference.get(key)
        if key not in self._differing or found is None or found.location is None:
            return
        row, candidate = self._differing[key]
        truth = self._framework.host(tensor)
        if truth.shape == candidate.shape == found.shape and truth.dtype.kind == "f":
            self.measured[row] = measure_truth(truth, self._reference.values(found), candidate)
        del self._differing[key]

    def _note_spoilt(self, module: str, key: Key, operation: str) -> None:
        if self._differing.pop(key, None) is None:
            return
        if operation:
            self.rounded.setdefault(operation, {})[self._named(module)] = None
        else:
            self.random[self._named(module)] = None

    # --- what has no truth -------------------------------------------------------------------------------------
    def notes(self) -> list[str]:
        """Return what has no truth, and why."""
        found = [f"no truth: {why}" for why in self.failures]
        if self._failed:
            found.append(f"not judged against {FLOAT64}: {_listed(self._failed)}")
        if self.random:
            found.append(f"no truth for {len(self.random)} modules that draw random numbers: {_listed(self.random)}")
        for operation, modules in self.rounded.items():
            found.append(f"not judged, because {operation} has no {FLOAT64} kernel: {_listed(modules)}")
        return found

    def unjudged(self) -> list[str]:
        """Return the modules that differ from the reference's and have no truth."""
        return [
            *dict.fromkeys([*self._failed, *self.random, *(name for each in self.rounded.values() for name in each)])
        ]

    def _give_up(self) -> None:
        """Forget tensors that got no truth, and note them if that is because the copy failed."""
        if not self._waiting:
            if self.failures:
                self._failed |= {self._named(key.module): None for key in self._differing}
            self._differing.clear()

    def _note_failure(self, what: str, error: Exception) -> None:
        if (interrupt := interrupt_in(error)) is not None:
            raise interrupt
        text = str(error).strip().splitlines() or [""]
        self.failures[f"{what} ({type(error).__name__}: {text[0][:200]})"] = None

    def _own(self, key: Key) -> Key:
        """Return the key with the name that the copy has for its module."""
        return key._replace(module=self._rename(key.module)) if self.of_reference else key

    def _named(self, module: str) -> str:
        """Return the reference's name of a module of the copy."""
        return module if self.of_reference else self._rename(module)


class _ParameterGradients:
    """The gradients of parameters, summed over the copies of calls that may share one backward."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._by_micro: dict[tuple[str, str], dict[int, Any]] = {}

    def add(self, key: Key, gradient: Any) -> None:
        found = self._by_micro.setdefault((key.module, key.path), {})
        before = found.get(key.micro)
        found[key.micro] = self._framework.copy(gradient) if before is None else self._framework.add(before, gradient)

    def by_key(
        self, micros: Collection[int], wanted: Collection[Key], reference: ReferenceRecords
    ) -> list[tuple[Key, Any]]:
        """Return the gradient of each wanted record of a parameter.

        If the calls had one backward each, there is a record for each micro step. If they shared one, there is one
        record, of the sum. Anything in between has no truth.
        """
        found = []
        for key in [key for key in wanted if key.kind == "param_grad"]:
            gradients = self._by_micro.get((key.module, key.path), {})
            recorded = {micro for micro in micros if reference.get(key._replace(micro=micro)) is not None}
            if recorded == set(gradients) and key.micro in gradients:
                found.append((key, gradients[key.micro]))
            elif recorded == {key.micro} and gradients:
                total, *rest = gradients.values()
                for each in rest:
                    total = self._framework.add(total, each)
                found.append((key, total))
        return found


def _listed(modules: Collection[str]) -> str:
    return ", ".join(map(display_name, list(modules)[:3])) + ", ..." * (len(modules) > 3)


def _checked_model(given: Any, framework: Framework) -> Any:
    model = network_of(given)
    if (found := framework_of(model).name) != framework.name:
        raise UsageError(f"truth: this is a {found} model, and the model that is checked is a {framework.name} model")
    return model
