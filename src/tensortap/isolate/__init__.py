"""Every module judged on the reference's own inputs: a check around the user's own step, and the noise to allow for.

check.py         Check: an observer that compares on the fly; over
isolator.py      the hooks that replace what goes into modules and what comes out
comparator.py    measures every tensor against its record, and keeps the numbers
reference.py     which record that is, and its values
noise.py         how far records move under steps of one epsilon (perturbation.py)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.isolate.check import Check
    from tensortap.store import Run

__all__ = ["check", "noise"]


def check(
    model: Any,
    reference: str | os.PathLike[str] | Run,
    *,
    isolate: bool = True,
    noise: str | os.PathLike[str] | Run | Sequence[str | os.PathLike[str] | Run] | None = None,
    rename: Sequence[str] = (),
    modules: str | Sequence[str] | Callable[[str, Any], bool] = "*",
    steps: Collection[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    optimizer: Any = None,
    compiled: str = "boundary",
    on_error: str = "raise",
) -> Check:
    """Hold a model against a reference while it runs. After the block, `result` is what `tensortap.compare` gives.

    isolate: feed every module the reference's recorded inputs in place of its own, compare its output, and pass the
        reference's output on; gradients likewise. Each module is judged by itself, and what the code between modules
        makes wrong is laid to the container. False compares the run as it is. The candidate is never stored.
    noise: a file that `tensortap.noise` wrote, a further run of the reference, or a sequence of these.
    rename: 'PATTERN=REPLACEMENT' regular expressions that turn the model's module names into the reference's.
    modules: name patterns, or a function of (name, module); others are neither fed nor compared.
    steps: the steps to check, as the reference counts them; None is all that it has.
    rtol, atol: a tolerance for all records alike.
    optimizer: its steps are counted; without it, call `check.step()` after each step but the last.
    compiled, on_error: as in `tensortap.capture`.

    The reference is a run captured with keep="tensors" and at least the kinds input and output; with grad_input too, a
    wrong backward is laid to exactly one module. Parameters are left alone, and no hook stays behind. Inside the block
    the model returns the reference's outputs, so that a loss computed from them is the reference's loss.

    >>> with tensortap.check(model, "runs/reference") as check:
    ...     model(batch).loss.backward()
    >>> print(check.result)
    layers.2.norm2 (Norm) is wrong on the reference's own inputs: in step 0, its output 0 is off by 0.15 (relative L2).
    """
    from tensortap.compare.sources import noise_sources
    from tensortap.isolate.check import Check, Options  # loads the reader: not before it is needed

    options = Options(
        isolate=isolate,
        noise=noise_sources(noise),
        rename=tuple(rename),
        modules=modules,
        steps=steps,
        rtol=rtol,
        atol=atol,
        compiled=compiled,
        on_error=on_error,
    )
    return Check(model, reference, options, optimizer)


def noise(
    model: Any,
    work: Any,
    path: str | os.PathLike[str],
    *,
    seeds: int = 3,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Measure how far each record of a right model moves when nothing but rounding changes; write it to `path`.

    model: the reference model, in the precision that is to be judged.
    work: a batch (a tensor, a tuple of arguments or a dict of keyword arguments), or a function of the model that does
        a forward and a backward the way the user's step does. Of a batch alone, backward starts at the loss if the
        model returns one, else at all outputs with random gradients.
    path: a new file, for `check(noise=...)`, `compare(noise=...)` and `tensortap compare --noise`.
    seeds: how many runs, each with other random steps.
    progress: called with runs done and runs in all.

    The model runs once as it is. Then each module is run on what it was given, its parameters and everything that comes
    in moved by one epsilon up or down at random, and what comes out is compared. Parameters, buffers, gradients and the
    random state are afterwards what they were, bit for bit.

    >>> tensortap.noise(model, lambda model: loss_of(model, batch).backward(), "runs/noise")
    >>> with tensortap.check(ported, "runs/reference", noise="runs/noise") as check:
    ...     loss_of(ported, batch).backward()
    """
    from tensortap.isolate.noise import measure_noise  # loads the reader: not before it is needed

    measure_noise(model, work, Path(path), seeds, overwrite, progress)
    return Path(path)
