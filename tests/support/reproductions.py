"""Runs the script of a reproduction, and reads what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tensortap.core.records import Comparison


def run_script(folder: Path) -> dict[str, float]:
    """The relative errors it prints. tensortap cannot be imported there."""
    code = "import sys, runpy; sys.modules['tensortap'] = None; sys.path.insert(0, '.'); runpy.run_path('repro.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    found = [re.fullmatch(r"(.+?) +relative error (\S+), greatest difference (\S+)", line) for line in lines]
    assert all(found), lines
    return {match[1]: float(match[2]) for match in found if match}


def errors(result: Comparison, module: str) -> dict[str, float]:
    """The same errors from the comparison: the module's own results, and all parameter gradients."""
    found = {}
    for row in result.rows:
        inside = row["module"][len(module) :].lstrip(".")
        if row["kind"] == "param_grad":
            found[f"param_grad {inside}.{row['path']}".replace(" .", " ")] = row["rel_l2"]
        elif row["kind"] in ("output", "grad_input") and not inside:
            found[f"{row['kind']} {row['path']}"] = row["rel_l2"]
    return found
