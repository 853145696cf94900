"""The formats that a comparison is written in, by the option that asks for one and by the suffix of the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from tensortap.core.records import Comparison
from tensortap.errors import UsageError
from tensortap.report.files import output

__all__ = ["SUFFIXES", "save_comparison", "write_comparison"]

_WRITERS = {
    "csv": "tensortap.report.files.comparison_csv",
    "html": "tensortap.report.html.comparison",
    "json": "tensortap.report.files.comparison_json",
    "junit": "tensortap.report.files.comparison_junit",
    "markdown": "tensortap.report.files.comparison_markdown",
    "parquet": "tensortap.report.files.comparison_parquet",
}
"""Modules with a `write(comparison, file)`. Each is imported when it is needed: some load pyarrow's file formats."""

SUFFIXES = {
    ".csv": "csv",
    ".html": "html",
    ".json": "json",
    ".md": "markdown",
    ".parquet": "parquet",
    ".xml": "junit",
}


def save_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write `comparison` in the format that the suffix of `path` names, and return the path."""
    target = Path(path)
    format = SUFFIXES.get(target.suffix.lower())
    if format is None:
        *others, last = SUFFIXES
        raise UsageError(
            f"{target}: the suffix selects the format, and "
            f"{f'{target.suffix} is not one of them' if target.suffix else 'this path has none'}; "
            f"use {', '.join(others)} or {last}"
        )
    output.check(target)
    write_comparison(comparison, format, target)
    return target


def write_comparison(comparison: Comparison, format: str, path: str | Path) -> None:
    """Write `comparison` to a file that appears when it is complete, or to stdout if `path` is "-"."""
    write: Callable[[Comparison, BinaryIO], None] = import_module(_WRITERS[format]).write
    with output.opened(path) as file:
        write(comparison, file)
