"""Chrome traces with exact numbers, as torch's profiler would export them. Times are in microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tensortap.times import TimeLedger, attribute, read_profile
from tensortap.times.marks import AFTER, BEFORE, CALIBRATION, IDLE

MAIN, ENGINE = 100, 200
"""Threads."""


class Trace:
    """Collects events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def span(self, name: str, start: float, end: float, tid: int = MAIN, cat: str = "cpu_op", **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start}
        self.events.append({**event, "args": args} if args else event)

    def module(self, label: str, start: float, end: float, tid: int = MAIN, mark: float = 1.0) -> None:
        """`forward layers.0 (Block)` with its marks, each `mark` long and `mark` away from the span."""
        self.span(BEFORE, start - 2 * mark, start - mark, tid)
        self.span(label, start, end, tid, "user_annotation")
        self.span(AFTER, end + mark, end + 2 * mark, tid)

    def backward(self, labels: list[str], start: float, end: float, tid: int = MAIN) -> None:
        """The spans around one graph node from the outermost module to the innermost, one microsecond apart."""
        self.span(BEFORE, start - 2, start - 1, tid)
        for depth, label in enumerate(labels):
            self.span(f"backward {label}", start + depth, end - depth, tid, "user_annotation")
        self.span(AFTER, end + 1, end + 2, tid)

    def node(self, name: str, start: float, end: float, tid: int = MAIN) -> None:
        self.span(f"autograd::engine::evaluate_function: {name}", start, end, tid)

    def calibration(self, start: float, calls: int = 4, outside: float = 2.0, inside: float = 4.0) -> float:
        """Calls of a module that does nothing; returns when it is over."""
        at = start + 1
        for _ in range(calls):
            self.span(BEFORE, at, at + 1)
            self.span(IDLE, at + 2, at + 2 + inside, cat="user_annotation")
            self.span(AFTER, at + 3 + inside, at + 4 + inside)
            at += 4 + inside + outside
        self.span(CALIBRATION, start, at)
        return at

    def launch(self, correlation: int, at: float, tid: int = MAIN, name: str = "cudaLaunchKernel") -> None:
        self.span(name, at, at + 0.5, tid, "cuda_runtime", correlation=correlation)

    def kernel(self, correlation: int | None, start: float, length: float, stream: int = 7, **args: Any) -> None:
        numbers = {} if correlation is None else {"correlation": correlation}
        self.events.append(
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": stream, "ts": start, "dur": length}
            | {"args": {"device": 0, "stream": stream, **numbers, **args}}
        )

    def memory(self, at: float, size: int, tid: int = MAIN, on_device: bool = False) -> None:
        args = {"Bytes": size, "Device Type": int(on_device), "Device Id": 0}
        self.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": tid, "ts": at}
            | {"args": args}
        )

    def text(self) -> str:
        return json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": self.events})

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    def ledger(self, folder: Path) -> TimeLedger:
        return attribute(read_profile(self.write(folder / "trace.json")))


def own(ledger: TimeLedger) -> dict[tuple[str, str], float]:
    """Own host time in microseconds by module and phase, where there is any."""
    usage = ledger.usage_by(lambda place: (place.module, place.phase))
    return {name: round(each.own, 3) for name, each in usage.items() if round(each.own, 3)}


def total(ledger: TimeLedger) -> dict[tuple[str, str], float]:
    usage = ledger.usage_by(lambda place: (place.module, place.phase))
    return {name: round(each.total, 3) for name, each in usage.items() if round(each.total, 3)}


def device_own(ledger: TimeLedger) -> dict[tuple[str, str], float]:
    usage = ledger.usage_by(lambda place: (place.module, place.phase))
    return {name: round(each.device_own, 3) for name, each in usage.items() if each.device_own}
