"""Notices modules that get children, and modules that are compiled, anywhere in the process.

Torch has a hook for the first. For the second, three functions of torch are wrapped while something listens.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from tensortap.frameworks.base import Remove

__all__ = ["module_changes", "uses_compiler"]

_COMPILER = "torch._dynamo.eval_frame"
"""Importing it takes seconds, so that happens only when the user compiles something."""


class ModuleChanges:
    """The listeners of the process, and what was wrapped for them."""

    def __init__(self) -> None:
        self._changed: dict[object, Callable[[Any], None]] = {}
        self._wrapped: dict[object, Callable[[Any], None]] = {}
        self._restore: list[Remove] = []

    def listen(self, changed: Callable[[Any], None], wrapped: Callable[[Any], None]) -> Remove:
        """Call `changed` before a module gets a child, and after it was compiled in place.

        Call `wrapped` with each compiled wrapper: with existing ones now, and with later ones after they were made.

        Both are methods, and are not kept alive: a tap that is never closed must not hold its model.
        """
        if not self._changed:
            self._wrap_functions()
        token = object()
        changed = _weak(changed, lambda: remove())
        self._changed[token], self._wrapped[token] = changed, _weak(wrapped, lambda: None)

        def registered(module: Any, name: str, child: Any) -> None:
            if module._modules.get(name) is child:  # a forward may convert a child, which returns the same one
                return
            if not torch.compiler.is_compiling():  # a forward that slices a list of modules makes a new one each time
                changed(module)

        handle = register_module_module_registration_hook(registered)

        def remove() -> None:
            handle.remove()
            self._wrapped.pop(token, None)
            if self._changed.pop(token, None) is not None and not self._changed:
                while self._restore:
                    self._restore.pop()()

        for wrapper in _wrappers():
            wrapped(wrapper)
        return remove

    def _wrap_functions(self) -> None:
        if _COMPILER in sys.modules:
            self._watch_wrappers()
        else:
            self._wrap(torch, "compile", before=self._watch_wrappers)
        self._wrap(torch.nn.Module, "compile", after=lambda module: self._tell(self._changed, module))

    def _watch_wrappers(self) -> None:
        owner = importlib.import_module(_COMPILER).OptimizedModule
        if self._changed or not self._restore:  # a kept reference to the wrapped function may be called later
            self._wrap(owner, "__init__", after=lambda wrapper: self._tell(self._wrapped, wrapper), once=True)

    def _tell(self, listeners: dict[object, Callable[[Any], None]], module: Any) -> None:
        for listener in list(listeners.values()):
            listener(module)

    def _wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[[], None] = lambda: None,
        after: Callable[[Any], None] = lambda _: None,
        once: bool = False,
    ) -> None:
        inner = vars(owner)[name]
        if once and getattr(inner, "_tensortap_listens", False):
            return

        @functools.wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before()
            result = inner(*args, **kwargs)
            if args:
                after(args[0])
            return result

        wrapper._tensortap_listens = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)

        def restore() -> None:
            if vars(owner).get(name) is wrapper:  # otherwise other code has wrapped it, and this one is mute
                setattr(owner, name, inner)

        self._restore.append(restore)


def _weak(method: Callable[[Any], None], gone: Callable[[], None]) -> Callable[[Any], None]:
    reference = weakref.WeakMethod(method, lambda _: gone())

    def call(module: Any) -> None:
        if (alive := reference()) is not None:
            alive(module)

    return call


module_changes = ModuleChanges()
"""All taps of the process share it: functions of torch are wrapped once."""


def _wrappers() -> list[Any]:
    """Return the compiled wrappers that exist."""
    if _COMPILER not in sys.modules:
        return []
    cls = sys.modules[_COMPILER].OptimizedModule
    return [each for each in gc.get_referrers(cls) if type(each) is cls]  # half the time of listing all objects


def uses_compiler() -> bool:
    """Return whether something was compiled in this process. Optimizers load the compiler without using it."""
    compiler = sys.modules.get(_COMPILER)
    backends = {} if compiler is None else getattr(compiler, "cached_backends", {0: compiler})
    return any(backend is not None for backend in backends.values())
