"""Numbers, sizes, shapes and names as people read them. Stored data is exact; only this module rounds."""

from __future__ import annotations

import math
import os
import shlex
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import pairwise

from rich.cells import cell_len, chop_cells, set_cell_size

from tensortap.core.records import GRADIENT_KINDS, display_name

__all__ = [
    "apart",
    "born_in",
    "clean",
    "command_line",
    "count",
    "dtype",
    "middle",
    "nbytes",
    "number",
    "numbers_in_short",
    "percent",
    "plural",
    "rough",
    "shape",
    "when",
    "wrap",
]

_SHORT_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "complex64": "c64",
    "complex128": "c128",
}


def number(value: float) -> str:
    """Return four significant digits, or a dash for NaN.

    >>> [number(x) for x in (0.0, 0.5, -12.3456, 98765.4, 1.23456e-7)]
    ['0', '0.5000', '-12.35', '98765', '1.235e-7']
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if not value:
        return "0"
    digits, exponent = f"{value:.3e}".split("e")
    power = int(exponent)
    if -4 <= power < 4:
        return f"{value:.{3 - power}f}"
    return f"{value:.0f}" if power == 4 else f"{digits}e{power}"


def rough(value: float) -> str:
    """Return two significant digits: the size of an error is enough.

    >>> [rough(x) for x in (0.0, 0.25, 0.0125, 0.0041, 3.2e-6, 17.3, 1234.0)]
    ['0', '0.25', '0.013', '4.1e-3', '3.2e-6', '17', '1.2e3']
    """
    if math.isnan(value) or math.isinf(value) or not value:
        return number(value)
    digits, exponent = f"{value:.1e}".split("e")
    power = int(exponent)
    return f"{float(f'{value:.1e}'):.{max(0, 1 - power)}f}" if -2 <= power < 3 else f"{digits}e{power}"


def apart(left: float, right: float) -> tuple[str, str]:
    """Return two numbers with enough digits to distinguish them, four at least.

    >>> apart(1.262, 1.25), apart(1.250011, 1.25)
    (('1.262', '1.25'), ('1.25001', '1.25'))
    """
    for digits in range(4, 18):
        texts = f"{left:.{digits}g}", f"{right:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def percent(share: float) -> str:
    """
    >>> [percent(x) for x in (0.0, 0.00001, 0.063, 0.9999, 1.0)]
    ['0%', '<0.1%', '6.3%', '99.9%', '100%']
    """
    if share in (0, 1):
        return f"{100 * share:.0f}%"
    return f"{min(100 * share, 99.9):.1f}%" if share >= 0.0005 else "<0.1%"


def count(value: int) -> str:
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """
    >>> plural(1, "rank"), plural(2048, "record")
    ('1 rank', '2,048 records')
    """
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def nbytes(value: int) -> str:
    """
    >>> nbytes(999), nbytes(1_500), nbytes(7_340_000_000)
    ('999 B', '1.50 kB', '7.34 GB')
    """
    if value < 1000:
        return f"{value} B"
    power = min(4, int(math.log10(value * 1.0005)) // 3)  # 999,600 is 1.00 MB, not 1000 kB
    size, unit = value / 1000**power, ("", "kB", "MB", "GB", "TB")[power]
    return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"


def shape(sizes: Sequence[int]) -> str:
    """
    >>> shape((8, 256, 512)), shape(())
    ('8×256×512', 'scalar')
    """
    return "×".join(str(size) for size in sizes) or "scalar"


def dtype(name: str) -> str:
    """
    >>> dtype("bfloat16"), dtype("int64"), dtype("uint8"), dtype("bool")
    ('bf16', 'i64', 'u8', 'bool')
    """
    for long, short in (("uint", "u"), ("int", "i")):
        if name.startswith(long) and name[len(long) :].isdigit():
            return short + name[len(long) :]
    return _SHORT_DTYPES.get(name, name)


def numbers_in_short(values: Sequence[int]) -> str:
    """Return ascending numbers as a range, or as a stride if they are regular.

    >>> numbers_in_short([0, 1, 2, 3]), numbers_in_short([0, 10, 20, 30]), numbers_in_short([1, 5])
    ('0–3', '0, 10 … 30', '1, 5')
    """
    if not values:
        return "none"
    strides = {right - left for left, right in pairwise(values)}
    if len(values) > 2 and len(strides) == 1:
        return f"{values[0]}–{values[-1]}" if strides == {1} else f"{values[0]}, {values[1]} … {values[-1]}"
    if len(values) <= 4:
        return ", ".join(map(str, values))
    return f"between {values[0]} and {values[-1]}"


def when(iso: object) -> str:
    """Return an ISO time to the minute, in UTC; return other text unchanged.

    >>> when("2025-03-01T14:05:59+01:00")
    '2025-03-01 13:05 UTC'
    """
    try:
        moment = datetime.fromisoformat(str(iso))
    except ValueError:
        return str(iso)
    if moment.tzinfo is None:
        return f"{moment:%Y-%m-%d %H:%M}"
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


def clean(text: object) -> str:
    """Return one line without control characters: each unprintable character becomes an escape sequence.

    >>> clean("fc1" + chr(10) + chr(27) + "[2J")
    'fc1\\\\n\\\\x1b[2J'
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain)


