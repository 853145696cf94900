"""The first phase: tap a model while it trains, and write its tensors into a run.

tap.py        the tap: an observer whose sink (run_sink.py) writes a run; tap_options.py has its options
observer.py   keeps hooks on a model from step to step
selection.py  which modules, kinds, steps and ranks
modules/      the model's modules and their tensors
watching/     hooks, and the calls and gradients that they observe
recording/    tensors become records
loop/         loop facts: what the training loop does beside tensors
placement/    where in the whole the elements of a record are
incidents/    NaN, spikes of the loss, exceptions
coverage.py   what was seen of each module; messages.py writes to stderr
budget.py     which steps to record for a given cost; garbage.py makes collections rarer meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.capture.selection import DEFAULT_KINDS, OPTIMIZER_KINDS, Selection
from tensortap.core.urls import Url, is_url
from tensortap.errors import UsageError

if TYPE_CHECKING:
    from tensortap.capture.tap import Tap

__all__ = ["capture"]


def capture(
    model: Any,
    path: str | Path | Url | None = None,
    *,
    keep: str | Mapping[str, str] | None = None,
    kinds: Collection[str] | None = None,
    modules: str | Sequence[str] | Callable[[str, Any], bool] = "*",
    classes: str | Collection[str] | None = None,
    steps: Collection[int] | None = None,
    ranks: Collection[int] | None = None,
    optimizer: Any = None,
    overwrite: bool = False,
    on_error: str = "warn",
    compiled: str = "boundary",
    emulate_casts: bool = False,
    max_buffer: int | None = None,
    max_memory: int | None = None,
    gather: bool = True,
    sketch: int = 256,
    evaluation: bool = False,
    budget: float | None = None,
    on_nonfinite: str | None = None,
    ring: int | None = None,
    loss: str | None = None,
    layout: str | Path | Mapping[str, Any] | None = None,
    spool: str | Path | None = None,
    spool_size: int | None = None,
    upload_timeout: float | None = None,
    operators: str | Sequence[str] | None = None,
) -> Tap:
    """Tap a torch `nn.Module`, a paddle `nn.Layer` or a `paddle.Model`, and write its tensors to a folder.

    model: also several models by name, `{"generator": g, "critic": c}`. Module names then begin with the name of the
        model, and a micro step begins with the first call after a backward.
    path: the folder of the run, or a URL such as "s3://bucket/runs/a" (docs/object-storage.md). None holds the run in
        memory, as `tap.run`.
    keep: "summary" (counts, moments, digest and sketch of each tensor), "tensors" (all bytes too), or a mapping from
        name patterns to one of these; the first pattern that matches decides. None is "summary", with `ring` "ring".
    kinds: any of input, output, grad_input, grad_output, param, param_grad, step_grad, buffer. None is input, output,
        grad_output and param_grad; with `optimizer=` also step_grad, and param after each step.
    modules: a name pattern ("layers.*.attn"), several, or a function of (name, module). The root is "(root)".
    classes: class names; only modules of one of them are tapped.
    steps: the steps to record, any container of ints; None is every step.
    ranks: the ranks that record; None is every rank.
    optimizer: counts the steps, so that no `tap.step()` is needed. Pass the object whose `step()` is called: the
        wrapper, not the wrapped optimizer. With several optimizers, as a list or by name, a step ends when each has
        stepped; see `tap.step()`. A `paddle.Model` stands for the optimizer that it was prepared with.
    overwrite: replace an earlier run at `path`.
    on_error: the effect of an error inside the tap. "warn" stops the recording, writes one line to stderr and the
        reason into the run, and training continues. "raise" raises CaptureError at the end of the step.
    compiled: "boundary" sees compiled modules from outside, and leaves their code as it is. "inside" compiles them
        again with taps, and sees every module in the graph; torch only. "eager" runs them uncompiled and sees all.
    emulate_casts: with compiled="inside", let inductor round between operations, as uncompiled code does. Without it,
        taps may change the rounding of bfloat16 and float16, because they split kernels. docs/compiled.md says more.
    max_buffer: bytes of host memory that may wait for the disk.
    max_memory: upper bound in bytes for a run in memory. None is 2 GiB, or a quarter of the memory if that is less.
        Tensors may use seven eighths of it. From the first tensor that does not fit, only summaries are kept, with a
        line on stderr and a notice. If records fill all of it, recording stops as it does on a full disk.
    gather: on a GPU, defer reads so that several tensors share one launch, where a trial showed equal results. False
        reads each tensor at once.
    sketch: numbers in the sketch of a tensor: 256, 128, 64 or 32. Fewer make a smaller run and a coarser estimate: its
        standard error is 4 % with 256, 9 % with 64. Runs of different sizes can be compared.
    evaluation: also record evaluation between training steps (autograd off, or the model in eval mode), in the phase
        "eval" with micro steps of its own. Otherwise the coverage reports the number of its forwards. It never counts
        as training. A run that never trains is recorded whole.
    budget: the share of the time that recording may take, like 0.02. The cost is measured, and every 2ⁿ-th step is
        recorded, with the smallest n that keeps the share. None records every step. With `steps`, it is not applied.
    on_nonfinite: the reaction to a NaN or Inf that is born. "stop" names the module on stderr and raises NonfiniteError
        at the end of the step, on a GPU of the next one. "keep" names it and keeps all tensors of that step.
    ring: the number of last steps to hold. Keep their tensors if a NaN is born (with `on_nonfinite`), if an exception
        leaves the block, if the loss jumps, or at `tap.keep()`. Steps that leave the ring leave the run, so it does not
        grow; `keep="summary"` keeps the summaries of all of them. `keep={"layers.0.*": "ring"}` holds tensors of these
        modules alone.
    loss: the output that is the loss, like "criterion" or "(root):loss". `tap.loss(value)` is another way to give it.
    layout: in a run of several processes, where plain tensors between parallel layers sit in the whole, and the global
        names of a stage's layers or a rank's experts: a TOML file, or a mapping of the same form. docs/parallel.md has
        the notation. DTensor, FSDP, DDP, pipeline stages and Megatron's layers need none.
    spool: for a URL, the folder on this disk for data that is not uploaded yet. None is TENSORTAP_SPOOL, or a temporary
        one.
    spool_size: upper bound on its bytes, by default 8 GiB. A full spool slows the training down.
    upload_timeout: seconds without any progress after which an upload counts as failed, by default 300. The recording
        then ends as `on_error` says, and the spool stays for `tensortap upload`.
    operators: names of modules, like "layers.2.*", whose operators are recorded, too: the results of each torch
        operator in the module's own code, with its source line, and the gradients of its backward.

    Plain arguments of calls are kept as well, where they change.

    The training is unchanged, and nothing remains after the block or `close()`. `tap.run` is the run.

    >>> with tensortap.capture(model, "runs/a", keep="tensors", steps=range(0, 100, 10)) as tap:
    ...     for batch in loader:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         tap.step()

    >>> with tensortap.capture(model, keep="tensors") as tap:                 # in memory
    ...     model(batch).sum().backward()
    >>> tensortap.compare(tap.run, "runs/a")
    """
    from tensortap.capture.incidents.incidents import IncidentOptions, ringed
    from tensortap.capture.modules.models import one_model
    from tensortap.capture.placement.layout import read_layout
    from tensortap.capture.tap import Tap  # loads the writer, so only when needed
    from tensortap.capture.tap_options import TapOptions

    default = kinds is None and optimizer is not None
    kinds = (OPTIMIZER_KINDS if default else DEFAULT_KINDS) if kinds is None else kinds
    incidents = IncidentOptions(on_nonfinite, ring, loss)
    keep, rotates = ringed(keep, incidents)
    incidents = replace(incidents, rotates=rotates)
    selection = Selection(keep, kinds, modules, classes, steps, ranks, operators, params_after_alone=default)
    if "step_grad" in selection.kinds and optimizer is None:
        raise UsageError("kinds: step_grad is the gradient that an optimizer uses, and there is none: pass optimizer=")
    if path is None and max_buffer is not None:
        raise UsageError("max_buffer is for a run on disk, and there is no path: bound a run in memory with max_memory")
    if path is not None and max_memory is not None:
        raise UsageError("max_memory is for a run in memory, and there is a path: bound its buffers with max_buffer")
    upload = {"spool": spool, "spool_size": spool_size, "upload_timeout": upload_timeout}
    if not (is_url(path) or isinstance(path, Url)) and any(value is not None for value in upload.values()):
        raise UsageError("spool, spool_size and upload_timeout are for a run at a URL, such as s3://bucket/runs/a")
    options = TapOptions(
        overwrite=overwrite,
        on_error=on_error,
        compiled=compiled,
        emulate_casts=emulate_casts,
        max_buffer=max_buffer,
        gather=gather,
        max_memory=max_memory,
        sketch=sketch,
        evaluation=evaluation,
        budget=budget,
        incidents=incidents,
        layout=read_layout(layout),
        upload=upload,
    )
    return Tap(one_model(model), path, selection, options, optimizer)
