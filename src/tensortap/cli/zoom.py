"""`tensortap zoom`: name the line of a module where two implementations part."""

from __future__ import annotations

from typing import Annotated

import typer

from tensortap.cli.outputs import ExitZero, Json, Quiet

__all__ = ["zoom"]


def zoom(
    reference: Annotated[
        str, typer.Argument(metavar="REFERENCE", help="The run that kept the module's inputs.", show_default=False)
    ],
    candidate: Annotated[
        str | None,
        typer.Argument(metavar="[CANDIDATE]", help="The run with the candidate's parameters.", show_default=False),
    ] = None,
    *,
    module: Annotated[str, typer.Option(metavar="NAME", help='The module; "(root)" is the model.', show_default=False)],
    model: Annotated[
        str, typer.Option(metavar="FILE.py:FUNC", help="Builds the reference's model.", show_default=False)
    ],
    candidate_model: Annotated[
        str, typer.Option(metavar="FILE.py:FUNC", help="Builds the candidate's model.", show_default=False)
    ],
    candidate_module: Annotated[
        str | None, typer.Option(metavar="NAME", help="The module's name in the candidate, if it differs.")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="The step.  [default: the first that was kept]")] = None,
    micro: Annotated[int | None, typer.Option(metavar="N", help="The micro step.")] = None,
    call: Annotated[int | None, typer.Option(metavar="N", help="The call within the micro step.")] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="The rank.")] = None,
    arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Replaces a recorded plain argument.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", help="Repeat in float64, to distinguish mistakes from rounding.")
    ] = True,
    every: Annotated[bool, typer.Option("--all", help="Print every operator.")] = False,
    json: Json = None,
    exit_zero: ExitZero = False,
    quiet: Quiet = False,
) -> None:
    """Name the line of code where one module of two models differs.

    Both modules run on the inputs that REFERENCE recorded, forward and backward. Operators are aligned by the values
    that they compute, so an added or a fused operator is not a difference in itself. Exit codes: 0 both compute the
    same, 1 they differ, 4 the candidate rounds more.

    \b
    Example:
      tensortap zoom runs/a runs/b --module layers.2.attn --model train.py:build --candidate-model port.py:build
    """
    import json as json_format

    from tensortap.cli import screen
    from tensortap.cli.replay import parse_argument
    from tensortap.core.records import EXIT_CODES
    from tensortap.replay.recorded_call import CallSelector
    from tensortap.report.files import output
    from tensortap.report.terminal.zoom import zoom_page
    from tensortap.zoom.runs import ZoomOptions, zoom_runs

    options = ZoomOptions(
        reference=reference,
        candidate=candidate,
        selector=CallSelector("" if module == "(root)" else module, step, micro, call, rank),
        reference_model=model,
        candidate_model=candidate_model,
        candidate_module=None if candidate_module is None else candidate_module.replace("(root)", ""),
        arguments=dict(map(parse_argument, arg or ())),
        exact=exact,
    )
    with screen.waiting(f"zooming into {module}"):
        result = zoom_runs(options)
    facts = result.as_dict()
    if json is not None:
        with output.opened(json) as file:
            file.write(f"{json_format.dumps(facts, indent=1)}\n".encode())
    if not quiet and json != "-":
        screen.print_lines(zoom_page(facts, screen.width(), every))
    raise typer.Exit(0 if exit_zero else EXIT_CODES[result.verdict])
