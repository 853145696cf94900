"""Options that `compare`, `report` and `view` share, as the command line takes them. `compare.options` defines them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from tensortap.compare.options import option_info

__all__ = [
    "Address",
    "Atol",
    "Candidate",
    "Device",
    "Engine",
    "Kinds",
    "MapFile",
    "MaybeCandidate",
    "Modules",
    "Noise",
    "OnlyOrReference",
    "Ranks",
    "Reference",
    "Rename",
    "Rtol",
    "Steps",
    "Truth",
    "UntilFirst",
    "Workers",
    "Zoom",
    "options_for_one_run",
    "parse_options",
    "parse_steps",
    "parse_tolerance",
    "parse_zoom",
]

_MOST_STEPS = 1_000_000


def _flag(name: str) -> Any:
    """Return the command line's form of an option."""
    info = option_info(name)
    return typer.Option(info.flag, metavar=info.metavar, help=info.help)


Reference = Annotated[str, typer.Argument(metavar="REFERENCE", help="The run to trust.", show_default=False)]
Candidate = Annotated[str, typer.Argument(metavar="CANDIDATE", help="The run to judge.", show_default=False)]
OnlyOrReference = Annotated[
    str, typer.Argument(metavar="REFERENCE", help="The run to trust, or the only one.", show_default=False)
]
MaybeCandidate = Annotated[
    str | None, typer.Argument(metavar="CANDIDATE", help="The run to judge.", show_default=False)
]
Rename = Annotated[list[str] | None, _flag("rename")]
MapFile = Annotated[str | None, _flag("mapping")]
Steps = Annotated[str, _flag("steps")]
Ranks = Annotated[list[int] | None, _flag("ranks")]
Modules = Annotated[list[str] | None, _flag("modules")]
Kinds = Annotated[list[str] | None, _flag("kinds")]
Rtol = Annotated[float | None, _flag("rtol")]
Atol = Annotated[float | None, _flag("atol")]
Noise = Annotated[list[str] | None, _flag("noise")]
Truth = Annotated[str | None, _flag("truth")]
Zoom = Annotated[str | None, _flag("zoom")]
UntilFirst = Annotated[bool, _flag("until_first")]
Workers = Annotated[int | None, _flag("workers")]
Engine = Annotated[str | None, _flag("engine")]
Address = Annotated[str | None, _flag("address")]
Device = Annotated[str, _flag("device")]


def parse_zoom(text: str | None) -> tuple[str, str] | None:
    """Return the builders of the two models. Raise UsageError if there are not two."""
    from tensortap.errors import UsageError

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(parts):
        raise UsageError(f"--zoom {text}: give two, like --zoom ref.py:build,cand.py:build")
    return parts[0], parts[1]


def parse_options(
    rename: Sequence[str] | None,
    map_file: str | None,
    step: str,
    rank: Sequence[int] | None,
    module: Sequence[str] | None,
    kind: Sequence[str] | None,
    rtol: float | None,
    atol: float | None,
    noise: Sequence[str] | None,
    truth: str | None,
    workers: int | None,
    engine: str | None,
    address: str | None,
    device: str,
) -> dict[str, Any]:
    """Check the arguments, and return them as `tensortap.compare` takes them."""
    return {
        "rename": tuple(rename or ()),
        "mapping": map_file,
        "steps": parse_steps(step) if step else None,
        "ranks": rank or None,
        "rtol": parse_tolerance("--rtol", rtol),
        "atol": parse_tolerance("--atol", atol),
        "noise": tuple(noise or ()),
        "truth": truth,
        "kinds": _kinds(kind or ()),
        "modules": ["" if name == "(root)" else name for name in module or ()] or None,
        "workers": _workers(workers),
        "engine": _engine(engine),
        "address": address,
        "device": device,
    }


def options_for_one_run(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that apply to a single run. Raise UsageError if one of the others was given."""
    from tensortap.errors import UsageError

    for name in ("rename", "mapping", "rtol", "atol", "noise", "truth", "workers", "engine", "address", "device"):
        if chosen[name] not in (None, (), "cpu"):
            raise UsageError(f"{option_info(name).flag} needs two runs: say which candidate to compare")
    if any(ours != theirs for ours, theirs in (chosen["steps"] or {}).items()):
        raise UsageError("--step 3:4 needs two runs: say which candidate to compare")
    return {name: chosen[name] for name in ("steps", "ranks", "modules", "kinds")}


def parse_steps(text: str) -> dict[int, int]:
    """Return the reference's steps in "3", "0,5", "10-20", "3:4" or "0-9:100-109", each with the candidate's."""
    from tensortap.errors import UsageError

    meant: dict[int, int] = {}
    for part in text.replace(" ", "").split(","):
        ours, _, theirs = part.partition(":")
        spans = [_span(side) for side in (ours, theirs or ours)]
        if spans[0] is None or spans[1] is None or part.endswith(":"):
            raise UsageError(f"--step {text}: {part or 'nothing'!r} is not a step; write 3, 0,5, 10-20 or 3:4")
        if len(spans[0]) != len(spans[1]):
            raise UsageError(f"--step {text}: {part!r} has {len(spans[0])} steps against {len(spans[1])}")
        if len(meant) + len(spans[0]) > _MOST_STEPS:
            raise UsageError(f"--step {text}: more than {_MOST_STEPS:,} steps; leave the option out for all of them")
        meant |= dict(zip(spans[0], spans[1], strict=True))
    return meant


def _span(text: str) -> range | None:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or not (last if dash else first).isdecimal():
        return None
    span = range(int(first), int(last or first) + 1)
    return span or None


def _kinds(given: Sequence[str]) -> tuple[str, ...] | None:
    import difflib

    from tensortap.core.records import KINDS
    from tensortap.errors import UsageError

    for word in given:
        if word not in KINDS:
            close = difflib.get_close_matches(word, KINDS, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"--kind {word}: {hint}known are {', '.join(KINDS)}")
    return tuple(given) or None


def parse_tolerance(option: str, given: float | None) -> float | None:
    """Return a tolerance. Raise UsageError if it is negative or infinite."""
    from tensortap.errors import UsageError

    if given is not None and not 0 <= given < float("inf"):
        raise UsageError(f"{option} {given}: give zero or more")
    return given


def _workers(given: int | None) -> int | None:
    from tensortap.errors import UsageError

    if given is not None and given < 1:
        raise UsageError(f"--workers {given}: give at least one")
    return given


def _engine(given: str | None) -> str | None:
    from tensortap.compare.options import ENGINES
    from tensortap.errors import UsageError

    if given is not None and given not in ENGINES:
        raise UsageError(f"--engine {given}: known are {', '.join(ENGINES)}")
    return given
