"""The health of a single run as one JSON object.

    format      "tensortap-health"
    schema      1; increases when a key changes its meaning or is removed, not when a key is added
    path        of the run
    verdict     "healthy", "suspicious" or "empty"
    sentence    the answer in words
    findings    where something suspicious first shows, in execution order, each with
                step, micro, phase, module, call, kind, path   the record's identity
                rank, cls, row                                 of which rank and class, and its row among the records
                status                                         nonfinite | exploding | dead | vanishing
                text                                           what it is, in words
    counts      records by status, "ok" among them
    records     number of records that were examined
    policy      what counts as suspicious, in words
    notes       lines that accompany the verdict

The root module's name is the empty string.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

from tensortap.core.records import HealthFinding, HealthReport
from tensortap.report.files.output import encoded
from tensortap.report.plain import plain

__all__ = ["SCHEMA_VERSION", "health_object", "write"]

SCHEMA_VERSION = 1


def write(report: HealthReport, file: BinaryIO) -> None:
    file.writelines(encoded([json.dumps(plain(health_object(report)), indent=2, allow_nan=False), "\n"]))


def health_object(report: HealthReport) -> dict[str, Any]:
    return {
        "format": "tensortap-health",
        "schema": SCHEMA_VERSION,
        "path": report.path,
        "verdict": report.verdict,
        "sentence": report.sentence,
        "findings": [_finding_object(finding) for finding in report.births],
        "counts": dict(report.counts),
        "records": len(report),
        "policy": report.policy,
        "notes": list(report.notes),
    }


def _finding_object(finding: HealthFinding) -> dict[str, Any]:
    return {
        **finding.key._asdict(),
        "rank": finding.rank,
        "cls": finding.cls,
        "row": finding.row,
        "status": finding.status,
        "text": finding.text,
    }
