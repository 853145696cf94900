"""Fuzz every file type that tensortap reads: `make fuzz MINUTES=20`.

    python tests/fuzz/run.py --minutes 20
    python tests/fuzz/run.py --only index.arrows --seed 4711 --cases 1     one case again

Each case is a sample and a seed, so a finding repeats. Cases run in a subprocess with a limit on memory. A case that
takes too long or ends the process is a finding, too.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

SECONDS = 20.0
"""Longest time that one case may take."""


@dataclass(frozen=True)
class Finding:
    """A case that was not handled: which one, how the file was mutated, and what happened."""

    sample: str
    seed: int
    how: str
    what: str

    def __str__(self) -> str:
        return f"{self.sample}, seed {self.seed} ({self.how}): {self.what.strip()}"


class Worker:
    """The subprocess that reads. A new one starts when one has ended or is stuck."""

    def __init__(self, corpus: Path, scratch: Path) -> None:
        command = [sys.executable, str(HERE / "worker.py"), str(corpus), str(scratch)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self._errors = (scratch / "stderr").open("wb")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )
        self._buffer = b""
        if self._line(120) != "ready":
            self.close()
            raise RuntimeError(f"the worker does not start: {(scratch / 'stderr').read_text()[-2000:]}")

    def run(self, sample: str, seed: int) -> Finding | None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"sample": sample, "seed": seed}).encode() + b"\n")
        self._process.stdin.flush()
        how = ""
        for _ in range(2):
            line = self._line(SECONDS)
            if line is None:
                code = self._process.poll()
                what = f"the process ended with {code}" if code is not None else f"no end after {SECONDS:.0f} s"
                return Finding(sample, seed, how, what)
            said: dict[str, Any] = json.loads(line)
            how = said.get("how", how)
            if said.get("found"):
                return Finding(sample, seed, how, said["found"])
        return None

    @property
    def usable(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()

    def _line(self, seconds: float) -> str | None:
        """Return the next line, or None if the process ended or says nothing for so long."""
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                self._process.wait()
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()


def fuzz(cases: Iterable[tuple[str, int]], folder: Path) -> Iterator[Finding | None]:
    """Run cases one after the other; yield a finding or None for each."""
    from corpus import write_corpus

    corpus, scratch = folder / "corpus", folder / "scratch"
    corpus.mkdir()
    scratch.mkdir()
    write_corpus(corpus)
    worker = Worker(corpus, scratch)
    try:
        for sample, seed in cases:
            finding = worker.run(sample, seed)
            if finding is not None and (not worker.usable or "no end after" in finding.what):
                worker.close()
                worker = Worker(corpus, scratch)
            yield finding
    finally:
        worker.close()


def main() -> int:
    from corpus import SAMPLES

    names = [sample.name for sample in SAMPLES]
    parser = argparse.ArgumentParser(description="Fuzz every file type that tensortap reads.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--cases", type=int, default=0, help="stop after so many cases")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=names, help="one file type")
    options = parser.parse_args()
    chosen = [options.only] if options.only else names
    until = time.monotonic() + 60 * options.minutes
    done: Counter[str] = Counter()
    findings = []
    with tempfile.TemporaryDirectory(prefix="tensortap-fuzz-") as folder:
        for at, finding in enumerate(fuzz(cases_of(chosen, options.seed), Path(folder))):
            done[chosen[at % len(chosen)]] += 1
            if finding is not None:
                findings.append(finding)
                print(f"\n{finding}\n", flush=True)
            total = sum(done.values())
            if sys.stderr.isatty():
                print(f"\r{total:,} cases, {len(findings)} findings", end="", file=sys.stderr, flush=True)
            if time.monotonic() > until or (options.cases and total >= options.cases):
                break
    print(f"{sum(done.values()):,} cases of {len(done)} file types, {len(findings)} findings")
    return 1 if findings else 0


def cases_of(names: list[str], first: int) -> Iterator[tuple[str, int]]:
    """Yield every name with one seed, then with the next."""
    return ((name, seed) for seed in count(first) for name in names)


if __name__ == "__main__":
    sys.exit(main())
