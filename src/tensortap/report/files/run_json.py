"""A run as one JSON object.

    format      "tensortap-show"
    version     1; increases when a key changes its meaning or is removed, not when a key is added
    run         path, framework, model, started, finished, world, ranks, steps, records, tensors (distinct ones),
                kept (records whose bytes are on disk), bytes_on_disk, config, environment, notices
    coverage    modules: rank, module, class, status, calls, reason of each; counts: how many of them have each status
    loop        only with --loop: each change of a loop fact with its rank, as in a run's loop.jsonl
    matching    how many records pass the filters
    records     the selected records, each with
                step, micro, phase, module, call, kind, path   what it is, the same in every run
                rank, seq, class, dtype, shape, tensor         where, when, of what
                elements, nan, posinf, neginf, zeros, edge     counts
                min, max, mean, std, l1, l2                    over the finite elements
                digest                                         16 hexadecimal digits: JSON's numbers end at 53 bits
                                                               a registered statistic has its own key
                location                                       file, offset and nbytes, or null if not kept
                placement                                      where in the whole its elements sit, as in a run's
                                                               placements.jsonl; null for a whole, or if unknown
                arguments                                      plain arguments of its call by path, as in a run's
                                                               calls.jsonl; null without a call, or if unknown
                sketch                                         a list of numbers; only with --sketch

JSON has neither NaN nor infinities: such a number is null. A null `min` means that no element is finite.
The root module's name is the empty string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensortap.core import statistics
from tensortap.core.arguments import as_json
from tensortap.core.records import Record
from tensortap.report.facts import RunFacts
from tensortap.report.plain import plain

__all__ = ["coverage_object", "record_object", "run_object", "text"]

Arguments = Mapping[str, Any] | None


def text(
    facts: RunFacts,
    records: Iterable[Record],
    matching: int,
    sketch: bool = False,
    arguments: Callable[[Record], Arguments] = lambda record: None,
    loop: Sequence[Mapping[str, Any]] | None = None,
) -> Iterator[str]:
    """Yield the object in pieces, one record per line; the records need not be in memory together."""
    head = {"format": "tensortap-show", "version": 1, "run": run_object(facts), "coverage": coverage_object(facts)}
    if loop is not None:
        head["loop"] = list(loop)
    yield json.dumps({**head, "matching": matching}, indent=2, allow_nan=False)[:-2]
    yield ',\n  "records": ['
    for place, record in enumerate(records):
        yield ",\n    " if place else "\n    "
        yield json.dumps(record_object(record, sketch, arguments(record)), allow_nan=False)
    yield "\n  ]\n}\n"


def run_object(facts: RunFacts) -> dict[str, Any]:
    info = facts.info
    known = {key: plain(info.get(key)) for key in ("framework", "model", "started", "world", "config", "environment")}
    return {
        "path": facts.path,
        **known,
        "finished": facts.finished,
        "ranks": list(facts.ranks),
        "steps": list(facts.steps),
        "records": facts.records,
        "tensors": facts.tensors,
        "kept": facts.kept,
        "bytes_on_disk": facts.bytes_on_disk,
        "notices": list(facts.notices),
    }


def coverage_object(facts: RunFacts) -> dict[str, Any]:
    modules = [{"rank": rank, **row.as_dict()} for rank, rows in facts.coverage.items() for row in rows]
    counts: dict[str, int] = {}
    for module in modules:
        counts[module["status"]] = counts.get(module["status"], 0) + 1
    return {"counts": counts, "modules": modules}


def record_object(record: Record, sketch: bool = False, arguments: Arguments = None) -> dict[str, Any]:
    summary = record.summary
    value = {
        **record.key._asdict(),
        "rank": record.rank,
        "seq": record.seq,
        "class": record.cls,
        "dtype": record.dtype,
        "shape": list(record.shape),
        "tensor": record.tensor,
        **{each.name: _written(each, summary[each.name]) for each in statistics.stored()},
        "placement": None if record.placement is None else record.placement.as_dict(),
        "location": None if record.location is None else record.location._asdict(),
        "arguments": None if arguments is None else {path: as_json(value) for path, value in arguments.items()},
    }
    if sketch:
        value["sketch"] = [plain(float(x)) for x in summary.sketch]
    return value


def _written(statistic: statistics.Statistic, value: Any) -> Any:
    return f"{value:016x}" if statistic.show.form == "digest" else plain(value)
