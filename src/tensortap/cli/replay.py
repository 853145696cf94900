"""`tensortap replay`: run one module alone on its recorded inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tensortap.cli.outputs import Csv, ExitZero, Html, Json, Junit, Markdown, Parquet, Quiet, Verbose
from tensortap.cli.pairing import Atol, Rtol, parse_tolerance

__all__ = ["parse_argument", "replay"]


def replay(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run that kept the module's inputs.", show_default=False)
    ],
    module: Annotated[str, typer.Option(metavar="NAME", help='The module; "(root)" is the model.', show_default=False)],
    model: Annotated[
        str, typer.Option(metavar="FILE.py:FUNC", help="A function that builds the model.", show_default=False)
    ],
    with_: Annotated[
        str | None,
        typer.Option("--with", metavar="FILE.py:FUNC", help="Replaces the module's forward(self, ...)."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help="float64, float32, float16 or bfloat16.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="A device of the framework: cpu, cuda, ...")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="The step.  [default: the first that was kept]")] = None,
    micro: Annotated[int | None, typer.Option(metavar="N", help="The micro step.")] = None,
    call: Annotated[int | None, typer.Option(metavar="N", help="The call within the micro step.")] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="The rank.")] = None,
    eval_: Annotated[bool, typer.Option("--eval", help="Put the module into evaluation mode.")] = False,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Replaces a recorded plain argument."),
    ] = None,
    repro: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a script that reproduces this without tensortap.")
    ] = None,
    rtol: Rtol = None,
    atol: Atol = None,
    csv: Csv = None,
    html: Html = None,
    json: Json = None,
    junit: Junit = None,
    markdown: Markdown = None,
    parquet: Parquet = None,
    verbose: Verbose = 0,
    exit_zero: ExitZero = False,
    quiet: Quiet = False,
) -> None:
    """Run one module alone on its recorded inputs, and compare.

    Compares the outputs with the recorded ones. The module may run in another dtype, on another device or with another
    implementation. Backward runs as well if the run has the gradients of the outputs. Exit codes and reports are those
    of compare.

    \b
    Example:
      tensortap replay runs/a --module layers.0.mlp --model train.py:build_model
      tensortap replay runs/a --module layers.0.norm --model train.py:build_model --dtype float64
      tensortap replay runs/a --module layers.0.norm --model train.py:build_model --with fused.py:norm --repro bug/
    """
    import tensortap
    from tensortap.cli import screen
    from tensortap.cli.compare import conclude, details_for, parse_outputs

    outputs = parse_outputs(
        {"csv": csv, "html": html, "json": json, "junit": junit, "markdown": markdown, "parquet": parquet}
    )
    with screen.waiting(f"replaying {module}"):
        result = tensortap.replay(
            run,
            module,
            model,
            implementation=with_,
            step=step,
            micro=micro,
            call=call,
            rank=rank,
            dtype=dtype,
            device=device,
            evaluate=eval_,
            arguments=dict(map(parse_argument, arg or ())),
            rtol=parse_tolerance("--rtol", rtol),
            atol=parse_tolerance("--atol", atol),
            repro=repro,
            details=details_for(outputs),
        )
    if repro is not None and not quiet:
        typer.echo(f"{repro}: run it with `python {repro / 'repro.py'}`", err=True)
    conclude(result, outputs, verbose=verbose, quiet=quiet, exit_zero=exit_zero)


def parse_argument(text: str) -> tuple[str, Any]:
    """Split NAME=VALUE. The value is JSON or a Python literal if it parses as one, else text."""
    import ast
    import json
    from contextlib import suppress

    from tensortap.errors import UsageError

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--arg {text}: use NAME=VALUE, as in causal=true or scale=0.5")
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return name, read(value)
    return name, value
