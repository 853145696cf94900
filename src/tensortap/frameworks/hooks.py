"""Hooks on modules and optimizers that report only their own object and can be removed in any order."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

__all__ = [
    "GRAPH_HOOK",
    "MODULE_NUMBER",
    "CallHook",
    "Detour",
    "ModuleCalls",
    "NativeHooks",
    "RepeatableHooks",
    "innermost",
    "innermost_optimizer",
    "is_own_hook",
    "replace_innermost",
]

GRAPH_HOOK = "_tensortap_graph_hook"
"""Attribute of functions that are hooks inside compiled graphs. All modules share them."""
MODULE_NUMBER = "_tensortap_number"
"""Attribute of modules that are tapped inside compiled graphs."""


def is_own_hook(hook: Any) -> bool:
    """Return whether a hook is one of this library's."""
    return isinstance(hook, CallHook) or hasattr(hook, GRAPH_HOOK)


class CallHook:
    """A hook that calls `report` only for the module that it was made for.

    A copy of a model leaves it out, see `PlainCopies`. Where a class has copying code of its own, the copy of this hook
    does nothing. A pickled one becomes a function of the standard library, so that it loads without this package.
    """

    __slots__ = ("_module", "_report")

    def __init__(self, module: Any = None, report: Callable[..., Any] | None = None) -> None:
        self._module = id(module)  # only the id: a reference would be a cycle through the model
        self._report = report

    def __call__(self, module: Any, *seen: Any) -> Any:
        """Return the result of `report`, which replaces what was seen; None leaves it unchanged."""
        if self._report is not None and id(module) == self._module:
            return self._report(*seen)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> CallHook:
        return CallHook()

    def __copy__(self) -> CallHook:
        return CallHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (nullcontext.__exit__, None)  # takes any arguments, does nothing and returns None


class RepeatableHooks(ABC):
    """Removes hooks when it is called, and can place them again in less time than the first placing took."""

    @abstractmethod
    def __call__(self) -> None:
        """Remove the hooks."""

    @abstractmethod
    def place_again(self) -> bool:
        """Place the hooks that were removed. Return whether that was possible."""


class NativeHooks(NamedTuple):
    """The parts of a framework that the C code for hooks on modules uses."""

    begins: type[CallHook]
    """The hook before a call; its `__call__` takes the module, positional and keyword arguments."""
    ends: type[CallHook]
    """The hook after a call; its `__call__` takes the output, too."""
    view: type
    """A hook on an output that is a view, with the tensor as a weak reference and its version then."""
    flags: Mapping[str, Any]
    flag: str
    """Name of the entry of `flags` that is True while a graph is being traced."""


class ModuleCalls(NamedTuple):
    """The parts of a framework with which the C code runs whole calls of modules."""

    call: Callable[..., Any]
    """The Python function that runs the hooks of a module around its forward."""
    finish: Callable[..., Any]
    """Takes the module, positional and keyword arguments and result; runs all hooks after the forward, and returns the
    result that they leave."""
    fail: Callable[..., NoReturn]
    """Raises an exception after the hooks that are always called. Takes it, the module, positional and keyword
    arguments."""


class Detour:
    """Replaces a callable attribute where a framework offers no hook.

    `around(inner, *args, **kwargs)` runs instead of it. Several detours may be on one attribute, and can be removed in
    any order.
    """

    def __init__(self, owner: Any, attribute: str, around: Callable[..., Any]) -> None:
        self._owner = owner
        self._attribute = attribute
        self._around = around
        self._own = attribute in vars(owner)  # otherwise it is the class's, and must not remain on the instance
        self.inner = getattr(owner, attribute)
        vars(owner)[attribute] = self  # setattr of an optimizer wrapper would set it on the wrapped one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self.inner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._attribute)  # unpickled, it is the plain attribute of its owner

    @property
    def replaces_own(self) -> bool:
        """Whether the attribute was the owner's own before all detours, not its class's."""
        return self.inner.replaces_own if isinstance(self.inner, Detour) else self._own

    @property
    def innermost(self) -> Any:
        """The callable below all detours."""
        return self.inner.innermost if isinstance(self.inner, Detour) else self.inner

    def remove(self) -> None:
        top = vars(self._owner).get(self._attribute)
        if top is self:
            if self._own:
                vars(self._owner)[self._attribute] = self.inner
            else:
                del vars(self._owner)[self._attribute]
        while isinstance(top, Detour):
            if top.inner is self:
                top.inner, top._own = self.inner, self._own
                return
            top = top.inner


def innermost(owner: Any, attribute: str) -> Any:
    """Return the own attribute of an object below all detours; None if it has none."""
    found = vars(owner).get(attribute)
    return found.innermost if isinstance(found, Detour) else found


def replace_innermost(owner: Any, attribute: str, old: Any, new: Any) -> None:
    """Replace an attribute below all detours, if it is still the old one."""
    top = vars(owner).get(attribute)
    if top is old:
        vars(owner)[attribute] = new
    while isinstance(top, Detour):
        if top.inner is old:
            top.inner = new
        top = top.inner


def innermost_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper, such as Accelerate's, which keeps it as `.optimizer`.

    An optimizer without a wrapper is returned as it is. A wrapper may derive from torch's class without its state: a
    hook on it then fails or never runs.
    """
    chain = [optimizer]
    while (inner := getattr(chain[-1], "optimizer", None)) is not None and not any(inner is each for each in chain):
        chain.append(inner)
    return next((each for each in reversed(chain) if hasattr(each, "param_groups")), optimizer)
