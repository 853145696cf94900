"""The third phase: align two runs, measure the difference of each pair, judge it, and name the first divergence.

options.py    all options; comparing.py runs a comparison from end to end
matching.py   aligns two runs and measures their pairs, into a `Matched` (matched.py); without_hidden.py measures again
              without positions that a mask hides, and pair_numbers.py has what judging needs. They work over
align/        which records are pairs
translate/    pairs under different names and tensor layouts
measure/      the difference of each pair
judge/        status, tolerance and cause; judge/rules has all tolerances
say/          verdict, sentence and table
details/      single pairs and records, element by element
"""

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
    mapping: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    steps: Collection[int] | Mapping[int, int] | None = None,
    ranks: Collection[int] | Mapping[int, int] | None = None,
    modules: str | Collection[str] | None = None,
    kinds: str | Collection[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    noise: str | os.PathLike[str] | Run | Sequence[str | os.PathLike[str] | Run] | None = None,
    truth: str | os.PathLike[str] | Run | None = None,
    zoom: tuple[Any, Any] | None = None,
    until_first: bool = False,
    workers: int | None = None,
    engine: str | None = None,
    address: str | None = None,
    device: str = "cpu",
    details: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two runs, and name the first record at which the candidate diverges from the reference.

    reference, candidate: paths of runs, or open runs, also in memory (`tensortap.capture` without a path).
    rename: 'PATTERN=REPLACEMENT' regular expressions that turn the candidate's module names into the reference's.
    mapping: rules for names and tensor layouts, as a TOML file or a mapping of the same form. Between a run of torch
        and a run of paddle, the rules that ship with tensortap apply as well.
    steps, ranks: the ones to compare; a mapping pairs the reference's number with another of the candidate. Runs in
        which a rank has no counterpart do not match: select the ranks that both have to judge only these.
    modules, kinds: name patterns and kinds to compare.
    rtol, atol: a tolerance for all records alike, instead of the one from dtypes and incoming error.
    noise: a further run of the reference, a file that `tensortap.noise` wrote, or a sequence of these. Differences as
        large as this noise are allowed.
    truth: a run of the reference's model in float32 or float64, on the same batch. The verdict then says which side is
        further from it, and names modules that round more than the reference's; see docs/truth.md.
    zoom: the reference's and the candidate's model, each a model or "file.py:function" that builds one. If the runs
        diverge in a module whose inputs the reference kept, both modules run on them, operator by operator. The
        sentence then ends with the line where they part, and `Comparison.zoom` has the operators; see docs/zoom.md.
    until_first: stop measuring at the first birth.
    workers: number of processes that measure; None chooses.
    engine: where whole tensors are measured: "serial" (this process), "processes", "ray" or "dask"; None chooses. The
        numbers are the same bit for bit. Workers read the files themselves; see docs/cluster.md.
    address: the cluster of engine="ray" ("auto" finds the one on this machine) or of engine="dask". Without it, the
        cluster that this process is connected to, or a small one that is started here.
    device: "cuda" (or "cuda:1") measures large tensors of runs and safetensors files on the GPU, through torch. The
        numbers are the same but for the order of summation. Tensors in memory are measured on the CPU.
    details: number of tensors to inspect element by element, for `Comparison.details`: births, the worst, and a sample.
    progress: called with bytes done and bytes in all.

    `tensortap.compare.options.ComparisonOptions` holds these options; docs/compare-options.md lists them.

    >>> result = tensortap.compare("runs/a", "runs/b")
    >>> print(result)
    The runs match: all 1,204 pairs are equal bit for bit.
    """
    from tensortap.compare.comparing import run_comparison  # loads pyarrow: not before it is needed
    from tensortap.compare.options import ComparisonOptions
    from tensortap.compare.sources import noise_sources

    return run_comparison(
        reference,
        candidate,
        ComparisonOptions(
            rename=rename,
            mapping=mapping,
            steps=steps,
            ranks=ranks,
            modules=modules,
            kinds=kinds,
            rtol=rtol,
            atol=atol,
            noise=noise_sources(noise),
            truth=truth,
            zoom=zoom,
            until_first=until_first,
            workers=workers,
            engine=engine,
            address=address,
            device=device,
            details=details,
            progress=progress,
        ),
    )
