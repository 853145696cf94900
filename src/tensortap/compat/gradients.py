"""Hooks that save one module's input, output and gradients to an .npz file.

    from tensortap.compat.gradients import save_gradients_and_inputs

    forward_hook, backward_hook = save_gradients_and_inputs("down_blk2_b4")
    model.down_blk2.b[4].register_forward_hook(forward_hook)
    model.down_blk2.b[4].register_full_backward_hook(backward_hook)

Scripts that register these hooks keep working unchanged. `tensortap.peek` shows the same and more without changing the
model's code, counts calls, and works on paddle, which has no backward hook for a layer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from tensortap.capture.watching.flatten import open_value
from tensortap.core.interrupts import raise_interrupt
from tensortap.errors import StoreWriteError, UsageError
from tensortap.frameworks import framework_of
from tensortap.frameworks.base import Framework
from tensortap.model.peek.call_file import CallArrays, free_path, write_call
from tensortap.report.files import output as files

__all__ = ["save_gradients_and_inputs"]

Hook = Callable[[Any, Any, Any], None]

_MAX_PENDING = 64
"""Upper bound on forwards kept without a backward: an evaluation with autograd on must not fill the memory."""


class _PendingForwards:
    """Forwards whose backward has not run yet. Tensors are copied, because a later module may work in place."""

    def __init__(self) -> None:
        self.forwards: list[tuple[CallArrays, str]] = []
        self.stopped = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _PendingForwards:
        return _PendingForwards()


def save_gradients_and_inputs(
    name: str, folder: str | Path = ".", *, rank: int | None = 0, overwrite: bool = False, quiet: bool = False
) -> tuple[Hook, Hook]:
    """Return a forward hook and a full backward hook that write `folder/gradients_and_inputs_{name}.npz`.

    The file has `grad_input`, `grad_output`, `input` and `output`; further tensors are named `input_1` and so on. A
    tensor without a gradient (the input of a first layer) has no gradient entry. bfloat16 is written as float32;
    `dtypes` has the original dtypes. No process group is needed.

    folder: created at once if missing; a folder that cannot be written to raises here, not in the first backward.
    rank: the rank that prints and writes; None is every rank, and ranks above 0 add their number to the name.
    overwrite: False writes each backward to a new file, `….npz`, `….1.npz`, and so on; True keeps only the newest.
    quiet: True writes without printing.

    The hooks never stop the training: if a file cannot be written, they warn and save nothing more.
    """
    if not isinstance(name, str):
        raise UsageError(
            f"name takes a text that becomes part of the file's name, not a {type(name).__qualname__}; "
            "register the returned hooks on the module: module.register_forward_hook(forward_hook)"
        )
    if not name or "/" in name or "\\" in name:
        raise UsageError(f"name: {name!r} becomes part of a file's name; give the folder with folder=")
    target = _create_folder(folder)
    pending = _PendingForwards()

    @_stop_on_error(name, pending)
    def forward_hook(module: Any, args: Any, output: Any) -> None:
        framework = framework_of(module)
        if not _is_selected_rank(framework, rank) or not framework.records_gradients():
            return
        if framework.recomputing() and pending.forwards:  # activation checkpointing runs a forward again in backward
            return
        arrays = CallArrays()
        for kind, value in (("input", args), ("output", output)):
            _add_arrays(framework, arrays, kind, value)
        if not any(framework.requires_gradient(t) for _, t in open_value(output, framework.is_tensor).tensors):
            return  # it will have no backward
        pending.forwards.append((arrays, str(type(output))))
        del pending.forwards[:-_MAX_PENDING]

    @_stop_on_error(name, pending)
    def backward_hook(module: Any, grad_input: Any, grad_output: Any) -> None:
        framework = framework_of(module)
        if not _is_selected_rank(framework, rank):
            return
        # Backward runs through the calls from the last to the first.
        arrays, type_of_output = pending.forwards.pop() if pending.forwards else (CallArrays(), "unknown")
        for kind, value in (("grad_input", grad_input), ("grad_output", grad_output)):
            _add_arrays(framework, arrays, kind, value)
        here = framework.rank()
        path = target / f"gradients_and_inputs_{name}{f'.rank{here}' if here else ''}.npz"
        if not overwrite:
            path = free_path(path)
        if not quiet:
            _print_call(name, type_of_output, arrays)
        write_call(path, arrays, module=name, cls=type(module).__name__, framework=framework.name)
        if not quiet:
            print(f"saved {path}")

    return forward_hook, backward_hook


def _create_folder(folder: str | Path) -> Path:
    """Create the folder and return its absolute path: the script may change the working folder later."""
    path = Path(os.path.abspath(folder))  # noqa: PTH100  # keeps links
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreWriteError(f"{path} cannot be created: {error.strerror}; give another one with folder=") from error
    files.check(path / "any.npz")
    return path


def _stop_on_error(name: str, pending: _PendingForwards) -> Callable[[Hook], Hook]:
    """Return a decorator: an error in the hook stops the saving with a warning, and never reaches the training."""

    def guard(hook: Hook) -> Hook:
        @wraps(hook)
        def guarded(module: Any, before: Any, after: Any) -> None:
            if pending.stopped:
                return
            try:
                hook(module, before, after)
            except Exception as error:
                raise_interrupt(error)
                pending.stopped = True
                pending.forwards.clear()
                warnings.warn(
                    f"tensortap stopped saving {name}: {error} (earlier files are readable); "
                    "training continues without it",
                    RuntimeWarning,
                    stacklevel=2,
                )

        return guarded

    return guard


def _is_selected_rank(framework: Framework, rank: int | None) -> bool:
    return rank is None or framework.rank() == rank


def _add_arrays(framework: Framework, arrays: CallArrays, kind: str, value: Any) -> None:
    for path, tensor in open_value(value, framework.is_tensor).tensors:
        if not framework.unreadable(tensor):
            arrays.add(kind, path, framework.host(tensor))


def _print_call(name: str, type_of_output: str, arrays: CallArrays) -> None:
    print(f"output {type_of_output}")
    for kind in ("input", "grad_input", "grad_output"):
        found = [array for entry, array in arrays.arrays.items() if entry == kind or entry.startswith(f"{kind}_")]
        for number, array in enumerate(found):
            print(f"{kind}_{number} shape {list(array.shape)} {array.dtype}")
    with np.printoptions(threshold=64, edgeitems=1, precision=4):
        for kind, words in (
            ("grad_input", "Grad Input"),
            ("grad_output", "Grad Output"),
            ("input", "Input"),
            ("output", "Output"),
        ):
            print(f"{words} for {name}: {arrays.arrays.get(kind)}")
