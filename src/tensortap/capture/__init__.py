"""The first phase: tap a model while it trains, and write what flows through it into a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensortap.capture.selection import DEFAULT_KINDS, Selection

if TYPE_CHECKING:
    from tensortap.capture.tap import Tap

__all__ = ["capture"]


def capture(
    model: Any,
    path: str | Path,
    *,
    keep: str | Mapping[str, str] = "summary",
    kinds: Collection[str] = DEFAULT_KINDS,
    modules: str | Sequence[str] | Callable[[str, Any], bool] = "*",
    classes: str | Collection[str] | None = None,
    steps: Collection[int] | None = None,
    ranks: Collection[int] | None = None,
    optimizer: Any = None,
    overwrite: bool = False,
    on_error: str = "raise",
    compiled: str = "boundary",
    max_buffer: int | None = None,
    gather: bool = True,
) -> Tap:
    """Tap a torch `nn.Module`, a paddle `nn.Layer` or a `paddle.Model`; write what flows through it to a folder.

    keep: "summary" (counts, moments, digest and sketch of each tensor), "tensors" (all bytes too), or a mapping from
        name patterns to one of these; the first pattern that matches decides.
    kinds: any of input, output, grad_input, grad_output, param, param_grad, buffer.
    modules: a name pattern ("layers.*.attn"), several, or a function of (name, module). The root is "(root)".
    classes: class names; only modules of one of them are tapped.
    steps: the steps to record, any container of ints; None is every step.
    ranks: the ranks that record; None is every rank.
    optimizer: its steps are counted, and no `tap.step()` is needed. Give the one whose `step()` is called: a wrapper
        rather than what it wraps. A `paddle.Model` stands for the optimizer that it was prepared with.
    overwrite: replace an earlier run at `path`.
    on_error: "raise" stops with an error at the end of the step; "warn" switches the tap off and lets training go on.
    compiled: "boundary" looks at compiled modules from outside; "eager" runs them uncompiled and sees everything.
    max_buffer: bytes of host memory that may wait for the disk.
    gather: on a GPU, read several tensors together, a little after they are seen, where that has proved to be the same.
        False reads each at once.

    What the modules are called with beside tensors is kept as well, where it changes.

    Nothing in the training changes, and nothing stays behind after the block or `close()`.

    >>> with tensortap.capture(model, "runs/a", keep="tensors", steps=range(0, 100, 10)) as tap:
    ...     for batch in loader:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         tap.step()
    """
    from tensortap.capture.tap import Options, Tap  # loads the writer: not before it is needed

    selection = Selection(keep, kinds, modules, classes, steps, ranks)
    options = Options(overwrite, on_error, compiled, max_buffer, gather)
    return Tap(model, path, selection, options, optimizer)
