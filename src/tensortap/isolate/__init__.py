"""Checks a running model against a reference, each module on the reference's own inputs, and measures noise.

check.py         Check: an observer that compares while the model runs
isolator.py      the hooks that replace inputs and outputs of modules, over aliases.py
comparator.py    measures every tensor against its record, and keeps the numbers
choices.py       experts that rounding chose, compared while both sides are at hand
reference.py     finds that record and its values
truth.py         the exact results: when to run a float64 copy of the model, and what both sides are off by
exact_pass.py    one forward and backward of that copy, fed like the model
conclusion.py    the result: aligns, judges and words what was measured
compiled.py      a model against its compiled self
noise.py         how far records move under steps of one epsilon (perturbation.py)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.core.records import Comparison
    from tensortap.isolate.check import Check
    from tensortap.store import Run

__all__ = ["check", "check_compiled", "noise"]


def check(
    model: Any,
    reference: str | os.PathLike[str] | Run,
    *,
    isolate: bool = True,
    noise: str | os.PathLike[str] | Run | Sequence[str | os.PathLike[str] | Run] | None = None,
    truth: Any = None,
    rename: Sequence[str] = (),
    modules: str | Sequence[str] | Callable[[str, Any], bool] = "*",
    steps: Collection[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    optimizer: Any = None,
    compiled: str = "boundary",
    on_error: str = "raise",
    zoom: Any = None,
) -> Check:
    """Compare a model with a reference while it runs. After the block, `result` is as from `tensortap.compare`.

    model: a module, or several by name, as the reference was captured.
    isolate: feed every module the reference's recorded inputs in place of its own, compare its output, and pass on the
        reference's output; gradients likewise. Each module is judged alone, and errors of the code between modules are
        attributed to the container. False compares the run without replacing anything. The candidate is never stored.
    noise: a file written by `tensortap.noise`, another run of the reference, or a sequence of these.
    truth: "float64", or the reference's model: run a float64 copy of the model, or of that one, on the same inputs and
        gradients. The result then names modules that round more than the reference's, forward or backward, and says
        which side is at fault; docs/truth.md.
    rename: 'PATTERN=REPLACEMENT' regular expressions from the model's module names to the reference's.
    modules: name patterns, or a function of (name, module); other modules are neither fed nor compared.
    steps: the steps to check, as the reference counts them; None checks all that it has.
    rtol, atol: one tolerance for all records.
    optimizer: the optimizer whose steps are counted; without it, call `check.step()` after each step but the last.
    compiled, on_error: as in `tensortap.capture`.
    zoom: the reference's model, or "file.py:function" that builds it; True if `truth` is that model. If a module is
        wrong, it runs again beside the reference's, operator by operator, and the sentence ends with the line where
        they part.

    The reference is a run captured with keep="tensors" and at least the kinds input and output. With grad_input, too, a
    wrong backward is attributed to exactly one module. Parameters are not modified, and no hook remains. Inside the
    block the model returns the reference's outputs, so a loss computed from them is the reference's loss.

    >>> with tensortap.check(model, "runs/reference") as check:
    ...     model(batch).loss.backward()
    >>> print(check.result)
    layers.2.norm2 (Norm) is wrong on the reference's own inputs: in step 0, its output 0 is off by 0.15 (relative L2).
    """
    from tensortap.compare.sources import noise_sources
    from tensortap.isolate.check import Check, CheckOptions  # deferred: loads the reader

    options = CheckOptions(
        isolate=isolate,
        noise=noise_sources(noise),
        truth=truth,
        rename=tuple(rename),
        modules=modules,
        steps=steps,
        rtol=rtol,
        atol=atol,
        compiled=compiled,
        on_error=on_error,
        zoom=zoom,
    )
    return Check(model, reference, options, optimizer)


def check_compiled(
    model: Any,
    step: Callable[[Any], Any],
    *,
    compile: Mapping[str, Any] | None = None,  # as torch.compile's arguments; shadows a builtin on purpose
    truth: str | None = None,
    modules: str | Sequence[str] | Callable[[str, Any], bool] = "*",
    emulate_casts: bool = False,
    path: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
) -> Comparison:
    """Run a step uncompiled and compiled from the same state, and say which module the compiler computes differently.

    model: a torch module, compiled or not. One that is compiled, as a whole or in parts, also runs uncompiled.
    step: a function of the model that runs it, usually with backward: the candidate is called with the compiled model.
        State of the model and random numbers are the same for all runs and restored at the end, an optimizer's not.
    compile: arguments of `torch.compile`, for a model that is not compiled.
    truth: "float64" also runs a float64 copy. The result then says which side is further from it; docs/truth.md.
    modules, rtol, atol: as in `tensortap.capture` and `tensortap.compare`.
    emulate_casts: let inductor round between operations, as uncompiled code does. What then still differs in bfloat16
        is not due to fused kernels that round less.
    path, overwrite: a folder for the runs "eager", "compiled" and "truth". None holds them in memory.

    The result is as from `tensortap.compare`: the eager run is the reference, the compiled one the candidate.

    >>> result = tensortap.check_compiled(model, lambda model: model(batch).loss.backward())
    >>> print(result)
    """
    from pathlib import Path

    from tensortap.isolate.compiled import CompiledOptions, compare_compiled  # deferred: loads the reader

    where = None if path is None else Path(path)
    options = CompiledOptions(compile, truth, where, modules, emulate_casts, rtol, atol, overwrite)
    return compare_compiled(model, step, options)


def noise(
    model: Any,
    work: Any,
    path: str | os.PathLike[str],
    *,
    seeds: int = 3,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Measure how far each record of a correct model moves when only rounding changes; write it to `path`.

    model: the reference model, in the precision to be judged; or several by name, as for `tensortap.capture`.
    work: a batch (a tensor, a tuple of arguments or a dict of keyword arguments), or a function of the model that does
        a forward and a backward as the user's step does. For a batch, backward starts at the loss if the model
        returns one, else at all outputs with random gradients.
    path: a new file, for `check(noise=...)`, `compare(noise=...)` and `tensortap compare --noise`.
    seeds: number of runs, each with other random perturbations.
    progress: called with the number of finished runs and of all runs.

    The model runs once unchanged. Then each module runs on its recorded inputs, with inputs and parameters moved by one
    epsilon up or down at random, and its outputs are compared. Parameters, buffers, gradients and the random state are
    restored bit for bit.

    >>> tensortap.noise(model, lambda model: loss_of(model, batch).backward(), "runs/noise")
    >>> with tensortap.check(ported, "runs/reference", noise="runs/noise") as check:
    ...     loss_of(ported, batch).backward()
    """
    from tensortap.isolate.noise import measure_noise  # deferred: loads the reader

    measure_noise(model, work, Path(path), seeds, overwrite, progress)
    return Path(path)
