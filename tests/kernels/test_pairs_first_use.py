"""The first pair of a process: no wait is unexplained."""

from __future__ import annotations

import os
import subprocess
import sys

USE = """
import numpy
from tensortap.kernels.pairs import cpu as pairs

a = numpy.ones(3)
print(pairs.difference(a, a, size=1.0))  # a size that is not given takes the summary's kernel, too
"""


def test_without_a_cache_folder_it_compiles_and_logs() -> None:
    code = f"import numba.core.caching as c; c.CacheImpl._locator_classes = []\n{USE}"
    quick = os.environ | {"NUMBA_OPT": "0"}  # compiles in half the time
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=quick
    )
    assert "equal=True" in done.stdout
    assert done.stderr.count("compiling its pair kernel for 64-bit numbers") == 1
