"""Peek: print the tensors of chosen modules as they flow, a few times, and then be gone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensortap.model.peek_handle import Peek

__all__ = ["KINDS", "peek"]

KINDS = ("input", "output", "grad_input", "grad_output")


def peek(
    model: Any,
    modules: str | Sequence[str] | Callable[[str, Any], bool],
    *,
    kinds: Collection[str] = KINDS,
    times: int = 3,
    rank: int | None = 0,
    save: str | Path | None = None,
    file: IO[str] | None = None,
) -> Peek:
    """Print what goes into and out of chosen modules, and the gradients of both, for their first few calls.

    modules: a name pattern ("layers.*.attn"), several, or a function of (name, module). The root is "(root)".
    kinds: any of input, output, grad_input, grad_output.
    times: calls of each module that are shown; after them nothing is left on it.
    rank: the rank that prints; None is every rank.
    save: also write each call into an .npz file: `file.npz`, then `file.1.npz`, ...; with several modules the
        module's name is part of it.
    file: where to print; None is stdout.

    >>> with tensortap.peek(model, "down_blk2.b.4", times=1):
    ...     model(batch).sum().backward()
    """
    from tensortap.model.peek_handle import Peek  # loads the observer and the terminal: not before it is needed

    return Peek(model, modules, kinds, times, rank, save, file)
