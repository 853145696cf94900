"""Compare two trees of saved tensors: cosine similarity, mean, standard deviation and variance of every common file.

    python -m tensortap.compat.hook_result_checker --pathA tmp_tensors --pathB tmp_tensors_0

Results go to {A}/tensors/compare_rst and {A}/grads/compare_rst, a table for each rank. The numbers come without a
verdict; `tensortap compare A B` gives one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tensortap.compat import hook_results
from tensortap.compat.hook_results import COLUMNS, RankResult
from tensortap.errors import RunNotFound, TensortapError, UsageError
from tensortap.report import plot
from tensortap.store.formats.npy_names import GRADS, TENSORS, rank_folders

__all__ = ["check", "column_meant", "main", "run"]

RESULTS = "compare_rst"
UNREADABLE = 2
NOTHING_COMMON = 3
_TOLD = (
    "shape",
    "dtype",
    "complex",
    "not finite",
    "zero norm",
    "unreadable",
    "paired by name",
    "paired by order",
    "only in A",
    "only in B",
)
_WORDS = {
    "shape": "of different shapes, not compared",
    "dtype": "of different dtypes",
    "complex": "real on one side and complex on the other, not compared",
    "paired by name": "paired by name although their running numbers differ",
}

Bars = Callable[[str, int], Callable[[], None]]
"""Opens a bar of so many parts; call what it returns after each of them."""


def check(path_a: Path, path_b: Path, bars: Bars) -> list[RankResult]:
    """Compare what both trees have and write the tables; a result for each rank that both have."""
    for path in (path_a, path_b):
        if not path.is_dir():
            raise RunNotFound(f"{path} is no folder: nothing was saved there, or the path is misspelt.")
    results = []
    for kind in (TENSORS, GRADS):
        ranks_a, ranks_b = rank_folders(path_a / kind), rank_folders(path_b / kind)
        for rank in sorted(ranks_a.keys() & ranks_b.keys()):
            pairs, notes = hook_results.pairs_of(ranks_a[rank], ranks_b[rank])
            result = RankResult(kind, rank, notes=notes)
            done = bars(f"{kind} rank_{rank}", len(pairs))
            results.append(hook_results.compare_rank(result, ranks_a[rank], ranks_b[rank], pairs, done))
    if any(_judged(result) for result in results):  # two wrong paths must not replace the results of two right ones
        for result in results:
            hook_results.write(path_a / result.kind / RESULTS, result)
    return results


def run(path_a: Path, path_b: Path, column: str | None = None, plot_out: Path | None = None) -> int:
    """The whole command, screen and all. Returns the exit code: 0; 2 if a file could not be read; 3 if there was
    nothing to compare."""
    chosen = None if column is None else column_meant(column)
    if plot_out is not None:
        if chosen is None:
            raise UsageError("--plot-out needs --plot COLUMN: which of the columns shall it show?")
        plot.check(plot_out)
    with _progress() as bars:
        results = check(path_a, path_b, bars)
    screen = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    for line in _summary(path_a, path_b, results):
        screen.print(line)
    unreadable = sum(result.count("unreadable") for result in results)
    if not any(result.rows for result in results):
        print(f"tensortap: {_nothing(path_a, path_b, results)}", file=sys.stderr)
        return UNREADABLE if unreadable else NOTHING_COMMON
    if chosen is not None:
        series = [_series(result, chosen) for result in results if result.rows]
        for lines in (plot.terminal(each, chosen, screen.width) for each in series):
            screen.print("\n" + "\n".join(lines))
        if plot_out is not None:
            plot.png(plot_out, series, chosen)
            screen.print(f"\n{plot_out}")
    if unreadable:  # what was compared is right; but whoever asks for the exit code must not take it for all there is
        told = (
            f"{unreadable} could not be read: rank_N_notes.csv beside the results says which, of which side, and why."
        )
        print(f"tensortap: {told}", file=sys.stderr)
        return UNREADABLE
    return 0


def column_meant(text: str) -> str:
    """A column by its name, or by a beginning that no other has.

    >>> column_meant("cosine")
    'cosine similarity'
    """
    columns = COLUMNS[1:]
    wanted = text.strip().casefold()
    found = [c for c in columns if c.casefold() == wanted] or [c for c in columns if c.casefold().startswith(wanted)]
    if len(found) != 1 or not wanted:
        raise UsageError(f"--plot {text!r} is no column; there are {', '.join(columns)}")
    return found[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tensortap.compat.hook_result_checker",
        description="Compare two trees of tensors that register_saving_hook has saved.",
    )
    parser.add_argument("--pathA", required=True, type=Path, help="one tree; the results are written below it")
    parser.add_argument("--pathB", required=True, type=Path, help="the other tree")
    parser.add_argument("--plot", metavar="COLUMN", help="draw a column of the results on the terminal")
    parser.add_argument("--plot-out", metavar="FILE.png", type=Path, help="and as a picture")
    given = parser.parse_args(argv)
    try:
        return run(given.pathA, given.pathB, given.plot, given.plot_out)
    except TensortapError as error:
        print(f"tensortap: {error}", file=sys.stderr)
        return 2


def _series(result: RankResult, column: str) -> plot.Series:
    place = COLUMNS.index(column)
    label = f"{result.kind} rank_{result.rank}"
    return plot.Series(label, [str(row[0]) for row in result.rows], [float(row[place]) for row in result.rows])


def _summary(path_a: Path, path_b: Path, results: Sequence[RankResult]) -> Iterator[str]:
    for result in results:
        facts = [f"{len(result.rows)} compared"]
        known = [row for row in result.rows if not math.isnan(row[1])]
        if known:
            worst = min(known, key=lambda row: float(row[1]))
            facts.append(f"lowest cosine {worst[1]:.9g} at {worst[0]}")
        facts += [f"{count} {_WORDS.get(note, note)}" for note in _TOLD if (count := result.count(note))]
        yield f"{result.kind} rank_{result.rank}: {'; '.join(facts)}"
    for kind in (TENSORS, GRADS):
        ours, theirs = (set(rank_folders(path / kind)) for path in (path_a, path_b))
        for side, only in (("A", ours - theirs), ("B", theirs - ours)):
            if only:
                yield f"{kind}: only in {side}: {', '.join(f'rank_{rank}' for rank in sorted(only))}"
    folders = dict.fromkeys(str(path_a / result.kind / RESULTS) for result in results)
    if any(_judged(result) for result in results):
        yield f"written to {' and '.join(folders)}"


def _judged(result: RankResult) -> bool:
    """Whether both sides had any file in common, be it of two shapes."""
    return bool(result.rows or any(result.count(note) for note in ("shape", "complex", "unreadable")))


def _nothing(path_a: Path, path_b: Path, results: Sequence[RankResult]) -> str:
    if any(_judged(result) for result in results):
        return f"no file that {path_a} and {path_b} have in common could be compared: see the notes beside the results."
    return (
        f"{path_a} and {path_b} have no file in common: nothing to compare. "
        "Both need tensors/rank_N or grads/rank_N with files of the same names."
    )


@contextmanager
def _progress() -> Iterator[Bars]:
    columns = (TextColumn("{task.description}"), BarColumn(32), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def bar(label: str, parts: int) -> Callable[[], None]:
            task = progress.add_task(label, total=parts)
            return lambda: progress.advance(task)

        yield bar


if __name__ == "__main__":
    sys.exit(main())
