"""The C code of the hooks is built once, and never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensortap.native import building, compiler

SCRIPT = """
import sys, tensortap
from tensortap.capture import native_classes
print(native_classes.load() is not None)
"""


def run(cache: Path, **variables: str) -> tuple[str, str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_it_builds_where_there_is_a_compiler(tmp_path: Path) -> None:
    if building.load() is None:
        pytest.skip("no C compiler, or no headers of Python")
    compiler.build(tmp_path / "following.so")
    assert [file.name for file in tmp_path.iterdir()] == ["following.so"]
    assert {"Copies", "Entries", "Follower", "Taker"} <= set(dir(building._import(tmp_path / "following.so")))


def test_python_takes_over_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_folders", lambda: iter([tmp_path / "wheel", tmp_path / "cache"]))
    monkeypatch.setenv("CC", "/nowhere/cc")
    building.load.cache_clear()
    try:
        assert building.load() is None
        assert not (tmp_path / "cache").exists()
        monkeypatch.setenv("CC", "false")
        building.load.cache_clear()
        assert building.load() is None
        assert not list((tmp_path / "cache").iterdir())
    finally:
        building.load.cache_clear()


def test_portable_paths_are_in_python(tmp_path: Path) -> None:
    assert run(tmp_path, TENSORTAP_PORTABLE="1") == ("False", "")


def test_without_a_compiler_nothing_is_announced(tmp_path: Path) -> None:
    """Also without a home folder, as users of some containers have none."""
    script = (
        "from pathlib import Path\n"
        "from tensortap.native import building\n"
        f"building._folders = lambda: iter([Path({str(tmp_path)!r})])\n"
        "print(building.load())\n"
        "building.load.cache_clear()\n"
        "def homeless():\n"
        "    raise RuntimeError('Could not determine home directory.')\n"
        "building._folders = homeless\n"
        "print(building.load())\n"
    )
    environment = {**os.environ, "CC": "/nowhere/cc"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("None\nNone\n", "")
