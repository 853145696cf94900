"""Times by module as one JSON object. docs/profiler.md documents the keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

from tensortap.report.files.output import encoded
from tensortap.report.plain import plain

__all__ = ["write"]


def write(facts: Mapping[str, Any], file: BinaryIO) -> None:
    """Write the facts of one profile, or of two that are compared; each row is a line."""
    rows = ",\n".join(f"    {json.dumps(plain(row))}" for row in facts["rows"])
    rest = {key: plain(value) for key, value in facts.items() if key != "rows"}
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in rest.items()]
    file.writelines(encoded(["{\n", ",\n".join([*lines, f'  "rows": [\n{rows}\n  ]']), "\n}\n"]))
