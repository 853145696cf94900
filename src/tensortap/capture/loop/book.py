"""LoopBook: reads the loop facts of each recorded step, and writes those that changed.

No work is done per tensor, except that the kind step_grad visits the parameters of an optimizer. An error while facts
are read loses these facts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from tensortap.capture.loop.attributes import Attributes
from tensortap.capture.loop.moved import MovedParameters
from tensortap.capture.loop.random_states import RandomStates
from tensortap.capture.loop.ties import buffer_names, frozen_parameters, tensor_names, ties
from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.modules.unchanged import identify_parameters
from tensortap.capture.watching.clock import Clock
from tensortap.core.arguments import written
from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.base import Framework
from tensortap.frameworks.capabilities import OptimizerStep, OptimizerSteps, ParameterGroup

__all__ = ["LoopBook"]

ABSENT_IS_EQUAL = "equal to param_grad"
ABSENT_IS_NONE = "no gradient"


class Gradients(Protocol):
    """Records the gradients that an optimizer uses."""

    armed: bool
    """Whether a module has run in this step."""

    def own_parameters(self) -> Sequence[tuple[Site, str, Any]]:
        """Return the parameters of the tapped modules."""

    def record_step_gradient(self, site: Site, name: str, gradient: Any) -> None: ...


class LoopBook:
    """The loop facts of one tap."""

    def __init__(
        self,
        framework: Framework,
        tree: Callable[[], Tree],
        clock: Clock,
        write: Callable[[int, str, str, Mapping[str, Any]], None],
        kinds: Sequence[str],
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tree` returns the modules, which may change. `notice` takes notices about the run."""
        self._framework = framework
        self._tree = tree
        self._clock = clock
        self._write = write
        self._kinds = frozenset(kinds)
        self._notice = notice
        self._last: dict[tuple[str, str], Any] = {}
        self._random = RandomStates(framework)
        self._attributes = Attributes(framework, self._note_attributes)
        self._settings: dict[str, Mapping[str, Any]] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        """Ids of the parameters of each group."""
        self._tensors: Hashable = None
        """Identifies the parameters of the modules."""
        self._moved = MovedParameters(framework, lambda module, micro: self._note("moved", module, {"micro": micro}))

    def step_begins(self) -> None:
        """Note the random states, before the step's first forward."""
        self._moved.step_begins()
        with suppress_errors():
            for name, digest in self._random.digests():
                self._note("random", name, {"digest": digest})

    def forward_begins(self, sites: Sequence[Site]) -> None:
        """Note whose parameters have changed since the micro step before."""
        with suppress_errors():
            self._moved.forward_begins(sites)

    def forward_ended(self, sites: Sequence[Site]) -> None:
        """Note attributes and facts about tensors, after the step's first forward: a device is busy then."""
        self._attributes.check(sites)
        with suppress_errors():
            self._note_tensors(sites)

    def optimizer_begins(self, gradients: Gradients, name: str, optimizer: Any) -> None:
        """Note the settings that a step uses, and record its gradients."""
        framework: Any = self._framework
        with suppress_errors():  # an optimizer of another kind
            groups = framework.optimizer_groups(optimizer)
            self._note_settings(framework, name, optimizer, groups)
            self._note_members(name, groups)
        if "step_grad" in self._kinds and gradients.armed:
            self._record_gradients(framework, gradients, name, groups)

    def optimizer_ended(self, name: str, step: OptimizerStep) -> None:
        """Note the outcome of an optimizer step."""
        if step.scale is not None:
            self._note("scaler", name, {"scale": step.scale})
        self._note("skipped", name, {"skipped": step.skipped})

    def step_ends(self, counts: Mapping[str, int]) -> None:
        """Note how often each of several optimizers has stepped."""
        for name, count in counts.items():
            self._note("steps", name, {"steps": count})

    def _note(self, fact: str, of: str, value: Mapping[str, Any]) -> None:
        """Write a fact if it has changed."""
        if self._last.get((fact, of)) != value:
            self._last[fact, of] = value
            self._write(self._clock.step, fact, of, value)

    def _note_attributes(self, module: str, value: Mapping[str, Any]) -> None:
        self._note("attributes", module, value)

    def _note_tensors(self, sites: Sequence[Site]) -> None:
        now = identify_parameters(self._framework, [site.owner for site in sites])
        if now != self._tensors:
            self._tensors = now
            self._note("ties", "", ties(self._framework, list(tensor_names(self._framework, self._tree()))))
            self._note("buffers", "", {"names": buffer_names(self._framework, self._tree())})
            self._note_frozen()

    def _note_frozen(self) -> None:
        self._note("frozen", "", {"names": frozen_parameters(self._framework, self._tree())})

    def _note_settings(
        self, framework: OptimizerSteps, name: str, optimizer: Any, groups: Sequence[ParameterGroup]
    ) -> None:
        self._note("optimizer", name, {**framework.optimizer_settings(optimizer), "groups": len(groups)})
        for place, group in enumerate(groups):
            of = f"{name}.{place}"
            if self._settings.get(of) != group.settings:  # encoded only if it changed
                self._settings[of] = dict(group.settings)
                self._note("group", of, written(group.settings.items(), self._framework.opaque_value))

    def _note_members(self, name: str, groups: Sequence[ParameterGroup]) -> None:
        names: dict[int, str] | None = None
        for place, group in enumerate(groups):
            of, members = f"{name}.{place}", tuple(map(id, group.parameters))
            if self._members.get(of) == members:
                continue
            self._members[of] = members
            if names is None:
                names = {}
                for full_name, tensor in tensor_names(self._framework, self._tree()):
                    names.setdefault(id(tensor), full_name)
            known = [names[each] for each in members if each in names]
            self._note("parameters", of, {"names": known, "others": len(members) - len(known)})
        held = {each for place in range(len(groups)) for each in self._members[f"{name}.{place}"]}
        if names is not None and held and not held & names.keys():
            self._notice(
                f"optimizer {name} holds no parameter of the model: the gradients that it uses were not recorded"
            )

    def _record_gradients(
        self, framework: OptimizerSteps, gradients: Gradients, name: str, groups: Sequence[ParameterGroup]
    ) -> None:
        own = {id(parameter): (site, path) for site, path, parameter in gradients.own_parameters()}
        without = []
        for group in groups:
            for parameter in group.parameters:
                if (place := own.get(id(parameter))) is None:
                    continue
                site, path = place
                if (gradient := framework.gradient_of(parameter)) is None:
                    without.append(f"{site.name}.{path}" if site.name else path)
                else:
                    gradients.record_step_gradient(site, path, gradient)
        absent = ABSENT_IS_EQUAL if "param_grad" in self._kinds else ABSENT_IS_NONE
        value = {"absent": absent, "no_gradient": without}
        if self._last.get(("step_grad", name)) != value:  # a parameter may have been frozen, or released
            with suppress_errors():
                self._note_frozen()
        self._note("step_grad", name, value)
