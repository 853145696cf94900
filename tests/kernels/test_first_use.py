"""The first summary of a process: nothing is loaded early, and a log message explains every wait."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from tensortap.kernels import compiling, summarize
from tensortap.kernels.summary import cpu

COMPILING = "compiling its CPU kernel"
USE = "import numpy as np; from tensortap.kernels.summary import cpu; print(cpu.summarize(np.ones(3, np.float32)).l1)"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, given = [sys.executable, "-c", code], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=given)


def test_the_room_loads_no_compiler() -> None:
    run("import sys, tensortap.kernels, tensortap.kernels.summary.reference; assert 'numba' not in sys.modules")


def test_the_room_summarises() -> None:
    assert summarize(np.array([3.0, -4.0], np.float32)).l2 == 5


def test_with_a_warm_cache_nothing_is_logged() -> None:
    cpu.summarize(np.ones(3, np.float32))  # it is warm from here on
    done = run(USE)
    assert done.stdout.strip() == "3.0"
    assert done.stderr == ""


def test_without_a_cache_folder_it_compiles_and_logs() -> None:
    code = f"import numba.core.caching as c; c.CacheImpl._locator_classes = []; {USE}"
    done = run(code, NUMBA_OPT="0")  # compiles in less time
    assert done.stdout.strip() == "3.0"
    assert done.stderr.count(COMPILING) == 1


def test_a_full_cache_disk_costs_only_the_cache() -> None:
    class Compiler:
        calls = 0

        def compile(self, signature: object) -> None:
            self.calls += 1
            if self.calls == 1:
                raise OSError(28, "No space left on device")

    compiler = Compiler()
    compiling.load(compiler, ())
    assert compiler.calls == 2
