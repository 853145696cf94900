"""Places traced hooks on modules, and has everything compiled again: with taps now, without them afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import _TorchDynamoContext

from tensortap.core.interrupts import raise_interrupt
from tensortap.errors import UsageError
from tensortap.frameworks.base import Remove
from tensortap.frameworks.capabilities import GraphReceiver
from tensortap.frameworks.hooks import MODULE_NUMBER, innermost, replace_innermost
from tensortap.frameworks.torch.inside import compiler, notes, saved
from tensortap.frameworks.torch.inside.hooks import traced_hooks
from tensortap.frameworks.torch.inside.operator import OPERATOR, new_number, receivers

__all__ = ["TorchGraphTaps"]


_COMPILED = "_compiled_call_impl"
"""The attribute of a module that was compiled in place."""
_ROUNDING = {
    False: "taps inside compiled graphs split kernels, so bfloat16 and float16 values are rounded in more places than "
    "without taps: emulate_casts=True rounds alike",
    True: "compiled code rounds between operations, as uncompiled code does (emulate_precision_casts): with taps as "
    "without, except for the order of sums in fused kernels",
}


class TorchGraphTaps:
    """Implements `capabilities.GraphTaps`: the taps of one observer inside compiled graphs."""

    def __init__(
        self, kinds: frozenset[str], emulate_casts: bool, opaque_value: Callable[[Any], Any], release: Remove
    ) -> None:
        self._hooks = traced_hooks(kinds)
        self._placed: dict[int, tuple[Any, int, Sequence[Remove]]] = {}
        """By the id of a module: the module, its number, and the function that removes its hooks."""
        self._inlined: dict[int, Remove] = {}
        """By the id of a compiled module: the function that restores it."""
        self._code: dict[type, CodeType] = {}
        """By the class of a compiled module: the code that calls it. Equal layers share this code and its compiled
        form.
        """
        self._undo = ExitStack()
        self._undo.callback(release)
        notes.opaque_value[0] = opaque_value
        saved.failures.clear()
        try:
            self.rounding = _ROUNDING[_configure(emulate_casts, self._undo)]
        except BaseException:
            self._undo.close()
            raise

    @property
    def traced(self) -> int:
        """Number of graphs traced so far."""
        return notes.traced[0]

    @property
    def notices(self) -> Sequence[str]:
        """Notices on changes of compiled code that taps may cause, beside its rounding."""
        if not compiler.SAVED_VALUES.possible:
            return [saved.changed_choice("it has no function that chooses them")]
        return [*saved.failures]

    @property
    def replays(self) -> bool:
        """Whether CUDA graphs may run the compiled code: their memory is planned again when they are recorded."""
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is None:
            return False
        try:
            devices = trees.get_obj(trees.local, "tree_manager_containers")
            return any(each.tree_manager is not None for each in devices.values())
        except Exception as error:  # a thread that inductor does not know, or another version of inductor
            raise_interrupt(error)
            return True

    def place(self, wanted: Mapping[int, tuple[Any, GraphReceiver]], called: Sequence[Any]) -> bool:
        """Hook these modules, by id, and no others. Return whether code that was compiled before is dropped.

        `called` are those that are called from outside of graphs, among them compiled wrappers.
        """
        gone = [key for key in self._placed if key not in wanted]
        fresh = [key for key in wanted if key not in self._placed]
        for key in gone:
            self._remove(key)
        for key, (module, receiver) in wanted.items():
            if key in self._placed:
                receivers[self._placed[key][1]] = receiver
            else:
                self._place(key, module, receiver)
        inlined = [module for module in called if self._inline(module)]
        return _compile_again() if gone or fresh or inlined else False

    def _place(self, key: int, module: Any, receiver: GraphReceiver) -> None:
        if MODULE_NUMBER in vars(module):
            raise UsageError(
                f'another tap with compiled="inside" is open on this {type(module).__name__}: close it first, or '
                'tap with compiled="boundary"'
            )
        number = new_number()
        vars(module)[MODULE_NUMBER] = torch.tensor(number)  # not a buffer: it stays on the host and is not saved
        first = module.register_forward_pre_hook(self._hooks.before, with_kwargs=True)
        last = module.register_forward_hook(self._hooks.after, with_kwargs=True)
        self._placed[key] = module, number, (first.remove, last.remove)
        receivers[number] = receiver

    def _remove(self, key: int) -> None:
        module, number, removers = self._placed.pop(key)
        receivers.pop(number, None)
        for remove in removers:
            remove()
        vars(module).pop(MODULE_NUMBER, None)

    def _inline(self, module: Any) -> bool:
        """Let the graph of a compiled module contain its call, not only its forward. Return whether that is new.

        Otherwise hooks on that module itself run beside the graph, and cannot tell which tensors are the same in it.
        """
        if id(module) in self._inlined or hasattr(module, "_initialize_hook"):
            return False
        inner = vars(module).get("_modules", {}).get("_orig_mod")
        if isinstance(context := getattr(module, "dynamo_ctx", None), _TorchDynamoContext) and inner is not None:
            owner, name, call = module, "forward", inner
        elif (compiled := innermost(module, _COMPILED)) is not None and (context := _context_of(compiled)) is not None:
            owner, name, call = module, _COMPILED, module._call_impl
        else:
            return False
        old, new = innermost(owner, name), context(self._caller(call, type(inner or module)))
        replace_innermost(owner, name, old, new)
        self._inlined[id(module)] = partial(replace_innermost, owner, name, new, old)
        return True

    def _caller(self, call: Callable[..., Any], kind: type) -> Callable[..., Any]:
        def caller(*args: Any, **kwargs: Any) -> Any:
            # The compiler leaves a frame alone if its graph breaks within a loop. Without one, a break inside the
            # module would be a break of this frame, too.
            for _ in (None,):
                output = call(*args, **kwargs)
            return output

        code = self._code.setdefault(kind, caller.__code__.replace(co_name=f"call_{kind.__name__}"))
        return FunctionType(code, caller.__globals__, code.co_name, None, caller.__closure__)

    def close(self) -> None:
        """Remove all hooks, and drop the code that has taps."""
        placed = bool(self._placed)
        for key in list(self._placed):
            self._remove(key)
        while self._inlined:
            self._inlined.popitem()[1]()
        self._undo.close()
        if placed:
            _compile_again()


def _context_of(compiled: Any) -> Any | None:
    """Return the compiler's settings of a compiled function, which it keeps to itself; None if they are not there."""
    cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    return next((each for each in cells if isinstance(each, _TorchDynamoContext)), None)


