"""The parameters and buffers of the watched modules, and the hooks on the gradients of the former."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site
from tensortap.capture.modules.unchanged import identify_hooks
from tensortap.core.records import display_name
from tensortap.frameworks.base import Framework, GradientCallback, Remove

__all__ = ["OwnTensors"]


class OwnTensors:
    """Lists the tensors of modules anew in each step, since they may have been replaced."""

    def __init__(self, framework: Framework, book: CoverageBook) -> None:
        self._framework = framework
        self._book = book
        self._sites: Sequence[Site] = ()
        self._owners: list[Any] = []
        self._hook_of: Callable[[Site, str], GradientCallback] = lambda site, name: lambda gradient: None
        self._callbacks: dict[tuple[str, str], GradientCallback] = {}
        self._placed: dict[tuple[str, str], Remove] = {}
        """Hooks on parameters, by module and name. Placing them again would delay the start of each step, when the
        device is idle."""
        self.replaced: set[str] = set()
        """Modules whose parameters are other tensors during a forward, which take hooks of their own then."""
        self.uninitialised = False
        """Whether a parameter took no hook, because it has no values before the first forward."""
        self._hooked: Hashable | None = None
        """Identifies the parameters and their hooks, after all of them were placed."""

    def choose(self, sites: Sequence[Site]) -> None:
        """List the tensors of these modules from now on."""
        self._sites, self._owners = list(sites), [site.owner for site in sites]
        self._callbacks.clear()
        self._hooked = None

    def report(self, hook_of: Callable[[Site, str], GradientCallback]) -> None:
        """Call `hook_of(module, name)` for each parameter, and the returned hook with each of its gradients."""
        self._hook_of = hook_of
        self._callbacks.clear()
        self._hooked = None

    def of(self, kind: str) -> list[tuple[Site, str, Any]]:
        """Return all tensors of kind param or buffer, a shared one under its first name."""
        if kind == "param":
            own = self._framework.parameters_of(self._owners)
        else:
            own = [(at, *each) for at, owner in enumerate(self._owners) for each in self._framework.buffers(owner)]
        first: dict[int, tuple[Site, str]] = {}
        found = []
        for at, name, tensor in own:
            site = self._sites[at]
            if (known := first.get(id(tensor))) is not None:
                first_name = f"{display_name(known[0].name)}.{known[1]}"
                self._book.remark(site.name, f"{name} is tied to {first_name} and recorded there")
                continue
            first[id(tensor)] = site, name
            found.append((site, name, tensor))
        return found

    def hook_all(self) -> None:
        """Place the hooks that are missing, and remove those on parameters that are gone."""
        if self._hooked is not None and self._hooked == identify_hooks(self._framework, self._owners):
            return
        self._hooked = None
        self.uninitialised = False
        gone = set(self._placed)  # an interrupt must not lose one
        for site, name, parameter in self.of("param"):
            gone.discard((site.name, name))
            if self._framework.replaces_parameter(parameter):
                self.replaced.add(site.name)
            self.hook(site, name, parameter)
        for owner in gone:
            self._placed.pop(owner)()
        hooked = None if self.replaced or self.uninitialised else identify_hooks(self._framework, self._owners)
        self._hooked = hooked if hooked is not None and self._all_current() else None

    def _all_current(self) -> bool:
        """Return whether the framework can confirm that every hook is still there."""
        placed = [(parameter, self._placed.get((site.name, name))) for site, name, parameter in self.of("param")]
        return all(remove is None or self._framework.hook_is_current(each, remove) for each, remove in placed)

    def hook(self, site: Site, name: str, parameter: Any) -> None:
        """Place a hook on one parameter, if it has none."""
        placed, owner = self._placed, (site.name, name)
        if (remove := placed.get(owner)) is not None:
            if self._framework.hook_is_current(parameter, remove):
                return
            remove()
            del placed[owner]
        if (seen := self._callbacks.get(owner)) is None:
            seen = self._callbacks[owner] = self._hook_of(site, name)
        if (remove := self._framework.on_parameter_gradient(parameter, seen)) is not None:
            placed[owner] = remove
        elif self._framework.requires_gradient(parameter):
            self.uninitialised = True

    def remove_hooks(self) -> None:
        for remove in self._placed.values():
            remove()
        self._placed.clear()
        self._hooked = None
