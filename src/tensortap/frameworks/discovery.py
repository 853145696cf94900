"""Models and optimizers of a program that does not name them: outermost calls, and every optimizer that is made."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import FrameType
from typing import Any

from tensortap.frameworks.base import Framework, Remove, require
from tensortap.frameworks.capabilities import TensorOwnership

__all__ = ["Discovery", "OutermostCalls"]


class OutermostCalls:
    """Replaces, in a class, the method that every call of a module goes through.

    It is a descriptor that reports the module and returns the original method, so a traceback of the call has no frame
    of it. While an outermost call runs, the original method is back in the class. Inner calls thus cost nothing more,
    and a compiler sees the unchanged framework.
    """

    def __init__(self, discovery: Discovery, seen: Callable[[Any], None]) -> None:
        self._discovery = discovery
        self._owner = discovery.module_class
        self._original = vars(self._owner)[discovery.calling]
        self._seen = seen
        self.searching = True

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        method = self._original.__get__(module, owner)
        if module is None or not self._discovery.is_call(sys._getframe(1)):
            return method
        self.restore()
        self._seen(module)
        return partial(self._run, method) if self.searching else method

    def _run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            self.place()

    @contextmanager
    def entered(self, module: Any) -> Iterator[None]:
        """Report a call of a module, and run the block with the original method in the class."""
        self.restore()
        try:
            self._seen(module)
            yield
        finally:
            self.place()

    def place(self) -> None:
        if self.searching:
            setattr(self._owner, self._discovery.calling, self)

    def restore(self) -> None:
        setattr(self._owner, self._discovery.calling, self._original)

    def remove(self) -> None:
        self.searching = False
        self.restore()


class NewOptimizers:
    """Replaces `__init__` in a class: reports each optimizer that begins it, and returns the original method."""

    def __init__(self, optimizer_class: type, seen: Callable[[Any], None]) -> None:
        self._owner = optimizer_class
        self._original = original = vars(optimizer_class)["__init__"]
        self._seen = seen

        @wraps(original)
        def initialise(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # as Optimizer.__init__(self, ...)
            seen(optimizer)
            original(optimizer, *args, **kwargs)

        self._function = initialise
        optimizer_class.__init__ = self  # type: ignore[misc]

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        if optimizer is None:
            return self._function
        self._seen(optimizer)
        return self._original.__get__(optimizer, owner)

    def remove(self) -> None:
        self._owner.__init__ = self._original  # type: ignore[misc]


class Discovery:
    """Reports the outermost calls and the optimizers of a framework.

    It replaces methods of the framework's base classes. A hook on all modules would be slower, would become part of
    compiled graphs, and makes torch warn. Callbacks must not raise.
    """

    module_class: type
    calling: str
    """The method of the module class that every call goes through."""
    optimizer_classes: tuple[type, ...]
    """The classes whose `__init__` runs first for some optimizer: the base class, and classes that do not call its
    `__init__`.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._optimizers: list[weakref.ref[Any]] = []

    def is_call(self, frame: FrameType) -> bool:
        """Return whether the frame looks the method up in order to call it."""
        return True

    def on_outermost_call(self, seen: Callable[[Any], None]) -> Remove:
        """Call back with the module before each call that no other module makes."""
        calls = OutermostCalls(self, seen)
        with ExitStack() as undo:
            undo.callback(calls.remove)
            calls.place()
            undo.callback(self.watch_compiled(calls))
            return undo.pop_all().close

    def watch_compiled(self, calls: OutermostCalls) -> Remove:
        """Report calls of modules that are compiled in place and do not go through the replaced method."""
        return lambda: None

    def on_new_optimizer(self, seen: Callable[[Any], None]) -> Remove:
        """Call back with each optimizer that is made from now on, before it is complete."""

        def begun(optimizer: Any) -> None:
            self._optimizers.append(weakref.ref(optimizer))
            seen(optimizer)

        with ExitStack() as undo:
            for each in self.optimizer_classes:
                undo.callback(NewOptimizers(each, begun).remove)
            return undo.pop_all().close

    def on_step(self, seen: Callable[[Any], None]) -> Remove:
        """Call back with the optimizer before each step of any optimizer, where the framework has a hook for it."""
        return lambda: None

    def optimizers(self) -> list[Any]:
        """Return the live optimizers in the order of their creation, without those that a later one replaces."""
        found = {id(each): each for reference in self._optimizers if (each := reference()) is not None}
        self._optimizers = [weakref.ref(each) for each in found.values()]
        live = [each for each in found.values() if self.is_complete(each)]
        owned = [self.trained_by(optimizer) for optimizer in live]
        return [
            optimizer
            for place, optimizer in enumerate(live)
            if owned[place] and not any(owned[place] <= later for later in owned[place + 1 :])
        ]

    def is_complete(self, optimizer: Any) -> bool:
        """Return whether the optimizer has run its base class's `__init__`."""
        raise NotImplementedError

    def trained_by(self, optimizer: Any) -> set[int]:
        """Return the ids of the tensors that an optimizer changes."""
        owners: TensorOwnership = require(self._framework, TensorOwnership, "finding the trained model")
        return {id(tensor) for group in owners.ownership().groups(optimizer) for tensor in group}

    def parameters(self, module: Any) -> set[int]:
        """Return the ids of all parameters of a module and its parts."""
        return {id(parameter) for parameter in module.parameters()}

    def ancestors(self, module: Any) -> list[Any]:
        """Return the outermost live modules that contain a module; the module itself if none does."""
        parents = self._parents()
        found: dict[int, Any] = {}
        pending, seen = [module], {id(module)}
        while pending:
            inner = pending.pop()
            if not (outer := parents.get(id(inner))):
                found[id(inner)] = inner
            pending += [each for each in outer or () if id(each) not in seen]
            seen |= {id(each) for each in outer or ()}
        return list(found.values())

    def outermost_with(self, parameters: Collection[int]) -> list[Any]:
        """Return the outermost live modules that have one of the parameters."""
        parents = self._parents()
        wanted = set(parameters)
        return [each for each in self._live_modules() if id(each) not in parents and wanted & self.parameters(each)]

    def _parents(self) -> dict[int, list[Any]]:
        parents: dict[int, list[Any]] = {}
        for module in self._live_modules():
            for _, child in self._framework.children(module):
                parents.setdefault(id(child), []).append(module)
        return parents

    def _live_modules(self) -> list[Any]:
        # `type` rather than isinstance, which asks objects for their class: a lazy proxy would load what it stands for.
        return [each for each in gc.get_objects() if issubclass(type(each), self.module_class) and self._complete(each)]

    def _complete(self, module: Any) -> bool:
        """Return whether a module has run its base class's `__init__`."""
        return "_parameters" in vars(module)
