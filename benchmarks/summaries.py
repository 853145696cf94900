"""Time and memory of comparing two runs of summaries in which every record differs, by number of records.

    python benchmarks/summaries.py [--records 125000 250000 500000 1000000] [--ranks 1] [--case all] [--folder /tmp]

Each comparison runs in a process of its own, on one core. The table shows its processor time, its peak memory above
that of a process that has only imported tensortap, and how the time grows: the exponent of the number of records.
`summary_runs.py` describes the cases.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from summary_runs import CASES, write_run


def compare(reference: str, candidate: str) -> None:
    """Compare in this process; print seconds of processor time and the peak of memory, before and after."""
    import tensortap.compare.comparing

    before, started = _peak(), time_of_processor()
    result = tensortap.compare(reference, candidate)
    print(
        json.dumps(
            {
                "seconds": time_of_processor() - started,
                "bytes": _peak() - before,
                "pairs": len(result),
                "verdict": result.verdict,
                "sentence": result.sentence,
                "counts": dict(result.counts),
            }
        )
    )


def time_of_processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak() -> int:
    """Return the peak of this process's resident memory. That of `getrusage` includes the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def measure(paths: list[Path]) -> dict[str, Any]:
    core = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(core), sys.executable, __file__, "--compare", *map(str, paths)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--records", type=int, nargs="+", default=[125_000, 250_000, 500_000, 1_000_000])
    arguments.add_argument("--ranks", type=int, default=1)
    arguments.add_argument("--per-step", type=int, default=10_000, help="records of a rank in a step")
    arguments.add_argument("--case", choices=(*CASES, "all"), default="all")
    arguments.add_argument("--folder", type=Path, default=None, help="folder for the runs, which are removed again")
    arguments.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.compare:
        compare(*options.compare)
        return
    for case in CASES if options.case == "all" else (options.case,):
        print(f"{case}: {options.ranks} rank{'s' * (options.ranks > 1)}, {options.per_step:,} records in a step")
        known: list[tuple[int, float]] = []
        for records in options.records:
            folder = Path(tempfile.mkdtemp(prefix="tensortap-bench-", dir=options.folder))
            try:
                paths = [folder / "reference", folder / "candidate"]
                counts = [
                    write_run(path, records, options.ranks, options.per_step, case, off)
                    for path, off in zip(paths, (False, True), strict=True)
                ]
                found = measure(paths)
            finally:
                shutil.rmtree(folder)
            assert found["pairs"] == min(counts) or case == "missing", found
            known.append((counts[0], found["seconds"]))
            grown = ""
            if len(known) > 1:
                (n, a), (m, b) = known[-2:]
                grown = f"  exponent {math.log(b / a) / math.log(m / n):.2f}"
            print(
                f"  {counts[0]:>9,} records  {found['seconds']:6.1f} s  {found['bytes'] / 1e6:7.0f} MB  "
                f"{found['bytes'] / counts[0]:6.0f} bytes a record  {found['verdict']}{grown}"
            )


if __name__ == "__main__":
    main()
