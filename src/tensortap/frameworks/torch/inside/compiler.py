"""Changes of torch's compiler while taps are open, so that it treats a model as it does without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch._dynamo import utils as compiler_utils
from torch._dynamo.side_effects import SideEffects
from torch._functorch import partitioners

from tensortap.frameworks.base import Remove
from tensortap.frameworks.hooks import is_own_hook
from tensortap.frameworks.torch.inside.buffers import free_tapped, reuse_untapped
from tensortap.frameworks.torch.inside.saved import choose_as_untapped

__all__ = ["FUNCTION_CONTEXTS", "LIBRARY_HOOKS", "SAVED_VALUES", "CompilerPatch", "of_inductor"]


class CompilerPatch:
    """Replaces a function of the compiler while at least one tap needs it.

    A version of torch that does not have the function stays as it is.
    """

    def __init__(self, owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        """replacement: makes the new function from the original one."""
        self._owner, self._name, self._replacement = owner, name, replacement
        self._open = 0
        self._original: Any = None

    @property
    def possible(self) -> bool:
        """Whether this version of torch has the function."""
        return hasattr(self._owner, self._name)

    def apply(self) -> Remove:
        """Replace the function until the returned function is called."""
        if self._open == 0 and (original := getattr(self._owner, self._name, None)) is not None:
            self._original = original
            setattr(self._owner, self._name, wraps(original)(self._replacement(original)))
        self._open += 1
        return self._restore

    def _restore(self) -> None:
        self._open -= 1
        if self._open == 0 and self._original is not None:
            setattr(self._owner, self._name, self._original)


def _without_our_hooks(original: Any) -> Any:
    def has_hooks(module: Any, **wanted: Any) -> bool:
        if not original(module, **wanted):
            return False
        if wanted != {"check_forward_hooks": True}:
            return True
        placed = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        return not placed or not all(map(is_own_hook, placed))

    return has_hooks


def _without_deprecation(original: Any) -> Any:
    def track_object_new(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
            return original(*args, **kwargs)

    return track_object_new


LIBRARY_HOOKS = CompilerPatch(compiler_utils, "nnmodule_has_hooks", _without_our_hooks)
"""Keeps the compiler from compiling modules of torch's own because of our hooks.

After a graph break, such a module runs uncompiled, unless it has hooks: torch then compiles its forward separately, and
rounds in another way than without taps.
"""

FUNCTION_CONTEXTS = CompilerPatch(SideEffects, "track_object_new", _without_deprecation)
"""Keeps a warning of torch's own from a program that raises warnings as errors.

To trace an autograd function, as that of a tapped gradient, the compiler makes an instance of its base class. That
class warns that it should not be instantiated.
"""

SAVED_VALUES = CompilerPatch(partitioners, "choose_saved_values_set", choose_as_untapped)
"""Lets the compiler choose what forward saves for backward, and what backward recomputes, as if there were no taps.

Taps change that choice, because the compiler avoids recomputing long chains, and values that are used before and after
an operator that cannot be fused. Under inductor a recomputed value may differ from the saved one in its last bits,
because one is computed by vector instructions and the other is not.
"""

_inductor: list[CompilerPatch] = []


def of_inductor() -> Sequence[CompilerPatch]:
    """Return the changes of inductor, whose import takes long. They keep tapped buffers until they are read."""
    if not _inductor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # modules that it imports use what is deprecated
            from torch._inductor.codegen.wrapper import PythonWrapperCodegen as Wrapper

        _inductor.append(CompilerPatch(Wrapper, "can_reuse", reuse_untapped))
        _inductor.append(CompilerPatch(Wrapper, "codegen_free", free_tapped))
    return _inductor
