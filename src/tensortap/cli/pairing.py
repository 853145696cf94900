"""What `compare`, `report` and `view` ask alike: which records belong together, and how far they may be apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

__all__ = [
    "Atol",
    "Candidate",
    "Device",
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
    "Workers",
    "one_run",
    "options",
    "steps_meant",
    "tolerance",
]

_MOST_STEPS = 1_000_000

Reference = Annotated[str, typer.Argument(metavar="REFERENCE", help="The run to trust.", show_default=False)]
Candidate = Annotated[str, typer.Argument(metavar="CANDIDATE", help="The run to judge.", show_default=False)]
OnlyOrReference = Annotated[
    str, typer.Argument(metavar="REFERENCE", help="The run to trust, or the only one.", show_default=False)
]
MaybeCandidate = Annotated[
    str | None, typer.Argument(metavar="CANDIDATE", help="The run to judge.", show_default=False)
]
Rename = Annotated[
    list[str] | None,
    typer.Option(metavar="'PATTERN=REPLACEMENT'", help="Rename the candidate's modules; a regular expression."),
]
MapFile = Annotated[
    str | None, typer.Option("--map", metavar="FILE", help="Rules for names and layouts (.toml), or a list of names.")
]
Steps = Annotated[
    str, typer.Option(metavar="STEPS", help="Only 3 or 0,5 or 10-20; 3:4 is step 3 against the candidate's 4.")
]
Ranks = Annotated[list[int] | None, typer.Option(metavar="N", help="Only these ranks.")]
Modules = Annotated[list[str] | None, typer.Option(metavar="GLOB", help='Only modules so named; "(root)" too.')]
Kinds = Annotated[list[str] | None, typer.Option(metavar="KIND", help="Only input, output, grad_output, ...")]
Rtol = Annotated[
    float | None, typer.Option(metavar="X", help="Relative error to allow, instead of what the dtype suggests.")
]
Atol = Annotated[float | None, typer.Option(metavar="X", help="Absolute error to allow.")]
Noise = Annotated[
    list[str] | None,
    typer.Option(metavar="RUN", help="Another run of the reference, or what tensortap.noise wrote: allow that."),
]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Processes.  [default: by the machine]")]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="cuda measures whole tensors on the GPU, through torch.")]


def options(
    rename: Sequence[str] | None,
    map_file: str | None,
    step: str,
    rank: Sequence[int] | None,
    module: Sequence[str] | None,
    kind: Sequence[str] | None,
    rtol: float | None,
    atol: float | None,
    noise: Sequence[str] | None,
    workers: int | None,
    device: str,
) -> dict[str, Any]:
    """What was given, checked, as `tensortap.compare` takes it."""
    rules = map_file is not None and map_file.endswith(".toml")
    return {
        "rename": tuple(rename or ()),
        "map_file": None if rules else map_file,
        "mapping": map_file if rules else None,
        "steps": steps_meant(step) if step else None,
        "ranks": rank or None,
        "rtol": tolerance("--rtol", rtol),
        "atol": tolerance("--atol", atol),
        "noise": tuple(noise or ()),
        "kinds": _kinds(kind or ()),
        "modules": ["" if name == "(root)" else name for name in module or ()] or "*",
        "workers": _workers(workers),
        "device": device,
    }


def one_run(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What of the options means something where there is nothing to compare with; the others must not be given."""
    from tensortap.errors import UsageError

    for name in ("rename", "map_file", "mapping", "rtol", "atol", "noise", "workers", "device"):
        if chosen[name] not in (None, (), "cpu"):
            option = "map" if name in ("map_file", "mapping") else name
            raise UsageError(f"--{option} needs two runs: say which candidate to compare")
    if any(ours != theirs for ours, theirs in (chosen["steps"] or {}).items()):
        raise UsageError("--step 3:4 needs two runs: say which candidate to compare")
    names = ("steps", "ranks", "modules", "kinds")
    return {name: None if chosen[name] == "*" else chosen[name] for name in names}


def steps_meant(text: str) -> dict[int, int]:
    """The reference's steps behind "3", "0,5", "10-20", "3:4" or "0-9:100-109", each with the candidate's."""
    from tensortap.errors import UsageError

    meant: dict[int, int] = {}
    for part in text.replace(" ", "").split(","):
        ours, _, theirs = part.partition(":")
        spans = [_span(side) for side in (ours, theirs or ours)]
        if spans[0] is None or spans[1] is None or part.endswith(":"):
            raise UsageError(f"--step {text}: {part or 'nothing'!r} is no step; say 3, 0,5, 10-20 or 3:4")
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


def tolerance(option: str, given: float | None) -> float | None:
    """What was given, if it is one."""
    from tensortap.errors import UsageError

    if given is not None and not 0 <= given < float("inf"):
        raise UsageError(f"{option} {given}: say zero or more")
    return given


def _workers(given: int | None) -> int | None:
    from tensortap.errors import UsageError

    if given is not None and given < 1:
        raise UsageError(f"--workers {given}: it takes at least one")
    return given
