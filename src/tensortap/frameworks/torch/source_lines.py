"""Finds the line of a user's code that calls a torch operator, from the stack of the running thread."""
# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tensortap.core.operators import SourceLine

__all__ = ["CallingCode", "calling_code", "is_users"]

_TORCH = str(Path(torch.__file__).parent)
_TOOL = str(Path(__file__).parents[2])
_MODELS_OF_THE_TOOL = str(Path(_TOOL) / "demo")
_SHORTEST = 2
"""Python instructions are two bytes long."""
_DEEPEST = 12
"""Lines of a call stack that are kept."""
_DISPATCHERS = ("/_ops.py", "_python_dispatch", "/autograd/", "/_dynamo/", "/_compile.py", "/_library/")
"""Files of torch between an operator and the code that calls it."""
_LAUNCHERS = ("/triton/runtime/", "/triton/compiler/")
"""Files between a Triton kernel and the code that launches it."""
_APPLY = str(Path("autograd") / "function.py")
_LINES: dict[tuple[int, int], tuple[Any, SourceLine]] = {}
"""By id of a code object and instruction: that object, which keeps the id valid, and the line. Code objects of two
files may be equal. Determining the columns of an instruction takes longer than most operators."""
_OWNERS: dict[str, str] = {}
"""By file: the owner of its code."""


@dataclass(frozen=True, slots=True)
class CallingCode:
    """The source lines of an operator's call."""

    lines: list[SourceLine]
    """Lines outside torch and this tool, the innermost first; torch's own where there is no other."""
    function: str | None = None
    """Name of the autograd Function whose forward is running, if any. `lines` are then those that call it."""
    invocation: int = 0
    """Equal for two operators of one call of that Function, while it runs."""
    by_tool: bool = False
    """Whether code of this tool called the operator, as while it reads a tensor."""


def calling_code(frame: Any, most: int = _DEEPEST) -> CallingCode:
    """Return the source lines of an operator's call; `frame` is the innermost frame that may have called it.

    An autograd Function is one operator, on the line that calls it. Where all code is torch's own, as inside its
    attention module, the line is torch's.
    """
    own: list[SourceLine] = []
    users: list[SourceLine] = []
    function: str | None = None
    invocation = 0
    while frame is not None and len(users) < most:
        code = frame.f_code
        owner = _owner(code.co_filename)
        if owner == "tool":
            if users or own:
                break
            return CallingCode([], by_tool=True)
        if owner != "users":
            if owner == "torch" and not own:
                own.append(_line(frame))
        elif code.co_name == "forward" and _is_apply(frame.f_back):
            users.clear()
            function = getattr(code, "co_qualname", "Function.forward").rpartition(".")[0]
            invocation = id(frame.f_back)
        else:
            users.append(_line(frame))
        frame = frame.f_back
    return CallingCode(users or own, function, invocation)


def is_users(line: SourceLine | None) -> bool:
    """Return whether a line is outside torch."""
    return line is not None and not line.file.startswith(_TORCH)


def _is_apply(frame: Any) -> bool:
    """Whether a frame is that of `torch.autograd.Function.apply`, whose callee is the Function's own code."""
    return frame is not None and frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith(_APPLY)


def _owner(file: str) -> str:
    owner = _OWNERS.get(file)
    if owner is None:
        owner = "users"
        if file.startswith(_TOOL) and not file.startswith(_MODELS_OF_THE_TOOL):
            owner = "tool"
        elif any(part in file for part in _LAUNCHERS):
            owner = "dispatcher"
        elif file.startswith(_TORCH):
            owner = "dispatcher" if any(part in file for part in _DISPATCHERS) else "torch"
        _OWNERS[file] = owner
    return owner


def _line(frame: Any) -> SourceLine:
    code, instruction = frame.f_code, frame.f_lasti
    known = _LINES.get((id(code), instruction))
    if known is None:
        known = _LINES[id(code), instruction] = code, _find_line(frame)
    return known[1]


def _find_line(frame: Any) -> SourceLine:
    code = frame.f_code
    columns = None
    line = frame.f_lineno
    if hasattr(code, "co_positions"):
        start, last, first, end = next(islice(code.co_positions(), frame.f_lasti // _SHORTEST, None))
        if None not in (start, last, first, end):
            line, columns = start, (first, last, end)
    return SourceLine(code.co_filename, line, code.co_name, columns)
