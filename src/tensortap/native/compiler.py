"""Compiles the extension modules with the compilers of this Python.

Only the standard library is imported: building a wheel runs this file where nothing else is installed, and so does the
process of a build in the background.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["HOOKS", "LONGEST", "Extension", "build", "build_apart", "build_once", "file_name", "is_available"]

LONGEST = 120
"""Seconds that a compiler may take."""

_OPTIONS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")


class Extension(NamedTuple):
    """A module to compile."""

    source: str
    """Its path. It includes nothing but the headers beside it, and those of Python and of `options`."""
    options: tuple[str, ...] = ()
    """Further options of the compiler: a standard, folders of headers, libraries."""
    variant: str = ""
    """Further dependencies of the compiled file, such as the version of a framework."""


HOOKS = Extension(str(Path(__file__).with_name("following.c")))


def file_name(extension: Extension = HOOKS) -> str:
    """Return the file name of the module for this Python, this source and its options."""
    source = Path(extension.source)
    content = b"".join(file.read_bytes() for file in [source, *sorted(source.parent.glob("*.h"))])
    options = [option for option in extension.options if not option.startswith(("-I", "-L"))]  # not where things are
    content += " ".join((*_OPTIONS, *options, extension.variant)).encode()
    return f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.{sysconfig.get_config_var('SOABI')}.so"


def is_available(extension: Extension = HOOKS) -> bool:
    """Return whether there is a compiler, with the headers of this Python."""
    return shutil.which(_compiler(extension)[0]) is not None and (_headers() / "Python.h").is_file()


def build(target: Path, extension: Extension = HOOKS) -> None:
    """Compile the module into a file, which appears when it is complete."""
    linking = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    command = [*_compiler(extension), *_OPTIONS, *linking, f"-I{_headers()}", extension.source, "-o", str(partial)]
    try:
        subprocess.run([*command, *extension.options], check=True, capture_output=True, timeout=LONGEST)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def build_once(target: Path, extension: Extension) -> None:
    """Compile the module, unless another process is compiling it, such as another rank of the run."""
    claim = target.with_name(f"{target.name}.claim")
    with suppress(OSError):
        if time.time() - claim.stat().st_mtime > LONGEST:
            claim.unlink()
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    try:
        build(target, extension)
    finally:
        claim.unlink(missing_ok=True)


def _compiler(extension: Extension) -> list[str]:
    variable, usual = ("CC", "cc") if extension.source.endswith(".c") else ("CXX", "c++")
    return shlex.split(os.environ.get(variable) or sysconfig.get_config_var(variable) or usual)


def _headers() -> Path:
    return Path(sysconfig.get_path("include"))


def build_apart(target: str, source: str, options: list[str], variant: str) -> None:
    """Build in a new process of low priority, without waiting for it."""
    if os.fork():
        return
    os.setsid()
    os.nice(10)
    with suppress(OSError, subprocess.SubprocessError):
        build_once(Path(target), Extension(source, tuple(options), variant))
