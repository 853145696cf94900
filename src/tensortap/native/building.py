"""Builds and loads the extension module `following`.

It is looked for next to its source, where a wheel has it, then in the caches. If it is in none of them, the compiler of
this Python builds it, which takes a few seconds, once.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from tensortap.core.machine import PORTABLE
from tensortap.native.compiler import SOURCE, build, file_name, is_available

__all__ = ["load"]

_log = logging.getLogger("tensortap")


@cache
def load() -> ModuleType | None:
    """Return the module; None where it cannot be built, or with TENSORTAP_PORTABLE=1."""
    if PORTABLE or sys.platform == "win32" or sys.implementation.name != "cpython" or not _has_interpreter_lock():
        return None
    try:
        name = file_name()
        for folder in _folders():
            if (found := folder / name).is_file():
                return _import(found)
        return _import(_build_in_cache(name)) if is_available() else None
    except (OSError, ImportError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home folder
        _log.debug("hooks run in Python, since their C code cannot be built: %s", error)
        return None


def _build_in_cache(name: str) -> Path:
    _log.warning("tensortap: compiling its hooks (once, then cached) …")
    for folder in list(_folders())[1:]:
        with suppress(OSError):  # a package that others own: the next folder is the user's
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            build(folder / name)
            return folder / name
    raise PermissionError("no folder for compiled code can be written")


def _folders() -> Iterator[Path]:
    """Yield where the module may be: next to the source in a wheel, in the source's cache, in the user's cache."""
    yield SOURCE.parent
    yield SOURCE.parent / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tensortap"


def _import(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("following", str(path))
    spec = importlib.util.spec_from_loader("following", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _has_interpreter_lock() -> bool:
    """Return whether threads of this Python take turns: the C code relies on it."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()