def born_in(container: str, module: str, kind: str) -> str:
    """Where a value of `module` was born that is due to `container`. Only a module that calls others has code between
    them: one that was given the value alone is at fault as a whole, as a ReLU is.

    >>> born_in("block", "block.fc", "input")
    'in the code of block, between the modules it calls'
    >>> born_in("block", "block.fc", "grad_output")
    'in the backward of the code of block, between the modules it calls'
    >>> born_in("block.relu", "block.fc", "grad_output")
    'in the backward of block.relu'
    """
    around = not container or module.startswith(f"{container}.")
    backward = "backward of " * (kind in GRADIENT_KINDS)
    if kind == "input" or (around and kind != "param_grad"):
        the = "the " * bool(backward)
        return f"in the {backward}{the}code of {clean(display_name(container))}, between the modules it calls"
    return f"in {'the ' * bool(backward)}{backward}{clean(display_name(container))}"


def command_line(words: Sequence[str]) -> str:
    """Quote words for a shell, on one line without control characters; an unprintable word uses bash's $'…'.

    >>> command_line(["show", "a b", "it's" + chr(10)])
    "show 'a b' $'it\\\\'s\\\\x0a'"
    """
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_spelled(word)}'" for word in words)


def _spelled(word: str) -> str:
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return "".join(c if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(c)) for c in quoted)


def middle(text: str, width: int) -> str:
    """Shorten to `width` terminal cells in the middle: the end of a module's name matters most.

    A dotted name keeps as many whole parts of its end as fit, so that the layer's number survives; of its beginning it
    keeps the first part or nothing.

    >>> middle("model.layers.11.self_attn.q_proj", 28), middle("model.layers.11.self_attn.q_proj", 24)
    ('…layers.11.self_attn.q_proj', '…11.self_attn.q_proj')
    >>> middle("model.layers.11.self_attn.q_proj", 26), middle("a_name_without_any_dots", 16)
    ('model.…11.self_attn.q_proj', 'a_nam…t_any_dots')
    """
    if cell_len(text) <= width:
        return text
    if width < 2:
        return set_cell_size(text, width)
    cuts = [at + 1 for at, letter in enumerate(text) if letter == "."]
    fits = bisect_left(
        cuts, True, key=lambda at: cell_len(text[at:]) < width
    )  # tails get shorter: a deep name is quick
    whole = cuts[fits] if fits < len(cuts) else len(text)
    if cell_len(text[whole:]):
        head = width - 1 - cell_len(text[whole:])
        return (set_cell_size(text, head) if cuts[0] <= head else "") + "…" + text[whole:]
    head = (width - 1) // 3
    tail = text[-(width - 1 - head) :]
    while cell_len(tail) > width - 1 - head:  # wide characters take two cells
        tail = tail[1:]
    return set_cell_size(text, head) + "…" + tail


def wrap(text: str, width: int | None) -> list[str]:
    """Return lines of at most `width` terminal cells, broken between words if possible; one line without a width.

    >>> wrap("unused, or its parent reads its weights", 20)
    ['unused, or its', 'parent reads its', 'weights']
    """
    if width is None:
        return [text]
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if cell_len(longer) <= width:
            lines[-1] = longer
            continue
        pieces = chop_cells(word, width)
        lines = [*lines, *pieces] if lines[-1] else pieces
    return lines
