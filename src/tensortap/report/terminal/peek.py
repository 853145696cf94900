"""A tensor in two or three short lines, for a training run that prints as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.text import Text

from tensortap.core.records import Summary, display_name
from tensortap.report.wording import clean, count, dtype, middle, number, shape, wrap

__all__ = ["about_call", "about_tensor", "notice", "remark"]

_ROWS, _COLUMNS = 2, 6


def about_call(module: str, cls: str, call: int, times: int, phase: str, width: int) -> Text:
    """Return the heading of a module's tensors."""
    rest = f" · {clean(cls)} · call {call} of {times} · {phase}"
    return Text.assemble((middle(clean(display_name(module)), max(8, width - cell_len(rest))), "bold"), rest)


def about_tensor(
    label: str,
    kind_of: str,
    dtype_name: str,
    summary: Summary,
    array: npt.NDArray[Any],
    width: int,
) -> list[Text]:
    """Describe type and range, non-finite elements, and the first elements."""
    label = clean(label)
    head = Text.assemble("  ", (label.ljust(14), "cyan"), f" {clean(kind_of)} {dtype(dtype_name)} {shape(array.shape)}")
    if summary.finite:
        ends = (str(int(end)) if array.dtype.kind in "iub" else number(end) for end in (summary.min, summary.max))
        numbers = "min {}  max {}  mean {}".format(*ends, number(summary.mean))
    else:
        numbers = "no elements" if not summary.elements else "nothing finite"
    bad = _nonfinite(summary)
    lines = [head]
    if cell_len(head.plain) + 3 + cell_len(numbers) + cell_len(bad) <= width:
        head.append("   " + numbers)
    else:
        lines.append(Text(" " * 17 + numbers))
    if bad:
        lines[-1].append("  " + bad, "bold red")
    lines += [Text(" " * 17 + row, "dim") for row in _corner(array, width - 17)]
    for line in lines:
        line.truncate(width)
    return lines


def remark(module: str, text: str, width: int) -> list[Text]:
    """Return a remark about a module as lines."""
    return notice(f"{display_name(module)}: {text}", width)


def notice(text: str, width: int) -> list[Text]:
    """Return a notice as lines."""
    return [Text(line, "yellow") for line in wrap(f"! {clean(text)}", width)]


def _nonfinite(summary: Summary) -> str:
    parts = [("nan", summary.nan), ("+inf", summary.posinf), ("-inf", summary.neginf)]
    return " ".join(f"{count(n)} {name}" for name, n in parts if n)


def _corner(array: npt.NDArray[Any], room: int) -> list[str]:
    """Return the first elements of the first rows of the last two dimensions."""
    if not array.size:
        return []
    last = array
    while last.ndim > 2:
        last = last[0]
    rows = np.atleast_2d(last)
    columns = max(1, min(_COLUMNS, (room - 5) // 11))
    shown_rows = [[_value(value) for value in row[:columns]] for row in rows[:_ROWS]]
    more = rows.shape[1] > columns
    lines = [_row(cells, more) for cells in shown_rows]
    if rows.shape[0] > _ROWS or array.ndim > 2:
        lines[-1] += " …"
    return lines


def _row(cells: Sequence[str], more: bool) -> str:
    return "[" + " ".join(cell.rjust(10) for cell in cells) + (" …]" if more else "]")


def _value(value: Any) -> str:
    if isinstance(value, np.bool_):
        return str(bool(value))
    if np.issubdtype(type(value), np.integer):
        return str(int(value))
    if np.issubdtype(type(value), np.complexfloating):
        return f"{number(float(value.real))}{'+' if value.imag >= 0 else '-'}{number(abs(float(value.imag)))}j"
    as_float = float(value)
    return "nan" if as_float != as_float else number(as_float)
