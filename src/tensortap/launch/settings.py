"""The settings of one launch: where to record, and with which options. Child processes inherit them."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tensortap.errors import UsageError
from tensortap.launch.options import CAPTURE_OPTIONS, parse_all, variable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["INHERITED", "SETTINGS_FILE", "LaunchSettings", "collect", "free_path"]

INHERITED = "TENSORTAP_RUN"
"""The environment variable that holds the settings for the program and its children."""
SETTINGS_FILE = "tensortap.toml"
_NAMES = ("out", *(option.name for option in CAPTURE_OPTIONS))


@dataclass(frozen=True)
class LaunchSettings:
    """The path and the options with which a launch records."""

    out: str
    """The folder of the run, as an absolute path: a program may change its working directory."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `capture` as they were given; `parse_all` makes values of them."""
    frameworks: Sequence[str] = ()
    """Root packages of the frameworks to wait for."""
    main: int = 0
    """Process id of the program itself, which reports if no model was found; 0 if its parent does."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def inherited(cls, environment: Mapping[str, str] = os.environ) -> LaunchSettings | None:
        """Return the settings that this process inherited; None if it is not part of a launch."""
        text = environment.get(INHERITED)
        return cls(**json.loads(text)) if text else None


def collect(given: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings by name: as given, else from the environment, else from tensortap.toml in the folder.

    Raise UsageError for names or values that are not valid.
    """
    from_environment = {name: environment[variable(name)] for name in _NAMES if environment.get(variable(name))}
    found = _read_file(folder / SETTINGS_FILE) | from_environment
    found |= {name: value for name, value in given.items() if value is not None}
    parse_all(found)
    return found


def _read_file(path: Path) -> dict[str, Any]:
    try:
        section = tomllib.loads(path.read_text()).get("capture", {})
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(section, dict):
        raise UsageError(f"{path}: capture is not a section; write [capture] and one option on each line below it")
    for name in section:
        if name not in _NAMES:
            close = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(_NAMES)}"
            raise UsageError(f"{path}: [capture] has no option {name!r}; {hint}")
    return section


def free_path(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
