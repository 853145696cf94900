"""Compile the CPU kernels and the hooks into the cache, side by side: `python tests/support/compile_kernels.py`.

In a fresh clone, each of the two processes that run the tests would compile all of them.
"""

from __future__ import annotations

import subprocess
import sys

SUMMARIES = """
import numpy as np
from tensortap.kernels.summary import batch, cpu
for dtype in (np.float32, np.float64):
    cpu.summarize(np.ones(3, dtype))
batch.SummaryBatch()
"""
PAIRS = """
import numpy as np
from tensortap.kernels.pairs import cpu
for dtype in (np.float32, np.float64):
    cpu.difference(np.ones(3, dtype), np.ones(3, dtype), size=1.0)
"""

HOOKS = """
from tensortap import native
from tensortap.frameworks.torch.access import access_build
native.load()
access_build().build_now()
"""


def main() -> None:
    """Compile everything side by side."""
    running = [subprocess.Popen([sys.executable, "-c", code]) for code in (SUMMARIES, PAIRS, HOOKS)]
    if any(each.wait() for each in running):
        raise SystemExit("a kernel could not be compiled: see above")


if __name__ == "__main__":
    main()
