"""The third phase: align two runs, measure how far each pair is apart, judge, and name the first place they part."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensortap.core.records import Comparison

if TYPE_CHECKING:
    from tensortap.store import Run

__all__ = ["compare"]


def compare(
    reference: str | os.PathLike[str] | Run,
    candidate: str | os.PathLike[str] | Run,
    *,
    rename: Sequence[str] = (),
    map_file: str | os.PathLike[str] | None = None,
    mapping: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    steps: Collection[int] | Mapping[int, int] | None = None,
    ranks: Collection[int] | Mapping[int, int] | None = None,
    modules: str | Collection[str] | None = None,
    kinds: str | Collection[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    noise: str | os.PathLike[str] | Run | Sequence[str | os.PathLike[str] | Run] | None = None,
    until_first: bool = False,
    workers: int | None = None,
    device: str = "cpu",
    details: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two runs, and name the first place where the candidate parts from the reference.

    reference, candidate: paths of runs, or runs that are open already, also in memory (`tensortap.capture` without a
        path).
    rename: 'PATTERN=REPLACEMENT' regular expressions that turn the candidate's module names into the reference's.
    map_file: a file with a line 'candidate name = reference name' for each module that is called differently.
    mapping: rules for names and layouts, as a TOML file or a mapping of the same form; where one run is of torch and
        the other of paddle, what is known of the two is added.
    steps, ranks: the ones to compare; a mapping pairs the reference's number with another of the candidate. Runs in
        which a rank has no counterpart do not match: select the ranks that both have to judge only these.
    modules, kinds: name patterns and kinds to compare.
    rtol, atol: a tolerance for all records alike, instead of the one from dtypes and incoming error.
    noise: a further run of the reference, a file that `tensortap.noise` wrote, or a sequence of these. What differs
        there is no difference.
    until_first: stop measuring at the first birth.
    workers: processes that measure; None chooses.
    device: "cuda" (or "cuda:1") measures large tensors of runs and safetensors files on the GPU, through torch. The
        numbers are the same but for the order of summation. Tensors in memory are measured on the CPU.
    details: how many tensors to look at closely, for `Comparison.details`: births, the worst, and a sample.
    progress: called with bytes done and bytes in all.

    >>> result = tensortap.compare("runs/a", "runs/b")
    >>> print(result)
    The runs match: all 1,204 pairs are equal bit for bit.
    """
    from tensortap.compare.comparing import run_comparison  # loads pyarrow and numba: not before it is needed
    from tensortap.compare.request import Request, noise_sources

    return run_comparison(
        Request(
            reference=reference,
            candidate=candidate,
            rename=tuple(rename),
            map_file=map_file,
            mapping=mapping,
            steps=steps,
            ranks=ranks,
            modules=modules,
            kinds=kinds,
            rtol=rtol,
            atol=atol,
            noise=noise_sources(noise),
            until_first=until_first,
            workers=workers,
            device=device,
            details=details,
            progress=progress,
        )
    )
