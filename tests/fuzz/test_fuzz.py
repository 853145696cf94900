"""A short run of the fuzzer: the same cases every time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("tensortap_fuzz", HERE / "run.py")
    assert spec is not None and spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = run
    spec.loader.exec_module(run)
    from corpus import SAMPLES

    cases = [(sample.name, seed) for seed in range(6) for sample in SAMPLES]
    found = [str(finding) for finding in run.fuzz(cases, tmp_path) if finding is not None]
    assert not found, "\n\n".join(found)
