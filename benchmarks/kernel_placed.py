"""The CPU kernel with a placement, against the same kernel without one, in one process and on one thread.

python benchmarks/kernel_placed.py            prints ratios: 1.00 is as fast as a whole tensor
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tensortap.core import dtypes
from tensortap.core.layouts import parse_layout
from tensortap.core.placement import Mesh, Placement
from tensortap.kernels.summary import cpu

ROUNDS = 15
SHAPES = ((2048, 4096), (2048, 1024), (8192, 128))


def best(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)


def placements(rows: int, columns: int) -> dict[str, Placement]:
    mesh = Mesh(("tp",), (4,), (1,))
    return {
        "rows": Placement.of_block((4 * rows, columns), (rows, 0), (rows, columns)),
        "columns": Placement.of_block((rows, 4 * columns), (0, columns), (rows, columns)),
        "gate|up": parse_layout("(gate|up)[tp] h", mesh.names).place((rows, columns), mesh),
        "zigzag": parse_layout("s[tp:zigzag] h", mesh.names).place((rows, columns), mesh),
        "flat, from 5 on": Placement((4 * rows, columns), (((0, 5, rows * columns),),)),
        "columns, from 1 on": Placement.of_block((rows, 4 * columns + 3), (0, columns + 1), (rows, columns)),
    }


def main() -> None:
    print(f"{'dtype':9} {'shape':>10} {'whole':>8}  with a placement, relative to it")
    for dtype in ("float32", "bfloat16"):
        for rows, columns in SHAPES:
            array = np.random.default_rng(0).standard_normal((rows, columns)).astype(dtypes.numpy_dtype(dtype))
            plain = best(lambda: cpu.summarize(array, 1))  # noqa: B023  # called at once
            ratios = []
            for name, placement in placements(rows, columns).items():
                local = array.reshape(-1) if placement.flat else array
                seconds = best(lambda: cpu.summarize(local, 1, placement))  # noqa: B023
                ratios.append(f"{name} {seconds / plain:.2f}")
            print(f"{dtype:9} {rows:>5}x{columns:<5} {1e3 * plain:6.2f}ms  {', '.join(ratios)}")


if __name__ == "__main__":
    main()
