"""A pair of hooks that save one module's input, output and gradients to an .npz file.

    from tensortap.compat.gradients import save_gradients_and_inputs

    forward_hook, backward_hook = save_gradients_and_inputs("down_blk2_b4")
    model.down_blk2.b[4].register_forward_hook(forward_hook)
    model.down_blk2.b[4].register_full_backward_hook(backward_hook)

Scripts that register hooks of their own keep working as they are. `tensortap.peek` shows the same and more without
touching the script, counts calls, and works on paddle, which has no backward hook for a layer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.capture.flatten import open_value
from tensortap.errors import StoreWriteError, UsageError
from tensortap.frameworks import framework_of
from tensortap.frameworks.base import Framework
from tensortap.model.peek.call_file import CallArrays, free_path, write_call
from tensortap.report.files import output as files

__all__ = ["save_gradients_and_inputs"]

Hook = Callable[[Any, Any, Any], None]

_MOST_WAITING = 64
"""Forwards that are remembered without a backward: an evaluation with autograd on must not fill the memory."""


class _Calls:
    """The forwards whose backward has not come yet. Copies, not references: a later module may work in place."""

    def __init__(self) -> None:
        self.waiting: list[tuple[CallArrays, str]] = []
        self.stopped = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        return _Calls()


def save_gradients_and_inputs(
    name: str, folder: str | Path = ".", *, rank: int | None = 0, overwrite: bool = False, quiet: bool = False
) -> tuple[Hook, Hook]:
    """A forward hook and a full backward hook that write `folder/gradients_and_inputs_{name}.npz`.

    The file has `grad_input`, `grad_output`, `input` and `output`; where there are several tensors, the further ones
    are `input_1` and so on. What has no gradient (the input of a first layer) has no entry. bfloat16 is written as
    float32; `dtypes` says what it was. No process group is needed.

    folder: made at once if it is missing; one that cannot be written to is refused here and not in the first backward.
    rank: the rank that prints and writes; None is every rank, and those above 0 add their number to the name.
    overwrite: False gives every backward a file of its own, `….npz`, `….1.npz`, and so on; True keeps the newest.
    quiet: True writes without printing.

    A hook never ends the training: if a file cannot be written, a warning says so and these hooks save no more.
    """
    if not isinstance(name, str):
        raise UsageError(
            f"name takes a text that becomes part of the file's name, not a {type(name).__qualname__}; "
            "the hooks that are returned go on the module: module.register_forward_hook(forward_hook)"
        )
    if not name or "/" in name or "\\" in name:
        raise UsageError(f"name: {name!r} becomes part of a file's name; give the folder with folder=")
    target = _made(folder)
    calls = _Calls()

    @_guarded(name, calls)
    def forward_hook(module: Any, args: Any, output: Any) -> None:
        framework = framework_of(module)
        if not _wanted(framework, rank) or not framework.records_gradients():
            return
        if framework.replaying() and calls.waiting:  # activation checkpointing runs a forward again in backward
            return
        entries = CallArrays()
        for kind, value in (("input", args), ("output", output)):
            _gather(framework, entries, kind, value)
        if not any(framework.requires_gradient(t) for _, t in open_value(output, framework.is_tensor).tensors):
            return  # no backward will come for it
        calls.waiting.append((entries, str(type(output))))
        del calls.waiting[:-_MOST_WAITING]

    @_guarded(name, calls)
    def backward_hook(module: Any, grad_input: Any, grad_output: Any) -> None:
        framework = framework_of(module)
        if not _wanted(framework, rank):
            return
        # Backward walks the calls from the last to the first.
        entries, type_of_output = calls.waiting.pop() if calls.waiting else (CallArrays(), "unknown")
        for kind, value in (("grad_input", grad_input), ("grad_output", grad_output)):
            _gather(framework, entries, kind, value)
        here = framework.rank()
        path = target / f"gradients_and_inputs_{name}{f'.rank{here}' if here else ''}.npz"
        if not overwrite:
            path = free_path(path)
        if not quiet:
            _tell(name, type_of_output, entries)
        write_call(path, entries, module=name, cls=type(module).__name__, framework=framework.name)
        if not quiet:
            print(f"saved {path}")

    return forward_hook, backward_hook


def _made(folder: str | Path) -> Path:
    """The folder as it is meant now: the script may go elsewhere before the first backward."""
    path = Path(os.path.abspath(folder))  # noqa: PTH100  # keeps links
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreWriteError(f"{path} cannot be made: {error.strerror}; give another one with folder=") from error
    files.check(path / "any.npz")
    return path


def _guarded(name: str, calls: _Calls) -> Callable[[Hook], Hook]:
    """What goes wrong in a hook must not break the step it is called from: it ends the saving instead."""

    def guard(hook: Hook) -> Hook:
        @wraps(hook)
        def guarded(module: Any, before: Any, after: Any) -> None:
            if calls.stopped:
                return
            try:
                hook(module, before, after)
            except Exception as error:
                calls.stopped = True
                calls.waiting.clear()
                warnings.warn(
                    f"tensortap stopped saving {name}: {error} (what was written before is readable); "
                    "training goes on without it",
                    RuntimeWarning,
                    stacklevel=2,
                )

        return guarded

    return guard


def _wanted(framework: Framework, rank: int | None) -> bool:
    return rank is None or framework.rank() == rank


def _gather(framework: Framework, entries: CallArrays, kind: str, value: Any) -> None:
    for path, tensor in open_value(value, framework.is_tensor).tensors:
        if not framework.unreadable(tensor):
            entries.add(kind, path, framework.host(tensor))


def _tell(name: str, type_of_output: str, entries: CallArrays) -> None:
    print(f"output {type_of_output}")
    for kind in ("input", "grad_input", "grad_output"):
        found = [array for entry, array in entries.arrays.items() if entry == kind or entry.startswith(f"{kind}_")]
        for number, array in enumerate(found):
            print(f"{kind}_{number} shape {list(array.shape)} {array.dtype}")
    with np.printoptions(threshold=64, edgeitems=1, precision=4):
        for kind, words in (
            ("grad_input", "Grad Input"),
            ("grad_output", "Grad Output"),
            ("input", "Input"),
            ("output", "Output"),
        ):
            print(f"{words} for {name}: {entries.arrays.get(kind)}")
