"""The C code of the hooks is built once, and never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
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


SOURCE = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "added", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_added(void) { return PyModule_Create(&definition); }
"""


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> building.BackgroundBuild:
    """Return the build of a small module, into an empty cache."""
    if building.load() is None:
        pytest.skip("no C compiler, or no headers of Python")
    (tmp_path / "added.c").write_text(SOURCE)
    monkeypatch.setattr(building, "_folders", lambda: iter([tmp_path / "wheel", tmp_path / "cache"]))
    monkeypatch.setattr(building, "_NEEDED", 1 << 30)
    return building.BackgroundBuild(compiler.Extension(str(tmp_path / "added.c"), variant="1"))


def test_a_build_in_the_background_does_not_wait(added: building.BackgroundBuild, tmp_path: Path) -> None:
    assert added.module() is None and added.pending
    for _ in range(600):
        if (module := added.module()) is not None:
            break
        time.sleep(0.05)
    assert module is not None and module.__name__ == "added"
    assert not added.pending and not added._child
    name = compiler.file_name(added._extension)
    for _ in range(100):  # the claim is removed right after the file appears
        if [file.name for file in (tmp_path / "cache").iterdir()] == [name]:
            break
        time.sleep(0.05)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [name]
    assert building.BackgroundBuild(added._extension).module() is not None, "it is found at once from now on"


def test_a_program_may_wait_for_all_children_itself(added: building.BackgroundBuild) -> None:
    assert added.module() is None and added._child
    os.waitpid(added._child, 0)  # the process that starts the build ends at once
    added.module()
    assert not added._child and (added.pending or added.module() is not None), "the build is not given up"


def test_one_process_builds_and_others_wait_for_it(added: building.BackgroundBuild, tmp_path: Path) -> None:
    target = tmp_path / "added.so"
    claim = target.with_name("added.so.claim")
    claim.touch()
    compiler.build_once(target, added._extension)
    assert not target.exists() and claim.exists()
    os.utime(claim, (0, 0))  # left by a process that was killed
    compiler.build_once(target, added._extension)
    assert target.exists() and not claim.exists()


def test_a_background_build_without_a_compiler_is_given_up(
    added: building.BackgroundBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert added.module() is None and not added.pending


def test_a_background_build_leaves_scarce_memory_to_the_training(
    added: building.BackgroundBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert building._free_memory() > 0
    monkeypatch.setattr(building, "_free_memory", lambda: 1 << 20)
    assert added.module() is None and not added.pending


def test_another_version_of_a_framework_is_another_file(added: building.BackgroundBuild) -> None:
    extension = added._extension
    moved = extension._replace(options=("-I/elsewhere",))
    assert compiler.file_name(moved) == compiler.file_name(extension)
    assert compiler.file_name(extension._replace(variant="2")) != compiler.file_name(extension)
