"""Records and facts to report on, made by hand."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from tensortap.core.records import Coverage, Key, Record, Summary
from tensortap.report.facts import RunFacts


def summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "elements": 12,
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "zeros": 3,
        "edge": 0,
        "digest": 0xABC,
    }
    values |= {"min": -1.5, "max": 2.5, "mean": 0.25, "std": 0.5, "l1": 3.0, "l2": 4.0}
    return Summary(**{**values, "sketch": np.ones(4, np.float32), **changes})


def record(seq: int = 0, module: str = "fc1", **changes: Any) -> Record:
    key = {"step": 0, "micro": 0, "phase": "forward", "module": module, "call": 0, "kind": "output", "path": "0"}
    key |= {name: changes.pop(name) for name in list(changes) if name in key}
    numbers = {name: changes.pop(name) for name in list(changes) if name in {field.name for field in fields(Summary)}}
    values: dict[str, Any] = {"rank": 0, "cls": "Linear", "dtype": "float32", "shape": (3, 4), "tensor": seq}
    return Record(key=Key(**key), seq=seq, summary=summary(**numbers), **{**values, **changes})


def facts(**changes: Any) -> RunFacts:
    environment = {"versions": {"torch": "2.5.0", "cuda": None}, "devices": ["X1", "X1"], "python": "3.12.1"}
    info = {"framework": "torch", "model": "Net", "modules": 3, "world": 1, "started": "2025-03-01T14:05:59+00:00"}
    values: dict[str, Any] = {
        "path": "runs/a",
        "info": {**info, "environment": {**environment, "platform": "Linux-6.1-x86_64"}},
        "finished": True,
        "steps": [0, 1],
        "ranks": [0],
        "records": 10,
        "tensors": 7,
        "kept": 0,
        "bytes_on_disk": 123_456,
        "coverage": {0: [Coverage("", "Net", "seen", 2), Coverage("fc1", "Linear", "seen", 2)]},
    }
    return RunFacts(**{**values, **changes})
