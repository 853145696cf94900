"""The command line: argv in, exit code out. One file for each verb; each gathers plain data and passes it to a report.

Exit codes: 0 success, 1 the runs diverge, 2 wrong usage or an input that cannot be read, 3 too little in common to
judge, 130 interrupted, 141 the reader of the output has closed it.

Nothing heavy is imported before a verb needs it, so that `tensortap --help` is quick.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from tensortap.cli import (
    bench,
    check_hooks,
    compare,
    demo,
    export,
    health,
    replay,
    report,
    run,
    show,
    times,
    upload,
    view,
    watch,
    zoom,
)
from tensortap.errors import TensortapError

__all__ = ["app", "main"]

_LONGEST_ERROR = 2000
"""Characters of an error that are printed. Names in a damaged file can be of any length."""
_INTERRUPTED = 130


class _Verbs(TyperGroup):
    """The group of all verbs. It turns every error into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # detect a closed pipe here, not in the interpreter at exit
        except TensortapError as error:
            typer.echo(f"tensortap: {_one_line(error)}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            _say_interrupted()
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        return result


class _App(typer.Typer):
    """The command line, whose commands are made once: making them takes a tenth of a second."""

    _command: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._command is None:
            self._command = typer.main.get_command(self)
        return self._command(*args, **kwargs)


app = _App(
    cls=_Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command()(show.show)
app.command()(export.export)
app.command()(compare.compare)
app.command()(report.report)
app.command()(view.view)
app.command()(health.health)
app.command()(replay.replay)
app.command()(demo.demo)
app.command()(check_hooks.check_hooks)
app.command()(times.times)
app.command()(bench.bench)
app.command()(watch.watch)
app.command()(upload.upload)
app.command()(zoom.zoom)


def _version(wanted: bool) -> None:
    if wanted:
        from tensortap import __version__

        typer.echo(f"tensortap {__version__}")
        raise typer.Exit


@app.callback()
def _tensortap(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Tap the tensors that flow through a training run; find the first place where two runs diverge.

    \b
    New here?  tensortap demo
    """


def main() -> None:
    """Run the `tensortap` command."""
    try:
        # `run` becomes another program and reads no run itself.
        if not {"run", "-h", "--help", "--version"} & set(sys.argv) and "_TENSORTAP_COMPLETE" not in os.environ:
            _hide_pandas()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a terminal without × or … must not end the report
        app(prog_name="tensortap")
    except KeyboardInterrupt:  # before or after a verb
        _say_interrupted()
        sys.exit(_INTERRUPTED)


def _say_interrupted() -> None:
    typer.echo("tensortap: interrupted", err=True)


def _hide_pandas() -> None:
    """Keep pyarrow from importing pandas, which takes half a second, to recognise objects that no command uses.

    pyarrow looks for pandas once in a process, at its first conversion.
    """
    if "pandas" in sys.modules:
        return
    absent = _NoPandas()
    sys.meta_path.insert(0, absent)
    try:
        import pyarrow

        pyarrow.array(range(1))
    finally:
        sys.meta_path.remove(absent)


class _NoPandas:
    """An import finder that denies pandas."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("no command needs pandas", name=name)


def _one_line(error: BaseException) -> str:
    from tensortap.report.wording import clean

    text = str(error)
    if len(text) > _LONGEST_ERROR:
        half = _LONGEST_ERROR // 2
        text = f"{text[:half]} … {text[-half:]}"
    return clean(" ".join(text.split())) or type(error).__name__
