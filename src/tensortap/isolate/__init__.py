"""Every module judged on the reference's own inputs: the check around a user's own step, and the noise to allow."""

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
    noise: str | os.PathLike[str] | Run | Sequence[str | os.PathLike[str] | Run] = (),
    rename: Sequence[str] = (),
    modules: str | Sequence[str] | Callable[[str, Any], bool] | None = None,
    steps: Collection[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    optimizer: Any = None,
    compiled: str = "boundary",
    on_error: str = "raise",
) -> Check:
    from tensortap.isolate.check import Check, Options  # loads the reader: not before it is needed

    given = tuple(noise) if isinstance(noise, Sequence) and not isinstance(noise, str) else (noise,)
    options = Options(isolate, given, tuple(rename), modules, steps, rtol, atol, compiled, on_error)
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
    from tensortap.isolate.noise import measure_noise

    measure_noise(model, work, Path(path), seeds, overwrite, progress)
    return Path(path)
