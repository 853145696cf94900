"""Which modules a comparison of two small runs loads: the command must be there at once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from made_runs import chain, write

import tensortap as tt
from tensortap.compare.measure import tensors

HEAVY = ("numba", "llvmlite", "pandas", "torch", "paddle", "h5py", "matplotlib")


def loaded_by(*args: object) -> set[str]:
    code = (
        "import sys, tensortap.cli\n"
        "try:\n    tensortap.cli.main()\n"
        "except SystemExit as end:\n    assert end.code in (0, 1), end.code\n"
        f"print('loaded', *(name for name in {HEAVY!r} if name in sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("keep", [True, False])
def test_two_small_runs_need_neither_a_compiler_nor_a_framework(tmp_path: Path, keep: bool) -> None:
    for name, off in (("a", 0.0), ("b", 0.01)):
        write(tmp_path / name, [replace(each, keep=keep) for each in chain(off={"fc2": off})])
    assert loaded_by("compare", tmp_path / "a", tmp_path / "b") == set()
    assert loaded_by("health", tmp_path / "a") == set()


def test_numpy_and_the_kernel_measure_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, off in (("a", 0.0), ("b", 0.01)):
        write(tmp_path / name, chain(off={"fc2": off}))
    compiled = tt.compare(tmp_path / "a", tmp_path / "b").table  # the summaries of `write` have loaded the compiler
    monkeypatch.setattr(tensors, "_COMPILER", "not loaded")
    monkeypatch.setattr(tensors, "difference", None)
    little = tt.compare(tmp_path / "a", tmp_path / "b").table
    for name in little.column_names:
        ours, theirs = little.column(name).to_pylist(), compiled.column(name).to_pylist()
        if pa.types.is_floating(little.schema.field(name).type):
            np.testing.assert_allclose(np.array(ours, float), np.array(theirs, float), rtol=1e-12)
        else:
            assert ours == theirs, name


def test_much_work_is_for_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(tensors, "measure", lambda *given, **options: calls.append(given))
    monkeypatch.setattr(tensors, "_COMPILER", "not loaded")
    monkeypatch.setattr(tensors, "_MOST_ELEMENTS_IN_NUMPY", 20)
    for name, off in (("a", 0.0), ("b", 0.01)):
        write(tmp_path / name, chain(off={"fc2": off}))
    assert tt.compare(tmp_path / "a", tmp_path / "b").verdict == "diverged"
    assert not calls
