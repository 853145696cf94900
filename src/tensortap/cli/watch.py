"""`tensortap watch`: follow a run while it is written."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tensortap.report.terminal.watch import WatchPage
    from tensortap.store.following import FollowedRun

__all__ = ["watch"]


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder or URL of a run.", show_default=False)],
    every: Annotated[float, typer.Option(metavar="SECONDS", help="How often to look.", min=0.1)] = 1.0,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a run that does not exist yet.")] = False,
) -> None:
    """Follow a run while it is written.

    Shows steps a second, the cost so far, the loss, gradient norms, and records with NaN or Inf.

    Ends with the run: 0 if all ranks finished, 1 if one failed or was killed. A finished run is printed once.
    On a terminal the screen is updated; elsewhere each update prints a line for each rank.

    \b
    Example:
      tensortap watch runs/a
      tensortap watch runs/a --wait --every 5 > log.txt
      tensortap watch s3://bucket/runs/a --every 30
    """
    from tensortap.cli import screen
    from tensortap.report.terminal import watch as watch_page

    followed = _opened(run, every, wait)
    followed.look()
    if sys.stdout.isatty() and screen.console().is_terminal:
        _follow_on_screen(followed, every)
    else:
        _follow_in_lines(followed, every)
    ok = all(rank.status == "finished" for rank in followed.ranks.values())
    if not sys.stdout.isatty():
        screen.print_lines(watch_page.render(_page(followed), screen.width()))
    raise typer.Exit(0 if ok else 1)


def _opened(path: str, every: float, wait: bool) -> FollowedRun:
    from tensortap.core.urls import as_place
    from tensortap.store.following import FollowedRun
    from tensortap.store.format import RUN_JSON
    from tensortap.store.source import files_below

    place = as_place(path)
    if wait and RUN_JSON not in files_below(place).names():
        typer.echo(f"tensortap: waiting for {place}", err=True)
        while RUN_JSON not in files_below(place).names():
            time.sleep(min(every, 0.5))
    return FollowedRun(place)


def _follow_on_screen(followed: FollowedRun, every: float) -> None:
    from rich.console import Group
    from rich.live import Live

    from tensortap.cli import screen
    from tensortap.report.terminal import watch as watch_page

    def drawn() -> Group:
        return Group(*watch_page.render(_page(followed), screen.width()))

    with Live(drawn(), console=screen.console(), auto_refresh=False) as live:
        while not followed.ended:
            time.sleep(every)
            followed.look()
            live.update(drawn(), refresh=True)


def _follow_in_lines(followed: FollowedRun, every: float) -> None:
    from tensortap.report.terminal import watch as watch_page

    said: dict[int, str] = {}
    while not followed.ended:
        for rank in _page(followed).ranks:
            if said.get(rank.rank) != (line := watch_page.render_line(rank)):
                said[rank.rank] = line
                typer.echo(line)
        sys.stdout.flush()
        time.sleep(every)
        followed.look()


def _page(followed: FollowedRun) -> WatchPage:
    from tensortap.core.records import display_name
    from tensortap.report.terminal.watch import WatchedRank, WatchedStep, WatchPage

    ranks = []
    for rank in sorted(followed.ranks.values(), key=lambda each: each.number):
        progress, first = rank.progress, rank.first_nonfinite
        seconds = progress.get("seconds", 0)
        where = "" if first is None else f"{first.kind} {first.path} of {display_name(first.module)}, step {first.step}"
        steps = [WatchedStep(s.step, s.records, s.loss, s.gradient_norm, s.nonfinite) for s in rank.steps]
        ranks.append(
            WatchedRank(
                rank=rank.number,
                status=rank.status,
                reason=rank.reason,
                step=progress.get("step"),
                recorded=progress.get("recorded"),
                rate=rank.rate,
                cost=progress["cost"] / seconds if seconds else None,
                records=rank.records,
                nonfinite=rank.nonfinite,
                first_nonfinite=where,
                steps=steps,
            )
        )
    info = followed.info
    about = [str(info[name]) for name in ("model", "framework", "started") if info.get(name)]
    return WatchPage(str(followed.path), ", ".join(about), ranks)
