"""The command that runs a program as it would run alone, and the environment that its processes inherit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensortap.errors import UsageError
from tensortap.frameworks.registry import registered_frameworks
from tensortap.launch.settings import INHERITED, LaunchSettings

__all__ = [
    "SITE_FOLDER",
    "environment_for",
    "environment_without",
    "known_frameworks",
    "program_command",
    "program_name",
]

SITE_FOLDER = Path(__file__).parent / "site"
"""A folder on PYTHONPATH; Python imports its `sitecustomize` at start, in the program and in all of its children."""
_PYTHONPATH = "PYTHONPATH"


def program_command(program: str, arguments: Sequence[str], module: bool) -> list[str]:
    """Return the command line: Python for a script or a module, else the executable itself, such as torchrun.

    Raise UsageError if the program is neither.
    """
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]  # as -W error
    if module:
        return [*python, "-m", program, *arguments]
    path = Path(program)
    if path.suffix in (".py", ".pyc", ".pyz") or (path / "__main__.py").exists():
        if not path.exists():
            raise UsageError(f"{program} does not exist: give a script, -m and a module, or a command such as torchrun")
        return [*python, program, *arguments]
    if (found := shutil.which(program)) is not None:
        return [found, *arguments]
    if path.is_file():
        return [*python, program, *arguments]
    raise UsageError(f"{program} is neither a script nor a command: give train.py, -m and a module, or torchrun ...")


def program_name(program: str, arguments: Sequence[str]) -> str:
    """Return a name for the run: the script's, also behind a launcher."""
    scripts = [argument for argument in (program, *arguments) if argument.endswith(".py")]
    return Path(scripts[0] if scripts else program).stem.rpartition(".")[2] or "run"


def environment_for(settings: LaunchSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which the program and its children record."""
    paths = [str(SITE_FOLDER), *([environment[_PYTHONPATH]] if environment.get(_PYTHONPATH) else [])]
    return {**environment, INHERITED: settings.to_text(), _PYTHONPATH: os.pathsep.join(paths)}


def environment_without(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as it is without a launch."""
    plain = {name: value for name, value in environment.items() if name != INHERITED}
    if _PYTHONPATH in plain:
        paths = [path for path in plain[_PYTHONPATH].split(os.pathsep) if path != str(SITE_FOLDER)]
        plain[_PYTHONPATH] = os.pathsep.join(paths)
        if not any(paths):
            del plain[_PYTHONPATH]
    return plain


def known_frameworks() -> list[str]:
    """Return the root packages of the frameworks whose models can be found."""
    return list(registered_frameworks())