def _compile_again() -> bool:
    """Drop all compiled code. Return whether there was any: hooks are not guarded, so it would be used as it is."""
    known = bool(getattr(getattr(convert_frame, "input_codes", None), "seen", True))
    torch._dynamo.reset()
    return known


def _configure(emulate_casts: bool, undo: ExitStack) -> bool:
    """Set the compiler's options for the time while a tap is open. Return whether it rounds as uncompiled code does."""
    for patch in (compiler.FUNCTION_CONTEXTS, compiler.LIBRARY_HOOKS, compiler.SAVED_VALUES):
        undo.callback(patch.apply())
    try:
        for patch in compiler.of_inductor():
            undo.callback(patch.apply())
        from torch._inductor import config
    except ImportError as error:
        if emulate_casts:
            raise UsageError(f"emulate_casts needs inductor, which cannot be imported: {error}") from error
        return False
    if emulate_casts and not hasattr(config, "emulate_precision_casts"):
        raise UsageError(f"emulate_casts needs torch 2.6 or newer, this is {torch.__version__}")
    if emulate_casts:
        undo.enter_context(config.patch(emulate_precision_casts=True))
    if (names := getattr(config, "custom_should_partition_ops", None)) is not None:
        # A CUDA graph replays kernels alone. The operator runs between two of them instead.
        undo.enter_context(config.patch(custom_should_partition_ops=[*names, OPERATOR]))
    return bool(getattr(config, "emulate_precision_casts", False))
