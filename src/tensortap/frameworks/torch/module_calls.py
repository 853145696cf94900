"""What the C code does not do of a call of a module: hooks that are placed during it, and those that see it fail.

`native/module_calls.h` runs a call whose module has no hooks but those of this library, as `torch.nn.Module._call_impl`
does. Hooks that others place on the module or for all modules while it runs are called from here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NoReturn

import torch
from torch.nn.modules import module as _torch

from tensortap.frameworks.hooks import ModuleCalls

__all__ = ["module_calls"]

_KNOWN_NAMES = """
BackwardHook Exception RuntimeError Tensor _C _WrappedHook _backward_hooks _backward_pre_hooks _forward_hooks
_forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs
_get_backward_hooks _get_backward_pre_hooks _get_tracing_state _global_backward_hooks _global_backward_pre_hooks
_global_forward_hooks _global_forward_hooks_always_called _global_forward_hooks_with_kwargs _global_forward_pre_hooks
_maybe_warn_non_full_backward_hook _slow_forward add compiler dict forward grad_fn is_compiling isinstance items len
next register_hook set setup_input_hook setup_output_hook str torch tuple type values warn warnings
"""
"""The names that `_call_impl` uses in the versions of torch that the C code imitates."""


def module_calls() -> ModuleCalls | None:
    """Return the functions for the C code; None if `_call_impl` may do what the C code does not know of."""
    call = torch.nn.Module._call_impl
    code = getattr(call, "__code__", None)
    if code is None or code.co_filename != torch.nn.Module.add_module.__code__.co_filename:  # other code replaced it
        return None
    return ModuleCalls(call, _finish, _fail) if _names(code).issubset(_KNOWN_NAMES.split()) else None


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _forward_hooks(module: torch.nn.Module) -> Iterator[tuple[int, Callable[..., Any], bool, bool]]:
    """Yield the number of each hook, the hook, whether it takes keyword arguments, and whether it is always called."""
    always, with_kwargs = _torch._global_forward_hooks_always_called, _torch._global_forward_hooks_with_kwargs
    for number, hook in [*_torch._global_forward_hooks.items()]:
        yield number, hook, number in with_kwargs, number in always
    for number, hook in [*module._forward_hooks.items()]:
        yield number, hook, number in module._forward_hooks_with_kwargs, number in module._forward_hooks_always_called


def _finish(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Run all forward hooks, and return the result that they leave."""
    called = set()
    try:
        for number, hook, with_kwargs, _ in [*_forward_hooks(module)]:
            called.add(number)
            changed = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
            if changed is not None:
                result = changed
    except Exception:
        _call_always(module, args, kwargs, result, called)
        raise
    return result


def _fail(error: Exception, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise an error of a call, after the hooks that are always called."""
    context = error.__context__
    try:
        raise error
    except Exception:
        error.__context__ = context  # that of its own place, not of this one
        _call_always(module, args, kwargs, None, set())
        raise


def _call_always(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, called: set[int]
) -> None:
    for number, hook, with_kwargs, always in [*_forward_hooks(module)]:
        if not always or number in called:
            continue
        try:
            changed = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
        except Exception as error:
            warnings.warn(
                f"a forward hook with always_call=True raised {type(error).__name__}: {error}. It is ignored, since "
                "the module's forward has failed, too",
                stacklevel=2,
            )
        else:
            result = result if changed is None else changed
