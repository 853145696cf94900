"""One module run alone on what a run recorded of it: another dtype, another device, another implementation."""

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
    """Run one module of a model on its recorded inputs, and compare it with what the run recorded.

    Where the run has the gradients that came back to the module, backward is run and compared, too. Parameters are the
    run's own where it has them, else the model's; the notes of the result say which.

    run: a path, or a run that is open already. It must have kept the module's inputs.
    module: its name; "(root)" is the whole model.
    model: a torch nn.Module or a paddle nn.Layer, which stays as it is, or "file.py:function" that builds one.
    implementation: a function, or "file.py:function", that runs in place of the module's forward, and like it
        gets the module first.
    step, micro, call, rank: which of the recorded calls; None is the first.
    dtype, device: what the module and its inputs are moved to.
    evaluate: switch the module to evaluation.
    arguments: arguments by name that are no tensors, in place of those that the run has; for what it could not keep,
        the defaults of forward are used.
    rtol, atol: a tolerance for all records alike, instead of the one from dtypes and incoming error.
    repro: a folder to write a script and its tensors to, which show the same without tensortap.
    details: how many tensors to look at closely, for `Comparison.details`.

    >>> result = tensortap.replay("runs/a", "layers.0.mlp", "train.py:build_model", dtype="float64")
    >>> print(result)                                                           # doctest: +SKIP
    The runs match: ...
    """
    from tensortap.replay.excerpt import Place
    from tensortap.replay.replaying import Request, run_replay

    place = Place("" if module == "(root)" else module, step, micro, call, rank)
    return run_replay(
        Request(
            run=run,
            place=place,
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
