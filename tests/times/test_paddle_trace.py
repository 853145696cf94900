"""Traces in paddle's format: lengths in names, two lanes per thread, exact times as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.traces import device_own, own, total
from tensortap.times import attribute, read_profile
from tensortap.times.marks import AFTER, BEFORE
from tensortap.times.table import make_table

ORIGIN = 1_794_854_462_183_581


def event(name: str, start: float, end: float, cat: str = "PythonUserDefined", **more: Any) -> dict[str, Any]:
    lane = "Python" if cat in ("PythonUserDefined", "Backward", "Optimization", "ProfileStep") else "C++"
    args = {"start_time": f"{start:.3f} us", "end_time": f"{end:.3f} us", **more}
    length = f"{end - start:.3f} us"
    return {"name": f"{name}[{length}]", "pid": 9, "tid": f"9({lane})", "ph": "X", "cat": cat} | {
        "ts": ORIGIN + int(start),
        "dur": end - start,
        "args": args,
    }


def kernel(correlation: int, start: float, length: float) -> dict[str, Any]:
    made = event("gemm", start, start + length, "Kernel", device=0, stream=7, **{"correlation id": correlation})
    return made | {"pid": 0, "tid": 7}


def launch(correlation: int, at: float) -> dict[str, Any]:
    return event("cudaLaunchKernel", at, at + 1, "CudaRuntime", **{"correlation id": correlation})


def module(label: str, start: float, end: float) -> list[dict[str, Any]]:
    return [event(BEFORE, start - 2, start - 1), event(label, start, end), event(AFTER, end + 1, end + 2)]


def memory(at: float, size: int, place: str = "ModulePhase(gpu:0)") -> dict[str, Any]:
    sort = "Allocate" if size > 0 else "Free"
    args = {"place": place, "increase_bytes": size}
    return {"name": "[memory]", "pid": 9, "tid": "9(C++)", "ts": ORIGIN + int(at), "ph": "i", "cat": sort, "args": args}


EVENTS = [
    event("ProfileStep#0", 0, 400, "ProfileStep"),
    *module("forward (root) (Net)", 10, 110),
    *module("forward fc (Linear)", 30.25, 60.5),
    event("matmul node_creation", 40, 41, "OperatorInner"),
    launch(1, 45),
    event("Gradient Backward", 150, 300, "Backward"),
    event("Global_SumGradNode", 160, 170, "Operator"),
    event("Global_MatmulGradNode", 180, 280, "Operator"),
    event("backward begins (root) (Net)", 190, 191),
    event("backward begins fc (Linear)", 192, 193),
    launch(2, 200),
    event("Global_GradNodeAccumulation", 285, 290, "Operator"),
    event("Optimization Step", 320, 340, "Optimization"),
    launch(3, 330),
    kernel(1, 500, 10),
    kernel(2, 520, 20),
    kernel(3, 550, 5),
    memory(50, 4096),
    memory(210, -1024),
    memory(215, 77, "ModulePhase(cpu)"),
]


def test_a_trace_with_kernels(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": "1.0.2", "traceEvents": [*EVENTS, {}], "ExtraInfo": {}}))
    ledger = attribute(read_profile(path))
    assert ledger.framework == "paddle" and ledger.steps == 1
    assert own(ledger) == {
        ("(root)", "forward"): 100 - 30.25 - 4,
        ("fc", "forward"): 30.25,
        ("fc", "backward"): 100 - 2,
        ("(AccumulateGrad)", "backward"): 5,
        ("(no module)", "backward"): 150 - 100 - 5,
        ("(optimizer)", "other"): 20,
        ("(annotating)", "other"): 8 + 2,
        ("(no module)", "other"): 400 - 104 - 150 - 20,
    }
    assert sum(own(ledger).values()) == ledger.span / 1000 == 400
    assert total(ledger)["(root)", "backward"] == 98
    assert device_own(ledger) == {
        ("fc", "forward"): 10,
        ("fc", "backward"): 20,
        ("(optimizer)", "other"): 5,
    }
    rows = {(row.module, row.phase): row for row in make_table(ledger).rows}
    assert rows["fc", "forward"].device_memory == 4096
    assert (rows["fc", "backward"].device_memory, rows["fc", "backward"].memory) == (-1024, 77)
