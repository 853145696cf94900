"""Times as CSV: names cannot be formulas."""

from __future__ import annotations

import csv
import io

from tensortap.report.files import times_csv


def test_no_name_is_a_formula() -> None:
    file = io.BytesIO()
    times_csv.write({"rows": [{"module": "=1+1", "class": "@a", "cpu_own": -1.5, "ratio": None}]}, file)
    (row,) = csv.DictReader(io.StringIO(file.getvalue().decode()))
    assert row == {"module": "'=1+1", "class": "'@a", "cpu_own": "-1.5", "ratio": ""}
