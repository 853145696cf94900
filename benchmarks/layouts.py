"""How long does joining many ranks take? A run of summaries, sliced into the ranks of a mesh, against one process.

    python benchmarks/layouts.py [--mesh dp=2,tp=32] [--records 4000] [--ranks-too 1024] [--folder DIR]

The records of one process are sliced as FSDP, tensor parallelism and replicas would: by rows over all ranks, by columns
over tp, and whole on every rank. Each rank is written through the store with summaries alone. The comparison runs in a
process of its own, which reports seconds, CPU seconds with imports, and its peak memory. The target is 10 s and 500 MB
for 64 ranks of 4,000 records; time and memory grow with the number of rows, however many ranks they are on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tensortap.core.placement import Mesh, Placement
from tensortap.core.records import Key, Record, Summary
from tensortap.kernels import summarize
from tensortap.store import RunWriter

DISTINCT = 12
"""Tensors with values of their own; records repeat them under other names."""
_COMPARE = """
import json, resource, sys, time
started = time.perf_counter()
import tensortap
result = tensortap.compare(*sys.argv[1:])
took = time.perf_counter() - started
own = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
found = {"verdict": result.verdict, "counts": dict(result.counts)}
print(json.dumps({**found, "seconds": took, "cpu": own, "megabytes": peak}))
"""


def meshes(sizes: dict[str, int]) -> list[Mesh]:
    names, numbers = tuple(sizes), tuple(sizes.values())
    return [Mesh(names, numbers, at) for at in product(*(range(size) for size in numbers))]


def placement_of(number: int, shape: tuple[int, ...], mesh: Mesh | None) -> Placement | None:
    """By turns: rows over all ranks, columns over tp, a replica."""
    if mesh is None:
        return None
    if number % 3 == 2:
        return Placement.of_whole(shape, dict.fromkeys(mesh.names, "replica"), "layout")
    tp, ranks = mesh.size("tp"), prod(mesh.sizes)
    at = sum(place * prod(mesh.sizes[n + 1 :]) for n, place in enumerate(mesh.coordinates))
    dimension, parts, part = (0, ranks, at) if number % 3 == 0 else (1, tp, mesh.coordinate("tp"))
    size = shape[dimension] // parts
    box = tuple((0, size * part, size) if n == dimension else (0, 0, length) for n, length in enumerate(shape))
    roles = dict.fromkeys(mesh.names, "shard" if dimension == 0 else "replica") | {"tp": "shard"}
    return Placement(shape, (box,), roles, "layout")


def write(
    path: Path, rank: int, world: int, mesh: Mesh | None, arrays: list[npt.NDArray[np.float32]], count: int
) -> None:
    """Write one rank: `count` records, of which each repeats one of the arrays."""
    held: list[tuple[Placement | None, tuple[int, ...], Summary]] = []
    for number, array in enumerate(arrays):
        placement = placement_of(number, array.shape, mesh)
        local = array
        if placement is not None:
            ((rows, columns),) = placement.boxes
            local = np.ascontiguousarray(array[rows[1] : rows[1] + rows[2], columns[1] : columns[1] + columns[2]])
        held.append((placement, local.shape, summarize(local, placement=placement) if placement else summarize(local)))
    with RunWriter(path, rank=rank, world=world, info={"framework": "torch"}) as writer:
        if mesh is not None:
            writer.arrange(mesh, {})
        for seq in range(count):
            placement, shape, summary = held[seq % len(held)]
            key = Key(seq // 1000, 0, "forward", f"layers.{seq % 1000}", 0, "output", "0")
            writer.append(Record(key, rank, seq, "Linear", "float32", shape, seq, summary, None, placement))


def trial(folder: Path, sizes: dict[str, int], records: int) -> None:
    ranks = prod(sizes.values())
    generator = np.random.default_rng(0)
    arrays = [generator.normal(0, 1, (ranks, 64)).astype(np.float32) for _ in range(DISTINCT)]
    name = "_".join(map(str, sizes.values()))
    one, many = folder / f"one_{name}_{records}", folder / f"many_{name}_{records}"
    started = time.perf_counter()
    write(one, 0, 1, None, arrays, records)
    for rank, mesh in enumerate(meshes(sizes)):
        write(many, rank, ranks, mesh, arrays, records)
    print(f"{ranks:,} ranks × {records:,} records, written in {time.perf_counter() - started:.0f} s", flush=True)
    done = subprocess.run(
        [sys.executable, "-c", _COMPARE, str(one), str(many)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    rows = ranks * records
    per_row = found["cpu"] / rows * 1e6
    print(
        f"  {found['verdict']} {found['counts']}: {found['seconds']:.1f} s, of which {found['cpu']:.1f} s of CPU "
        f"({per_row:.1f} µs a row), peak {found['megabytes']:,.0f} MB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2,tp=32")
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--ranks-too", type=int, default=1024, help="a second trial of as many rows on more ranks")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    sizes = {name: int(size) for name, size in (part.split("=") for part in options.mesh.split(","))}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trial(Path(folder), sizes, options.records)
        if options.ranks_too:
            ranks = prod(sizes.values())
            more = {**sizes, "dp": sizes.get("dp", 1) * options.ranks_too // ranks}
            trial(Path(folder), more, options.records * ranks // options.ranks_too)


if __name__ == "__main__":
    main()
