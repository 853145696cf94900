"""`tensortap view`: serve the page of `report` for runs that are too large for one file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensortap.cli.pairing import (
    Address,
    Atol,
    Device,
    Engine,
    Kinds,
    MapFile,
    MaybeCandidate,
    Modules,
    Noise,
    OnlyOrReference,
    Ranks,
    Rename,
    Rtol,
    Steps,
    Truth,
    Workers,
    options_for_one_run,
    parse_options,
)

if TYPE_CHECKING:
    from tensortap.view.answers import Answers

__all__ = ["view"]


def view(
    reference: OnlyOrReference,
    candidate: MaybeCandidate = None,
    rename: Rename = None,
    map_file: MapFile = None,
    step: Steps = "",
    rank: Ranks = None,
    module: Modules = None,
    kind: Kinds = None,
    rtol: Rtol = None,
    atol: Atol = None,
    noise: Noise = None,
    truth: Truth = None,
    workers: Workers = None,
    engine: Engine = None,
    address: Address = None,
    device: Device = "cpu",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address without opening it.")] = False,
) -> None:
    """Show two runs, or one, in the browser.

    Serves the page of `report`, with the elements of every tensor, until Ctrl-C. The server accepts connections from
    this machine only, and the address contains a secret. Over ssh, forward the printed port.

    \b
    Example:
      tensortap view runs/a runs/b
      tensortap view runs/a --no-browser
    """
    import webbrowser

    from tensortap.view.server import PageServer

    chosen = parse_options(
        rename, map_file, step, rank, module, kind, rtol, atol, noise, truth, workers, engine, address, device
    )
    with ExitStack() as opened:
        if candidate is None:
            answers = _about_one(reference, chosen, opened)
        else:
            answers = _about_two(reference, candidate, chosen, opened)
        server = opened.enter_context(PageServer(answers.answer))
        typer.echo(f"{server.url}\nPress Ctrl-C to stop.")
        if not no_browser:
            webbrowser.open(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _about_two(reference: str, candidate: str, chosen: Mapping[str, Any], opened: ExitStack) -> Answers:
    from tensortap.cli import screen
    from tensortap.compare.comparing import open_comparison
    from tensortap.compare.options import ComparisonOptions
    from tensortap.report.wording import clean
    from tensortap.view.answers import about_two

    with screen.comparing(True) as progress:
        options = ComparisonOptions(**chosen, progress=progress)
        comparison, inspector = open_comparison(reference, candidate, options, opened)
    typer.echo(clean(comparison.sentence))
    with screen.waiting("making the page"):
        return about_two(comparison, inspector)


def _about_one(path: str, chosen: Mapping[str, Any], opened: ExitStack) -> Answers:
    import tensortap
    from tensortap.cli import gather, screen
    from tensortap.compare.align.side import Scope
    from tensortap.health.diagnosis import open_health_report
    from tensortap.report.wording import clean
    from tensortap.view.answers import about_one

    with screen.waiting(f"reading {path}"):
        run = opened.enter_context(tensortap.open(path))
        health, inspector = open_health_report(run, Scope(**options_for_one_run(chosen)), opened)
        answers = about_one(gather.facts_of(run), health, inspector)
    typer.echo(clean(health.sentence))
    return answers
