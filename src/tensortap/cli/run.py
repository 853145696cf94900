"""`tensortap run`: an unchanged program, recorded."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tensortap.core.urls import Place, Url, address_of, as_place, filesystem
from tensortap.launch.options import CAPTURE_OPTIONS, CaptureOption, variable

__all__ = ["run"]

_FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_BY_WEIGHT = (2, 1, 4, 3, 0)
"""Exit codes of comparisons; of several, the first of these is the result."""
Program = Annotated[str, typer.Argument(metavar="PROGRAM", help="A script, a command, or with -m a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")]
Out = Annotated[str | None, typer.Option("--out", metavar="RUN", help="Folder of the run. [env: TENSORTAP_OUT]")]
AsModule = Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as for python -m.")]
Reference = Annotated[str | None, typer.Option("--compare", metavar="RUN", help="Compare with this run at the end.")]


def run(
    program: Program,
    arguments: Arguments = None,
    out: Out = None,
    as_module: AsModule = False,
    compare: Reference = None,
    **options: Any,
) -> None:
    """Run a program unchanged, and record the model that it trains.

    The model and its optimizers are found by observing the program. Without --out, the run is runs/PROGRAM, or the next
    free runs/PROGRAM-2. Options may also come from environment variables, or from [capture] in ./tensortap.toml.

    Ends with the exit code of the program. With --compare, a program that succeeds ends with the verdict: 0 the runs
    match, 1 they diverge, 2 one cannot be read, 3 too little to judge, also if nothing was recorded.

    \b
    Example:
      tensortap run train.py --lr 3e-4
      tensortap run --out runs/a --steps '*/100' --keep tensors train.py
      tensortap run -m package.train --lr 3e-4
      tensortap run --out runs/b torchrun --nproc-per-node 2 train.py
      torchrun --nproc-per-node 2 -m tensortap run --out runs/b train.py
      tensortap run --compare runs/reference train.py
    """
    from tensortap.launch import command, settings

    chosen = settings.collect({"out": out, **options}, Path.cwd(), os.environ)
    commandline = command.program_command(program, arguments or [], as_module)
    path = _out_path(chosen, command.program_name(program, arguments or []))
    raw = {name: value for name, value in chosen.items() if name != "out"}
    _check(path, raw)
    if compare is None and os.name != "nt":
        launched = settings.LaunchSettings(address_of(path), raw, _frameworks(), main=os.getpid())
        sys.stdout.flush()
        os.execve(commandline[0], commandline, command.environment_for(launched, os.environ))
    launched = settings.LaunchSettings(address_of(path), raw, _frameworks())
    code = _run_and_wait(commandline, command.environment_for(launched, os.environ))
    if not _was_recorded(path):
        typer.echo("tensortap: nothing was recorded: no model was called, and none was trained", err=True)
    if compare is not None:
        _conclude(compare, path, code)
    raise typer.Exit(code)


def _add_options() -> None:
    """Give the verb an option for each entry of the table."""
    signature = inspect.signature(run, eval_str=True)
    plain = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(each))
        for each in CAPTURE_OPTIONS
    ]
    run.__signature__ = signature.replace(parameters=[*plain, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*plain, *added)}


def _annotation(option: CaptureOption) -> Any:
    flag = f"--{option.name.replace('_', '-')}"
    text = f"{option.help} [env: {variable(option.name)}]"
    if option.is_flag:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=text, show_default=False)]
    return Annotated[str | None, typer.Option(flag, metavar=option.metavar, help=text)]


_add_options()


# --- the launch ----------------------------------------------------------------------------------------------------
def _out_path(chosen: Mapping[str, Any], name: str) -> Place:
    """Return the path of the run. Ranks that start one by one cannot agree on a free name, so they need a given one."""
    from tensortap.errors import UsageError
    from tensortap.launch.settings import free_path

    if "out" in chosen:
        place = as_place(str(chosen["out"]))
        return place if isinstance(place, Url) else place.absolute()
    if {"RANK", "PADDLE_TRAINER_ID"} & set(os.environ):
        raise UsageError("several ranks write one run: say where with --out")
    return free_path(Path("runs").absolute() / name)


def _check(path: Place, raw: Mapping[str, Any]) -> None:
    """Raise UsageError for options that `capture` refuses, before the program starts."""
    from tensortap.capture.selection import Selection
    from tensortap.errors import RunExists
    from tensortap.launch.options import parse_all

    options = parse_all(raw)
    known = {"keep", "kinds", "modules", "classes", "steps", "ranks"}
    Selection(**{name: value for name, value in options.items() if name in known})
    if _is_used(path) and not options.get("overwrite") and "RANK" not in os.environ:
        raise RunExists(f"{path} exists already: pass --overwrite to replace it, or choose another path with --out")


def _is_used(path: Place) -> bool:
    if isinstance(path, Path):
        return path.exists() and any(path.iterdir())
    filesystem(path)  # a missing driver shows before the program starts; a run that is there, when it is claimed
    return False


def _was_recorded(path: Place) -> bool:
    from tensortap.store.format import RUN_JSON
    from tensortap.store.source import files_below

    return path.exists() if isinstance(path, Path) else files_below(path).exists(RUN_JSON)


def _frameworks() -> list[str]:
    from tensortap.launch.command import known_frameworks

    return known_frameworks()


def _run_and_wait(commandline: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the program as a child and return its exit code. Signals to this process reach it."""
    with subprocess.Popen(commandline, env=dict(environment)) as process:
        before = {number: signal.signal(number, lambda number, _: process.send_signal(number)) for number in _signals()}
        interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child as well
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGINT, interrupts)
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _signals() -> list[int]:
    return [getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)]


def _conclude(reference: str, path: Place, code: int) -> None:
    """Print the verdict about each run of the launch and end with the worst exit code, unless the program failed."""
    from tensortap.errors import TensortapError
    from tensortap.launch.series import later_runs

    if not _was_recorded(path):
        raise typer.Exit(code or 3)
    try:
        ours, theirs = ([first, *later_runs(first)] for first in (as_place(reference), path))
        codes = [_compare(address_of(one), address_of(other)) for one, other in zip(ours, theirs, strict=False)]
    except TensortapError as error:
        typer.echo(f"tensortap: {error}", err=True)
        raise typer.Exit(code or 2) from error
    for alone in (*ours[len(theirs) :], *theirs[len(ours) :]):
        typer.echo(f"tensortap: {alone} was not compared: the other launch recorded fewer models", err=True)
        codes.append(3)
    raise typer.Exit(code or next(each for each in _BY_WEIGHT if each in codes))


def _compare(reference: str, candidate: str) -> int:
    """Print the verdict about a run, and return its exit code."""
    import tensortap
    from tensortap.cli.compare import conclude

    try:
        conclude(tensortap.compare(reference, candidate), {}, verbose=0, quiet=False, exit_zero=False)
    except typer.Exit as ended:
        return ended.exit_code
    return 0
