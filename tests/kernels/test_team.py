"""A summary on a framework's own threads is the same, and runs only on the thread that owns the team."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tensortap import kernels
from tensortap.kernels.summary import cpu


@pytest.fixture(params=["torch", "paddle"])
def team(request, monkeypatch):
    monkeypatch.setattr(cpu, "_team", None)
    framework = pytest.importorskip(f"tensortap.frameworks.{request.param}.framework", exc_type=ImportError)
    library = getattr(framework, request.param.capitalize())().openmp()
    assert library is not None, "the runtime that the framework computes with is loaded with it"
    kernels.borrow_threads(library, 2)
    assert cpu._team is not None
    return cpu._team


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
def test_the_same_bits(team, dtype):
    array = (np.random.default_rng(0).standard_normal(3_000_001) * 50).astype(dtype)
    alone, together = cpu.summarize(array, threads=1), cpu.summarize(array)
    assert alone.digest == together.digest and np.array_equal(alone.sketch, together.sketch)
    assert (alone.mean, alone.std, alone.l1, alone.l2) == (together.mean, together.std, together.l1, together.l2)


def test_another_thread_does_without(team, monkeypatch):
    array = np.ones(3_000_000, np.float32)
    monkeypatch.setattr(team, "run", None)  # calling it would raise
    found = []
    worker = threading.Thread(target=lambda: found.append(cpu.summarize(array)))
    worker.start()
    worker.join()
    assert found[0].l1 == array.size


def test_a_library_that_is_none_of_the_kind(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "_team", None)
    kernels.borrow_threads(str(tmp_path / "libgomp.so"), 2)
    assert cpu._team is None
    kernels.borrow_threads("libm.so.6", 2)
    assert cpu._team is None
