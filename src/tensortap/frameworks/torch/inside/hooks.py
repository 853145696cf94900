"""Hooks that the compiler traces: they become part of the graph, and call the operator with the tensors of a call.

The code of this file runs in two ways. While a graph is traced, the compiler interprets it, so it uses only constructs
that the compiler understands. All modules share one pair of functions: separate hooks would be guarded, and equal
layers would be compiled one by one. After a graph break it runs as it is, and the call is recorded like an uncompiled
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import skip_code

from tensortap.frameworks.hooks import GRAPH_HOOK, MODULE_NUMBER
from tensortap.frameworks.torch.inside import notes
from tensortap.frameworks.torch.inside.operator import GradientTap, receivers

__all__ = ["TracedHooks", "traced_hooks"]

_DEEPEST = 32


class TracedHooks(NamedTuple):
    before: Callable[..., Any]
    after: Callable[..., Any]


def traced_hooks(kinds: frozenset[str]) -> TracedHooks:
    """Return the hooks that record these kinds."""
    inputs, outputs = "input" in kinds, "output" in kinds
    input_gradients, output_gradients = "grad_input" in kinds, "grad_output" in kinds

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _entered(module, args, kwargs)
            return None
        tensors: list[Any] = []
        paths: list[str] = []
        closed: list[str] = []
        plain: list[Any] = []
        plain_paths: list[str] = []
        found = tensors, paths, closed, plain, plain_paths
        _open(args, "", 0, found)
        _open(kwargs, "", 0, found)
        for value in plain:  # noqa: B007  # the compiler's own view of it is read
            comptime(notes.see_plain)
        number = getattr(module, MODULE_NUMBER)
        comptime(notes.see_inputs)
        changed = False
        if input_gradients:
            marks = notes.input_marks().split(",")
            for place in range(len(tensors)):
                if marks[place] == "tap":
                    tensor = tensors[place]
                    tapped = GradientTap.apply(tensor, number, notes.gradient_point("grad_input", place))
                    tensors[place] = tapped
                    changed = True
                elif marks[place].isdigit():
                    tensors[place] = tensors[int(marks[place])]
            comptime(notes.see_tapped_inputs)
        if inputs or len(module._modules):
            torch.ops.tensortap.tap(tensors if inputs else [], number, notes.enter_point())
        if changed:
            rest = list(reversed(tensors))
            return _rebuilt(args, rest, 0), _rebuilt(kwargs, rest, 0)
        return None

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling():
            _left(module, output)
            return None
        tensors: list[Any] = []
        paths: list[str] = []
        closed: list[str] = []
        found: Any = tensors, paths, closed, [], []
        _open(output, "", 0, found)
        comptime(notes.see_outputs)
        number = getattr(module, MODULE_NUMBER)
        changed = False
        if output_gradients:
            marks = notes.output_marks().split(",")
            for place in range(len(tensors)):
                if marks[place] == "tap":
                    tensor = tensors[place]
                    tapped = GradientTap.apply(tensor, number, notes.gradient_point("grad_output", place))
                    comptime(notes.see_tapped_output)
                    tensors[place] = tapped
                    changed = True
                elif marks[place].isdigit():
                    tensors[place] = tensors[int(marks[place])]
                elif marks[place].startswith("input"):
                    given: list[Any] = []
                    _open(args, "", 0, (given, [], [], [], []))
                    _open(kwargs, "", 0, (given, [], [], [], []))
                    tensors[place] = given[int(marks[place][5:])]
                    changed = True
        entered = inputs or len(module._modules) > 0
        point = notes.leave_point() if entered else notes.whole_point()
        torch.ops.tensortap.tap(tensors if outputs else [], number, point)
        comptime(notes.see_left)
        if changed:
            return _rebuilt(output, list(reversed(tensors)), 0)
        return None

    for hook in (before, after):
        setattr(hook, GRAPH_HOOK, True)
        skip_code(hook.__code__)  # beside a graph they run as they are, and get no graph of their own
    return TracedHooks(before, after)


# --- uncompiled calls --------------------------------------------------------------------------------------------
@torch._dynamo.disable  # type: ignore[untyped-decorator]  # as above
def _entered(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if (receiver := receivers.get(int(getattr(module, MODULE_NUMBER, 0)))) is not None:
        receiver.before(args, kwargs)


@torch._dynamo.disable  # type: ignore[untyped-decorator]  # as above
def _left(module: Any, output: Any) -> None:
    if (receiver := receivers.get(int(getattr(module, MODULE_NUMBER, 0)))) is not None:
        receiver.after(output)


# --- traced: paths as in `capture.flatten` -----------------------------------------------------------------------
def _open(value: Any, path: str, depth: int, found: Any) -> None:
    """Flatten a value as `capture.flatten` does, in code that the compiler understands."""
    tensors, paths, closed, plain, plain_paths = found
    if isinstance(value, torch.Tensor):
        name = path if path else "0"
        number = 1
        while name in paths:
            number += 1
            name = f"{path}~{number}"
        paths.append(name)
        tensors.append(value)
        return
    kind = _container(value) if depth < _DEEPEST else ""
    if kind == "":
        if not _is_plain(value):
            closed.append(type(value).__qualname__)
        plain.append(value)
        plain_paths.append(path)
        return
    before, first = len(tensors), len(plain)
    for key, part in _parts(value, kind):
        name = str(key).replace(".", "\\.") if kind == "mapping" else str(key)
        _open(part, f"{path}.{name}" if path else name, depth + 1, found)
    if path and len(tensors) == before:
        while len(plain) > first:
            plain.pop()
            plain_paths.pop()
        plain.append(value)
        plain_paths.append(path)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes, int, float, complex, bool, type, range, slice))


def _container(value: Any) -> str:
    if _is_plain(value):
        return ""
    if isinstance(value, Mapping):
        return "mapping"
    if isinstance(value, tuple):
        return "named" if hasattr(value, "_fields") else "sequence"
    if isinstance(value, list):
        return "sequence"
    return "fields" if hasattr(type(value), "__dataclass_fields__") else ""


def _parts(value: Any, kind: str) -> list[Any]:
    if kind == "mapping":
        return [(key, part) for key, part in value.items()]  # the compiler does not take list(items)
    if kind == "named":
        return [(name, getattr(value, name)) for name in type(value)._fields]
    if kind == "fields":
        return [(name, getattr(value, name, None)) for name in type(value).__dataclass_fields__]
    return [(place, value[place]) for place in range(len(value))]


def _rebuilt(value: Any, rest: list[Any], depth: int) -> Any:
    """Return the value with other tensors, the last of `rest` first. Tuples are made anew, others are changed."""
    if isinstance(value, torch.Tensor):
        return rest.pop()
    kind = _container(value) if depth < _DEEPEST else ""
    if kind == "":
        return value
    parts = [(key, part, _rebuilt(part, rest, depth + 1)) for key, part in _parts(value, kind)]
    if isinstance(value, tuple):
        others = [other for _, _, other in parts]
        if kind == "named":
            return type(value)(*others)
        return tuple(others) if type(value) is tuple else type(value)(others)
    for key, part, other in parts:
        if part is not other:
            if kind == "fields":
                setattr(value, key, other)
            else:
                value[key] = other
    return value
