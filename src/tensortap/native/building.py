"""Builds and loads the extension modules.

A module is searched next to its source, where a wheel has it, then in the caches. If it is in none of them, the
compiler of this Python builds it, once. `following` takes a few seconds, and the first tap waits for it. A module that
takes longer is built in the background, and used once it is there.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from tensortap.core.machine import PORTABLE
from tensortap.native import compiler
from tensortap.native.compiler import HOOKS, LONGEST, Extension, build, file_name, is_available

__all__ = ["BackgroundBuild", "load"]

_log = logging.getLogger("tensortap")
_NEEDED = 4 << 30
"""Bytes of free memory for a build in the background: a compiler of C++ takes one gigabyte, which training may need."""
_ERRORS = OSError, ImportError, RuntimeError, subprocess.SubprocessError  # RuntimeError: no home folder


@cache
def load() -> ModuleType | None:
    """Return the module `following`; None where it cannot be built, or with TENSORTAP_PORTABLE=1."""
    if not _can_load():
        return None
    try:
        if (found := _find(HOOKS)) is None and is_available():
            _log.warning("tensortap: compiling its hooks (once, then cached) …")
            found = _cache_folder() / file_name()
            build(found)
        return None if found is None else _import(found)
    except _ERRORS as error:
        _log.debug("hooks run in Python, since their C code cannot be built: %s", error)
        return None


class BackgroundBuild:
    """A module that a separate process compiles, while the program continues without it."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension
        self.loaded: ModuleType | None = None
        """The module, if `module` has found it. Code that runs often reads this, because a search takes system calls.
        """
        self._target: Path | None = None
        """The file that is being built."""
        self._started = 0.0
        self._child = 0
        """The process that starts the build, until it has ended."""
        self.pending = _can_load()
        """Whether the module may still come."""

    def module(self) -> ModuleType | None:
        """Return the module, if it is there. The first call starts to build it where it is missing."""
        if self.pending:
            try:
                self._advance()
            except _ERRORS as error:
                _log.debug("%s is not used: %s", Path(self._extension.source).name, error)
                self.pending = False
        return self.loaded

    def build_now(self) -> None:
        """Build the module, if it is missing, and wait for it."""
        if self.pending and _find(self._extension) is None:
            build(_cache_folder() / file_name(self._extension), self._extension)

    def _advance(self) -> None:
        if self._child:
            try:
                self._child = 0 if os.waitpid(self._child, os.WNOHANG)[0] else self._child
            except ChildProcessError:  # the program waits for all children itself, or ignores SIGCHLD
                self._child = 0
        found = _find(self._extension) if self._target is None else self._target
        if found is not None and found.is_file():
            self.pending = False
            self.loaded = _import(found)
        elif self._target is not None:
            self.pending = time.monotonic() - self._started < LONGEST
        elif not is_available(self._extension) or _free_memory() < _NEEDED:
            self.pending = False
        else:
            self._start(_cache_folder() / file_name(self._extension))

    def _start(self, target: Path) -> None:
        # No thread of the program waits for it. The new interpreter skips the program's own startup code.
        source, options, variant = self._extension
        given = str(target), source, list(options), variant
        code = f"import runpy; runpy.run_path({compiler.__file__!r})['build_apart'](*{given!r})"
        command = [sys.executable, "-I", "-S", "-c", code]
        quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        self._child = os.posix_spawn(sys.executable, command, os.environ, file_actions=quiet)
        self._target, self._started = target, time.monotonic()


def _can_load() -> bool:
    return (
        not PORTABLE
        and sys.platform != "win32"
        and sys.implementation.name == "cpython"
        and getattr(sys, "_is_gil_enabled", lambda: True)()  # the C code relies on threads that take turns
    )


def _free_memory() -> int:
    """Return the bytes that this process and its children may still take, as far as that is known."""
    free = [1 << 62]
    with suppress(OSError, ValueError, IndexError):
        free.append(int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) << 10)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # "max" is no number
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(free)


def _find(extension: Extension) -> Path | None:
    name = file_name(extension)
    return next((folder / name for folder in _folders() if (folder / name).is_file()), None)


def _cache_folder() -> Path:
    for folder in list(_folders())[1:]:
        with suppress(OSError):  # a package that others own: the next folder is the user's
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    raise PermissionError("no folder for compiled code can be written")


def _folders() -> Iterator[Path]:
    """Yield where a module may be: next to the source in a wheel, in the source's cache, in the user's cache."""
    source = Path(HOOKS.source)
    yield source.parent
    yield source.parent / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tensortap"


def _import(path: Path) -> ModuleType:
    name = path.name.partition(".")[0].partition("-")[0]
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
