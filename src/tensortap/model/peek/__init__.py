"""Peek: print the tensors of chosen modules as they flow, a few times, keep their values, and then be gone."""

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
    """Print what goes into and out of chosen modules, and the gradients of both, for their first few calls.

    modules: a name pattern ("layers.*.attn"), several, or a function of (name, module). The root is "(root)".
    kinds: any of input, output, grad_input, grad_output.
    times: calls of each module that are shown; after them nothing is left on it.
    rank: the rank that prints; None is every rank.
    save: also write each call into an .npz file: `file.npz`, then `file.1.npz`, ...; with several modules the
        module's name is part of it.
    file: where to print; None is stdout.
    quiet: print nothing; the values are there afterwards all the same.
    max_memory: the most bytes of values that the handle keeps, 512 MiB unless given. Beyond it the oldest values are
        dropped, and reading them is an error that says so.

    >>> with tensortap.peek(model, "down_blk2.b.4", times=1):
    ...     model(batch).sum().backward()

    >>> p = tensortap.peek(model, "conv2", quiet=True)
    >>> model(batch).sum().backward()
    >>> p["conv2"].output, p["conv2"].grad_input                # NumPy arrays, of the last call
    >>> p["conv2"].calls[0].input["mask"]                       # of any call, by path
    >>> print(p.histogram("conv2", "output"))
    """
    from tensortap.model.peek.handle import Peek  # loads the observer and the terminal: not before it is needed

    return Peek(model, modules, kinds, times, rank, save, file, quiet, max_memory)
