"""A run that is being written, on one screen: a line for each rank, and the newest recorded steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from rich.text import Text

from tensortap.report.terminal import table
from tensortap.report.terminal.table import TableColumn
from tensortap.report.wording import clean, count, number, plural, wrap

__all__ = ["WatchPage", "WatchedRank", "WatchedStep", "render", "render_line"]

_STYLES = {"running": "green", "finished": "bold green", "failed": "bold red", "killed": "bold red"}


@dataclass(frozen=True)
class WatchedStep:
    """A recorded step of a rank."""

    step: int
    records: int
    loss: float | None
    gradient_norm: float | None
    nonfinite: int


@dataclass(frozen=True)
class WatchedRank:
    """One rank."""

    rank: int
    status: str
    reason: str
    step: int | None
    recorded: int | None
    rate: float
    cost: float | None
    """Share of the time that the tap took."""
    records: int
    nonfinite: int
    first_nonfinite: str
    steps: Sequence[WatchedStep]


@dataclass(frozen=True)
class WatchPage:
    """The contents of the screen, before layout."""

    path: str
    about: str
    ranks: Sequence[WatchedRank]


def render(page: WatchPage, width: int | None) -> list[Text]:
    """Return the screen as lines of at most `width` cells."""
    title = Text(clean(page.path), "bold")
    title.append(f"  {clean(page.about)}", "dim")
    lines = [title, Text(), *table.lines(_ranks(page.ranks), width)]
    for rank in page.ranks:
        if rank.reason:
            text = f"rank {rank.rank} {rank.status}: {clean(rank.reason)}"
            lines += [Text(part, "red" if rank.status != "finished" else "") for part in wrap(text, width)]
        if rank.first_nonfinite:
            text = f"rank {rank.rank}: the first NaN or Inf is in {clean(rank.first_nonfinite)}"
            lines += [Text(part, "red") for part in wrap(text, width)]
    shown = next((rank for rank in page.ranks if rank.steps), None)
    if shown is not None:
        several = f" of rank {shown.rank}" if len(page.ranks) > 1 else ""
        lines += [Text(), Text(f"newest recorded steps{several}", "dim"), *table.lines(_steps(shown.steps), width)]
    return lines


def render_line(rank: WatchedRank) -> str:
    """Return one line about a rank, for output that is not a terminal."""
    newest = rank.steps[-1] if rank.steps else None
    parts = [f"rank {rank.rank} {rank.status}"]
    if rank.step is not None and rank.recorded is not None:
        parts += [f"step {rank.step}", f"{rank.recorded} recorded", f"{rank.rate:.3g} steps/s"]
    if rank.cost is not None:
        parts.append(f"cost {100 * rank.cost:.2g} %")
    if newest is not None and newest.loss is not None:
        parts.append(f"loss {number(newest.loss)}")
    if newest is not None and newest.gradient_norm is not None:
        parts.append(f"gradient norm {number(newest.gradient_norm)}")
    parts.append(f"{plural(rank.nonfinite, 'record')} with NaN or Inf")
    if rank.first_nonfinite:
        parts.append(f"first in {clean(rank.first_nonfinite)}")
    if rank.reason:
        parts.append(clean(rank.reason))
    return ", ".join(parts)


def _ranks(ranks: Sequence[WatchedRank]) -> list[TableColumn]:
    newest = [rank.steps[-1] if rank.steps else None for rank in ranks]
    alarming = ["red" if rank.nonfinite else "" for rank in ranks]
    return [
        TableColumn("rank", [str(rank.rank) for rank in ranks]),
        TableColumn(
            "status",
            [clean(rank.status) for rank in ranks],
            left=True,
            styles=[_STYLES.get(rank.status, "") for rank in ranks],
        ),
        TableColumn("step", ["-" if rank.step is None else count(rank.step) for rank in ranks]),
        TableColumn("recorded", ["-" if rank.recorded is None else count(rank.recorded) for rank in ranks]),
        TableColumn("steps/s", [f"{rank.rate:.3g}" if rank.rate else "-" for rank in ranks]),
        TableColumn("cost", ["-" if rank.cost is None else f"{100 * rank.cost:.2g} %" for rank in ranks]),
        TableColumn("loss", [_number(step.loss if step else None) for step in newest]),
        TableColumn("gradient norm", [_number(step.gradient_norm if step else None) for step in newest], optional=1),
        TableColumn("NaN or Inf", [count(rank.nonfinite) for rank in ranks], styles=alarming),
        TableColumn("records", [count(rank.records) for rank in ranks], optional=2),
    ]


def _steps(steps: Sequence[WatchedStep]) -> list[TableColumn]:
    return [
        TableColumn("step", [count(step.step) for step in steps]),
        TableColumn("loss", [_number(step.loss) for step in steps]),
        TableColumn("gradient norm", [_number(step.gradient_norm) for step in steps]),
        TableColumn("NaN or Inf", [count(step.nonfinite) for step in steps]),
        TableColumn("records", [count(step.records) for step in steps], optional=1),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "nan" if isnan(value) else number(value)
