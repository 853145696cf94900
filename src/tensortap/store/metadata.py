"""The JSON files of a run, checked: run.json, rank.json and coverage.json. One check for each.

run.json is needed to read the run, so a damaged one raises RunUnreadable. Without the others the run can be read, so
their checks raise ValueError, and the run has a notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from tensortap.core.placement import Mesh
from tensortap.core.records import Coverage
from tensortap.errors import RunUnreadable, shorten
from tensortap.store.format import FORMAT, OLDEST, RUN_FORMAT, rank_name

__all__ = ["CoverageFile", "RankStatus", "check_run_info", "check_version", "parse_coverage", "parse_rank_status"]

_LONGEST_NOTICE = 2000


@dataclass(frozen=True)
class RankStatus:
    """The part of rank.json that a reader uses."""

    status: str = "unknown"
    """running, finished or failed."""
    reason: str = ""
    mesh: Mesh | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    """Global names of modules by the names that this rank's model has for them, where they differ."""


@dataclass(frozen=True)
class CoverageFile:
    """The contents of coverage.json."""

    modules: list[Coverage] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def check_run_info(info: Any, path: str) -> dict[str, Any]:
    """Return the content of run.json. Raise RunUnreadable if this version cannot read the run."""
    if not isinstance(info, dict) or info.get("format") != RUN_FORMAT:
        raise RunUnreadable(f"{path} was not written by tensortap: its format is not {RUN_FORMAT!r}.")
    version, world = info.get("version"), info.get("world")
    if type(version) is not int:  # a bool is an int, too
        raise RunUnreadable(f"{path} is damaged: version must be a whole number, not {short(version)}.")
    check_version(version, path)
    if type(world) is not int or world < 1:
        raise RunUnreadable(
            f"{path} is damaged: world is the number of ranks, 1 or more, not {short(world)}. "
            f"Correct it by hand: the folders {rank_name(0)}, … next to it are the ranks that left anything."
        )
    for name, kind in _FIELDS.items():
        if info.get(name) is not None and not isinstance(info[name], kind):
            wanted = "an object" if kind is dict else "a text"
            raise RunUnreadable(f"{path} is damaged: {name} must be {wanted}, not {short(info[name])}.")
    return info


def check_version(version: int, path: str) -> None:
    """Raise RunUnreadable if a file has a format that cannot be read. Ranks may be written by different versions."""
    if version < OLDEST:
        raise RunUnreadable(
            f"{path} is of format {version}, with another definition of summaries: record the run again"
        )
    if version > FORMAT:
        raise RunUnreadable(
            f"{path} is of format {version}; this tensortap reads up to format {FORMAT}. "
            "Upgrade it: pip install --upgrade tensortap"
        )


def parse_rank_status(value: Any, path: str) -> RankStatus:
    """Return the status in a rank.json. Raise ValueError if it has none."""
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    if type(version := value.get("version")) is int:
        check_version(version, path)
    if not isinstance(value.get("status"), str):
        raise ValueError("it has no status")
    mesh, renames = value.get("mesh"), value.get("renames") or {}
    if not isinstance(renames, dict) or not all(isinstance(name, str) for name in renames.values()):
        raise ValueError("its renames are not names by name")
    return RankStatus(
        shorten(value["status"]),
        shorten(str(value.get("reason") or ""), _LONGEST_NOTICE),
        None if mesh is None else Mesh.parse(mesh),
        renames,
    )


def parse_coverage(value: Any) -> CoverageFile:
    """Return the contents of a coverage.json. Raise ValueError if a row is not one of a module."""
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    modules, notices = value.get("modules", []), value.get("notices", [])
    if not isinstance(modules, list) or not isinstance(notices, list):
        raise ValueError("it lists neither modules nor notices")
    return CoverageFile([_row(row) for row in modules], [shorten(str(text), _LONGEST_NOTICE) for text in notices])


def _row(row: Any) -> Coverage:
    if not isinstance(row, Mapping):
        raise ValueError("a module is not an object")
    texts: list[Any] = [row.get(name) for name in ("module", "class", "status", "reason")]
    calls, base = row.get("calls"), row.get("base", "")
    if not all(isinstance(text, str) for text in (*texts, base)) or type(calls) is not int:
        raise ValueError(f"the row of module {short(row.get('module'))} is incomplete")
    module, cls, status, reason = texts
    return Coverage(module, cls, status, calls, reason, base)


_FIELDS: Mapping[str, type] = {
    "config": dict,
    "environment": dict,
    "framework": str,
    "model": str,
    "started": str,
}
