"""Peek: print and keep the tensors of chosen modules during their first calls, then remove the hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.model.peek.handle import Peek

__all__ = ["DEFAULT_MEMORY", "KINDS", "peek"]

KINDS = ("input", "output", "grad_input", "grad_output")
DEFAULT_MEMORY = 512 << 20


def peek(
    model: Any,
    modules: str | Sequence[str] | Callable[[str, Any], bool],
    *,
    kinds: Collection[str] = KINDS,
    times: int = 3,
    rank: int | None = 0,
    save: str | Path | None = None,
    file: IO[str] | None = None,
    quiet: bool = False,
    max_memory: int = DEFAULT_MEMORY,
) -> Peek:
    """Print the inputs and outputs of chosen modules, and the gradients of both, for the first few calls.

    modules: a name pattern ("layers.*.attn"), several patterns, or a function of (name, module). The root is "(root)".
    kinds: any of input, output, grad_input, grad_output.
    times: number of calls of each module to show; afterwards its hooks are removed.
    rank: the rank that prints; None is every rank.
    save: also write each call to an .npz file: `file.npz`, then `file.1.npz`, and so on. With several modules, the
        file name includes the module's name.
    file: where to print; None is stdout.
    quiet: print nothing, only keep the values.
    max_memory: upper bound on the bytes of values that the handle keeps, 512 MiB by default. Beyond it, the oldest
        values are dropped; reading them raises an error that says so.

    >>> with tensortap.peek(model, "down_blk2.b.4", times=1):
    ...     model(batch).sum().backward()

    >>> p = tensortap.peek(model, "conv2", quiet=True)
    >>> model(batch).sum().backward()
    >>> p["conv2"].output, p["conv2"].grad_input                # NumPy arrays, of the last call
    >>> p["conv2"].calls[0].input["mask"]                       # of any call, by path
    >>> print(p.histogram("conv2", "output"))
    """
    from tensortap.model.peek.handle import Peek, PeekOptions  # imports rich, which importing tensortap must not

    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    return Peek(model, modules, PeekOptions(kinds, times, rank, save, file, quiet, max_memory))
