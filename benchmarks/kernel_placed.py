"""The CPU kernel with a placement, against the same kernel without one, in one process and on one thread.

    python benchmarks/kernel_placed.py [--dtypes float32 bfloat16] [--rounds 15]

It prints ratios: 1.00 is as fast as a whole tensor of the same size. Both are measured alternately, in the thread's
processor time, and the least of all rounds counts. Boxes are aligned if every run of neighbours begins at a multiple of
8 elements and has a multiple of 8: the limit for these is 1.1, and 1.5 for all others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.layouts import parse_layout
from tensortap.core.placement import Mesh, Placement
from tensortap.kernels.summary import cpu
from tensortap.kernels.summary.runs import runs_of

SHAPES = (
    *((2048, 4096), (2048, 1024), (2048, 768), (4096, 256), (8192, 128), (8192, 100), (16384, 32), (16384, 24)),
    *((256, 128), (64, 64), (32, 16)),
)
LIMITS = {True: 1.1, False: 1.5}
"""By whether boxes are aligned."""


def placements(rows: int, columns: int) -> dict[str, Placement]:
    mesh = Mesh(("tp",), (4,), (1,))
    whole = 4 * rows, columns
    return {
        "rows": Placement.of_block(whole, (rows, 0), (rows, columns)),
        "columns": Placement.of_block((rows, 4 * columns), (0, columns), (rows, columns)),
        "gate|up": parse_layout("(gate|up)[tp] h", mesh.names).place((rows, columns), mesh),
        "zigzag": parse_layout("s[tp:zigzag] h", mesh.names).place((rows, columns), mesh),
        "flat from 5": Placement(whole, (((0, 5, rows * columns),),)),
        "columns from 1": Placement.of_block((rows, 4 * columns + 3), (0, columns + 1), (rows, columns)),
        "rows of odd length": Placement.of_block((rows, columns + 5), (0, 3), (rows, columns)),
        "strided": Placement(
            whole, tuple(((n * rows // 8, n * rows // 2, rows // 8), (0, 0, columns)) for n in range(8))
        ),
    }


def is_aligned(placement: Placement) -> bool:
    return not bool((runs_of(placement, 1).table % 8).any())


def ratio(plain: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the least time of `plain`, and that of the other relative to it, measured alternately."""
    least = [float("inf"), float("inf")]
    for _ in range(rounds):
        for at, call in enumerate((plain, other)):
            started = time.thread_time()
            call()
            least[at] = min(least[at], time.thread_time() - started)
    return least[0], least[1] / least[0]


def measure(array: npt.NDArray[np.generic], rounds: int) -> None:
    rows, columns = array.shape
    times, found = [], []
    for name, placement in placements(rows, columns).items():
        local = array.reshape(-1) if placement.flat else array
        cpu.summarize(local, 1, placement)
        seconds, relative = ratio(
            lambda: cpu.summarize(array, 1),
            lambda: cpu.summarize(local, 1, placement),  # noqa: B023  # called at once
            rounds,
        )
        times.append(seconds)
        limit = LIMITS[is_aligned(placement)]
        found.append(f"{name} {relative:.2f}{'' if relative <= limit else f' (more than {limit})'}")
    print(f"{array.dtype.name:9} {rows:>5}x{columns:<5} {1e3 * min(times):6.2f} ms  {', '.join(found)}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16", "float64"])
    arguments.add_argument("--rounds", type=int, default=15)
    options = arguments.parse_args()
    print(f"{'dtype':9} {'shape':>10} {'whole':>9}  with a placement, relative to it")
    for dtype in options.dtypes:
        for shape in SHAPES:
            numbers = np.random.default_rng(0).standard_normal(shape)
            measure(numbers.astype(dtypes.numpy_dtype(dtype)), options.rounds)


if __name__ == "__main__":
    main()
