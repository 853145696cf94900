"""Replays one module alone on its recorded inputs: in another dtype, on another device, with another implementation.

replaying.py      run_replay: runs the module under a tap, and compares
recorded_call.py  RecordedCall: the records of one call
arguments.py      CallArguments: the arguments of the call, rebuilt from paths
model_lookup.py   the module in the model; sources.py builds models from a user's file
state.py          parameters and buffers, restored from the run
repro.py          the script that reproduces the call, in the framework's dialect
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tensortap.core.records import Comparison

if TYPE_CHECKING:
    from tensortap.store import Run

__all__ = ["replay"]


def replay(
    run: str | os.PathLike[str] | Run,
    module: str,
    model: Any,
    *,
    implementation: str | Callable[..., Any] | None = None,
    step: int | None = None,
    micro: int | None = None,
    call: int | None = None,
    rank: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    evaluate: bool = False,
    arguments: Mapping[str, Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    repro: str | os.PathLike[str] | None = None,
    details: int = 0,
) -> Comparison:
    """Run one module of a model on its recorded inputs, and compare the results with the recorded ones.

    If the run has the gradients of the module's outputs, backward runs and is compared, too. Parameters come from the
    run if it recorded them, else from the model. The notes of the result say which.

    run: a path or an open run. It must have kept the module's inputs.
    module: its name; "(root)" is the whole model.
    model: a torch nn.Module or a paddle nn.Layer, which is not modified, or "file.py:function" that builds one.
    implementation: a function, or "file.py:function", that replaces the module's forward and takes the module as its
        first argument.
    step, micro, call, rank: which of the recorded calls; None selects the first.
    dtype, device: where to move the module and its inputs.
    evaluate: switch the module to evaluation mode.
    arguments: plain arguments by name; they replace those of the run. For arguments that the run could not keep, the
        default is that of forward.
    rtol, atol: one tolerance for all records, instead of the one from dtypes and incoming error.
    repro: a folder for a script and its tensors that reproduce the result without tensortap.
    details: number of tensors to inspect element by element, for `Comparison.details`.

    >>> result = tensortap.replay("runs/a", "layers.0.mlp", "train.py:build_model", dtype="float64")
    >>> print(result)                                                           # doctest: +SKIP
    The runs match: ...
    """
    from tensortap.replay.recorded_call import CallSelector
    from tensortap.replay.replaying import ReplayOptions, run_replay

    selector = CallSelector("" if module == "(root)" else module, step, micro, call, rank)
    return run_replay(
        ReplayOptions(
            run=run,
            selector=selector,
            model=model,
            implementation=implementation,
            dtype=dtype,
            device=device,
            evaluate=evaluate,
            arguments=dict(arguments or {}),
            rtol=rtol,
            atol=atol,
            repro=repro,
            details=details,
        )
    )
