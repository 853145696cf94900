"""Measure what a tap costs on this machine and what limits it: a training step, plain and tapped, in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensortap.bench.options import BenchOptions
from tensortap.errors import MissingDependency

__all__ = ["BenchOptions", "measure"]


def measure(
    options: BenchOptions, on_progress: Callable[[str, float], None] = lambda doing, share: None
) -> dict[str, Any]:
    """Return all figures as plain data, described in `bench/measuring.py`. Needs torch.

    on_progress: called with a description of the next part and the share that is done.

    >>> measure(BenchOptions(device="cpu", model="llama-small"))["ways"]["summary"]["ratio"]      # doctest: +SKIP
    1.07
    """
    try:
        from tensortap.bench.measuring import measured
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency(
            'the benchmark trains a model with torch, which is not installed: pip install "tensortap[torch]"'
        ) from error
    return measured(options, on_progress)
