"""A comparison as one JSON object.

    format      "tensortap-compare"
    schema      1; increases when a key changes its meaning or is removed, not when a key is added
    reference, candidate   the names that were compared
    verdict     "match", "imprecise", "diverged" or "incomparable"
    sentence    the verdict in words
    first       the first divergence, or null:
                step, micro, phase, module, call, kind, path   what it is; module is the record's own
                container       the module in whose own code the value was born, if it appeared between two modules
                counterpart     the candidate's name of the module at fault, if it differs
                rank, cls, status                              status is diverged | nonfinite | shape, or, of a gradient
                                                               that only one side has, missing | extra; recomputed;
                                                               replica; layout; imprecise
                                                               if it is within tolerance, and less exact
                cause           the code that made it wrong, one of the values of `core.causes.Cause`: output,
                                container_code, optimizer, missing_gradient, ...
                inputs_matched, inputs_rel_l2                  whether the inputs were still right (null: not recorded,
                                                               or none of them could be judged)
                unjudged        its sources that could not be judged: the seven keys of each
                tolerance, row_tolerance, rule                 the tolerance, that of one row, and the rule
                arguments       plain arguments in which the call of the module at fault differs: path, reference and
                                candidate of each, as in a run's calls.jsonl; or {"tensor": ..}, {"absent": ..}
                layout          null, or the role of the ranks of a parallel run in it: axis, ranks, count, residual
                truth           null, or how far both sides are from a truth: of, reference, candidate, roundings, exact
                operator        null, or the first operator of the module that differs: reference and candidate (name
                                and line), rel_l2, missing and added (operators right before it of one side alone)
                elements, equal, exact, rel_l2, rel_l2_bar, cosine, l2, max_abs, max_abs_index, reference_value,
                candidate_value, max_ulp, mismatched, row_rel_l2, row_index
                                                               the difference; null where it was not measured
    births      every place where a wrong value was born, each like `first`, in execution order
    counts      pairs by status (equal, close, diverged, nonfinite, shape, unjudged), and unmatched
    unpaired_ranks   selected ranks without a counterpart, under "reference" and "candidate"; unless a divergence is
                found elsewhere, they make the verdict "incomparable"
    unmatched   records of one side alone: side, rank, cls, the seven keys of their identity, and why, if known
    policy      the tolerance in words
    notes       lines that accompany the verdict
    mapping     null, or where names and layouts were mapped: modules, tensors and values (reference, candidate, how,
                change), left and ignored (side, name, why), and unused rules
    info        run.json of both sides, under "reference" and "candidate"
    isolated    whether every module got the reference's own inputs, so that each birth is independent
    zoom        null, or the result of `zoom=`: verdict, sentence, line, reference_line, operators
    rows        every pair in execution order, one per line, with all columns of the table

JSON has neither NaN nor infinities: such a number is null, and so is one that was not measured. The counts
nan_reference, nan_candidate, inf_reference and inf_candidate show whether a tensor holds NaN or Inf.
The root module's name is the empty string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from tensortap.core.records import Comparison, Unmatched
from tensortap.report.files.output import encoded
from tensortap.report.findings import finding_object
from tensortap.report.plain import plain

__all__ = ["SCHEMA_VERSION", "head_object", "text", "write"]

SCHEMA_VERSION = 1
_CHUNK = 2048


def write(comparison: Comparison, file: BinaryIO) -> None:
    file.writelines(encoded(text(comparison)))


def text(comparison: Comparison) -> Iterator[str]:
    """Yield the object in pieces; the rows are never in memory together."""
    yield json.dumps(plain(head_object(comparison)), indent=2, allow_nan=False)[:-2]
    yield ',\n  "unmatched": ['
    for at, each in enumerate(comparison.unmatched):
        yield (",\n    " if at else "\n    ") + json.dumps(_unmatched(each))
    yield '\n  ],\n  "rows": ['
    start = "\n    "
    for batch in comparison.table.to_batches(max_chunksize=_CHUNK):
        for row in _finite(batch).to_pylist():
            yield start + json.dumps(row, allow_nan=False)
            start = ",\n    "
    yield "\n  ]\n}\n"


def head_object(comparison: Comparison) -> dict[str, Any]:
    """Return the object without its long lists."""
    return {
        "format": "tensortap-compare",
        "schema": SCHEMA_VERSION,
        "reference": comparison.reference,
        "candidate": comparison.candidate,
        "verdict": comparison.verdict,
        "sentence": comparison.sentence,
        "first": None if comparison.first is None else finding_object(comparison.first),
        "births": [finding_object(birth) for birth in comparison.births],
        "counts": dict(comparison.counts),
        "unpaired_ranks": {side: list(ranks) for side, ranks in comparison.unpaired_ranks.items()},
        "policy": comparison.policy,
        "notes": list(comparison.notes),
        "mapping": None if comparison.mapping is None else comparison.mapping.as_dict(),
        "info": dict(comparison.info),
        "isolated": comparison.isolated,
        "zoom": None if comparison.zoom is None else comparison.zoom.as_dict(),
    }


def _unmatched(each: Unmatched) -> dict[str, Any]:
    return {"side": each.side, **each.key._asdict(), "rank": each.rank, "cls": each.cls, "why": each.why}


def _finite(batch: Any) -> Any:
    """Replace NaN and infinities with null; by column, which is much faster than by row."""
    columns = [
        pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
        if pa.types.is_floating(column.type)
        else column
        for column in batch.columns
    ]
    return pa.record_batch(columns, names=batch.schema.names)
