"""Compare two trees of saved tensors: cosine similarity, mean, standard deviation and variance of each common file.

    python -m tensortap.compat.hook_result_checker --pathA tmp_tensors --pathB tmp_tensors_0

The results are in {A}/tensors/compare_rst and {A}/grads/compare_rst, one table per rank. The verdict and the exit code
are those of `tensortap compare A B`.
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

import tensortap
from tensortap.compat import hook_results
from tensortap.compat.hook_results import COLUMNS, RankResult
from tensortap.core.records import EXIT_CODES, Comparison, display_name
from tensortap.errors import RunNotFound, TensortapError, UsageError
from tensortap.report.files import plot_picture
from tensortap.report.terminal import comparison as comparison_page
from tensortap.report.terminal import plot
from tensortap.report.terminal.console import console
from tensortap.report.wording import clean
from tensortap.store.formats.npy.names import GRADS, TENSORS, NpyName, parse, rank_folders

__all__ = ["check", "find_column", "main", "run"]

RESULTS = "compare_rst"
UNREADABLE = 2
_REPORTED_NOTES = (
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
_NOTE_TEXT = {
    "shape": "of different shapes, not compared",
    "dtype": "of different dtypes",
    "complex": "real on one side and complex on the other, left out of the table",
    "paired by name": "paired by name although their running numbers differ",
}

ProgressBars = Callable[[str, int | None], Callable[[], None]]
"""Opens a progress bar with a label and a number of parts, None if unknown. Call the result after each part."""


def check(path_a: Path, path_b: Path, bars: ProgressBars) -> list[RankResult]:
    """Compare the common files of both trees and write the tables; return a result for each common rank."""
    for path in (path_a, path_b):
        if not path.is_dir():
            raise RunNotFound(f"{path} is not a folder: nothing was saved there, or the path is misspelt.")
    results = []
    for kind in (TENSORS, GRADS):
        ranks_a, ranks_b = rank_folders(path_a / kind), rank_folders(path_b / kind)
        for rank in sorted(ranks_a.keys() & ranks_b.keys()):
            pairs, notes = hook_results.pair_rank(ranks_a[rank], ranks_b[rank])
            result = RankResult(kind, rank, notes=notes)
            done = bars(f"{kind} rank_{rank}", len(pairs))
            results.append(hook_results.compare_rank(result, ranks_a[rank], ranks_b[rank], pairs, done))
    if any(_has_common_files(result) for result in results):  # a wrong path must not replace earlier results
        for result in results:
            hook_results.write(path_a / result.kind / RESULTS, result)
    return results


def run(
    path_a: Path, path_b: Path, column: str | None = None, plot_out: Path | None = None, plot_over: str = "layers"
) -> int:
    """Run the whole command, print its results and return the exit code.

    The code is 0 if the trees match, 1 if they diverge, 2 if a file is unreadable, 3 if too little is comparable.
    """
    chosen = None if column is None else find_column(column)
    if plot_over not in plot_picture.OVER:
        raise UsageError(f"--plot-over {plot_over!r} is unknown; there are {', '.join(plot_picture.OVER)}")
    if plot_out is not None:
        if chosen is None:
            raise UsageError("--plot-out needs --plot COLUMN, which names the column to draw")
        plot_picture.check(plot_out)
    comparison: Comparison | None = None
    failed = ""
    with _progress() as bars:
        results = check(path_a, path_b, bars)
        compared = any(result.rows for result in results)
        if compared:
            try:
                comparison = _compare(path_a, path_b, bars)
            except TensortapError as error:  # the tables are already written
                failed = str(error)
    screen = console()
    for line in _summary(path_a, path_b, results):
        screen.print(line)
    if chosen is not None and compared:
        _plot(results, chosen, plot_out, plot_over, screen)
    unreadable = sum(result.count("unreadable") for result in results)
    if unreadable:
        _print_error(f"{unreadable} could not be read: rank_N_notes.csv next to the results says which file, and why.")
    if comparison is None:
        _print_error(failed or _explain_nothing_compared(path_a, path_b, results))
        return UNREADABLE if unreadable or failed else EXIT_CODES["incomparable"]
    for text in comparison_page.headline(comparison.verdict, comparison.sentence, None):
        screen.print(text)
    return UNREADABLE if unreadable else EXIT_CODES[comparison.verdict]


def find_column(text: str) -> str:
    """Return a column by its name or a unique prefix of it; raise UsageError if there is none.

    >>> find_column("cosine")
    'cosine similarity'
    """
    columns = COLUMNS[1:]
    wanted = text.strip().casefold()
    found = [c for c in columns if c.casefold() == wanted] or [c for c in columns if c.casefold().startswith(wanted)]
    if len(found) != 1 or not wanted:
        raise UsageError(f"--plot {text!r} is not a column; there are {', '.join(columns)}")
    return found[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tensortap.compat.hook_result_checker",
        description="Compare two trees of tensors that register_saving_hook saved.",
        epilog="Exit code: 0 if the trees match, 1 if they diverge, 2 if a file cannot be read, 3 if little is common. "
        "Example: python -m tensortap.compat.hook_result_checker --pathA tmp_tensors --pathB tmp_tensors_0",
    )
    parser.add_argument("--pathA", required=True, type=Path, help="the reference; the results are written below it")
    parser.add_argument("--pathB", required=True, type=Path, help="the candidate")
    parser.add_argument("--plot", metavar="COLUMN", help="plot a column of the results on the terminal")
    parser.add_argument("--plot-out", metavar="FILE.png", type=Path, help="also write the plot as a picture")
    parser.add_argument("--plot-over", choices=plot_picture.OVER, default="layers", help="the horizontal axis")
    given = parser.parse_args(argv)
    try:
        return run(given.pathA, given.pathB, given.plot, given.plot_out, given.plot_over)
    except TensortapError as error:
        _print_error(str(error))
        return UNREADABLE


def _print_error(text: str) -> None:
    print(f"tensortap: {text}", file=sys.stderr)


def _compare(path_a: Path, path_b: Path, bars: ProgressBars) -> Comparison:
    """Compare the trees as `tensortap compare` does."""
    done = bars("verdict", None)
    compare: Callable[..., Comparison] = tensortap.compare
    comparison = compare(path_a, path_b)
    done()
    return comparison


def _plot(results: Sequence[RankResult], column: str, picture: Path | None, over: str, screen: Console) -> None:
    series = [_series(result, column) for result in results if result.rows]
    draw = plot.terminal if over == "layers" else plot.terminal_of_layers
    for each in series:
        screen.print("\n" + "\n".join(map(clean, draw(each, column, screen.width))))
    if picture is not None:
        plot_picture.write(picture, series, column, over)
        screen.print(f"\n{picture}")
    screen.print()


def _series(result: RankResult, column: str) -> plot.Series:
    at = COLUMNS.index(column)
    files = [str(row[0]) for row in result.rows]
    names = [parse(file) for file in files]
    return plot.Series(
        label=f"{result.kind} rank_{result.rank}",
        names=files,
        values=[float(row[at]) for row in result.rows],
        layers=[file if name is None else _layer(name) for file, name in zip(files, names, strict=True)],
        steps=[0 if name is None else name.micro for name in names],
        panel=result.kind,
        member=f"rank {result.rank}",
    )


def _layer(name: NpyName) -> str:
    return display_name(name.name) if name.path == "0" else f"{display_name(name.name)} {name.path}"


def _summary(path_a: Path, path_b: Path, results: Sequence[RankResult]) -> Iterator[str]:
    for result in results:
        facts = [f"{len(result.rows)} compared"]
        known = [row for row in result.rows if not math.isnan(row[1])]
        if known:
            worst = min(known, key=lambda row: float(row[1]))
            facts.append(f"lowest cosine {worst[1]:.9g} at {worst[0]}")
        facts += [f"{count} {_NOTE_TEXT.get(note, note)}" for note in _REPORTED_NOTES if (count := result.count(note))]
        yield f"{result.kind} rank_{result.rank}: {'; '.join(facts)}"
    for kind in (TENSORS, GRADS):
        ranks_a, ranks_b = (set(rank_folders(path / kind)) for path in (path_a, path_b))
        for side, only in (("A", ranks_a - ranks_b), ("B", ranks_b - ranks_a)):
            if only:
                yield f"{kind}: only in {side}: {', '.join(f'rank_{rank}' for rank in sorted(only))}"
    folders = dict.fromkeys(str(path_a / result.kind / RESULTS) for result in results)
    if any(_has_common_files(result) for result in results):
        yield f"written to {' and '.join(folders)}"


def _has_common_files(result: RankResult) -> bool:
    """Return whether both sides have a common file, even if its shapes differ."""
    return bool(result.rows or any(result.count(note) for note in ("shape", "complex", "unreadable")))


def _explain_nothing_compared(path_a: Path, path_b: Path, results: Sequence[RankResult]) -> str:
    if any(_has_common_files(result) for result in results):
        return (
            f"none of the common files of {path_a} and {path_b} could be compared: see the notes next to the results."
        )
    return (
        f"{path_a} and {path_b} have no file in common: nothing to compare. "
        "Both need tensors/rank_N or grads/rank_N with files of the same names."
    )


@contextmanager
def _progress() -> Iterator[ProgressBars]:
    columns = (TextColumn("{task.description}"), BarColumn(32), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True)) as progress:

        def bar(label: str, parts: int | None) -> Callable[[], None]:
            task = progress.add_task(label, total=parts)

            def done() -> None:
                progress.advance(task)
                if parts is None:
                    progress.update(task, total=1)

            return done

        yield bar


if __name__ == "__main__":
    sys.exit(main())
