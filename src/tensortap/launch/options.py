"""The options of `capture` that a launch takes, as text or as values of a TOML file.

One table, from which the command line, the environment variables and the keys of tensortap.toml follow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensortap.errors import UsageError

__all__ = ["CAPTURE_OPTIONS", "CaptureOption", "NumberRanges", "parse_all", "variable"]


@dataclass(frozen=True, slots=True)
class NumberRanges:
    """A container of the numbers of several ranges."""

    text: str
    ranges: tuple[range, ...]

    def __contains__(self, number: object) -> bool:
        return any(number in each for each in self.ranges)

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class CaptureOption:
    """One option of `capture`."""

    name: str
    parse: Callable[[str], Any]
    """Turns text into the value that `capture` takes. Raise ValueError with what is expected."""
    metavar: str
    help: str

    @property
    def is_flag(self) -> bool:
        return self.parse is parse_flag


def variable(name: str) -> str:
    """Return the environment variable of an option."""
    return f"TENSORTAP_{name.upper()}"


def parse_all(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as `capture` takes them. Values are text, or of the types that a TOML file has."""
    return {option.name: _parse(option, raw[option.name]) for option in CAPTURE_OPTIONS if option.name in raw}


def _parse(option: CaptureOption, value: Any) -> Any:
    if isinstance(value, list):  # of a TOML file
        value = ",".join(map(str, value))
    elif isinstance(value, Mapping):
        value = ",".join(f"{pattern}={kept}" for pattern, kept in value.items())
    elif isinstance(value, bool):
        value = "1" if value else "0"
    try:
        return option.parse(str(value))
    except ValueError as error:
        raise UsageError(f"{option.name}: {value!r} is not {error}") from None


# --- values ------------------------------------------------------------------------------------------------------
def parse_flag(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError("true or false")
    return known[text.lower()]


def _parse_names(text: str) -> tuple[str, ...]:
    if not (names := tuple(part.strip() for part in text.split(",") if part.strip())):
        raise ValueError("a name, or several with commas between them")
    return names


def _parse_keep(text: str) -> str | dict[str, str]:
    if "=" not in text:
        return text
    pairs = [part.rpartition("=") for part in _parse_names(text)]
    return {pattern: kept for pattern, _, kept in pairs}


def _parse_numbers(text: str) -> NumberRanges:
    return NumberRanges(text, tuple(_parse_range(part) for part in _parse_names(text)))


def _parse_range(text: str) -> range:
    """Parse "3", "10-20", "10-20/5" or "*/100"."""
    span, slash, every = text.partition("/")
    first, dash, last = ("0", "-", str(sys.maxsize - 1)) if span == "*" else span.partition("-")
    numbers = [first, *([last] if dash else []), *([every] if slash else [])]
    if not all(number.isdecimal() for number in numbers) or (slash and int(every) == 0):
        raise ValueError("numbers, like 3, 0,5, 10-20, 0-100/10 or */100")
    return range(int(first), (int(last) if dash else int(first)) + 1, int(every) if slash else 1)


def _parse_share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number, like 0.02") from None


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a whole number")
    return int(text)


CAPTURE_OPTIONS = (
    CaptureOption("keep", _parse_keep, "KEEP", "summary, tensors, ring, or PATTERN=KEEP,...; the first match decides."),
    CaptureOption("kinds", _parse_names, "KIND,...", "Kinds of records: input, output, grad_output, param_grad, ..."),
    CaptureOption("modules", _parse_names, "PATTERN,...", "Tap modules whose name matches, like layers.*.attn."),
    CaptureOption("classes", _parse_names, "CLASS,...", "Tap modules of these classes."),
    CaptureOption("steps", _parse_numbers, "STEPS", "Record these steps: 3, 0,5, 10-20, 0-100/10 or */100."),
    CaptureOption("ranks", _parse_numbers, "RANKS", "Record these ranks."),
    CaptureOption("overwrite", parse_flag, "", "Replace an earlier run."),
    CaptureOption("on_error", str, "warn|raise", "Reaction to an error inside the tap."),
    CaptureOption(
        "compiled", str, "boundary|inside|eager", "See compiled modules from outside, inside, or uncompiled."
    ),
    CaptureOption("emulate_casts", parse_flag, "", "Let taps inside compiled graphs change no rounding."),
    CaptureOption("max_buffer", _parse_count, "BYTES", "Bytes of host memory that may wait for the disk."),
    CaptureOption("sketch", _parse_count, "256|128|64|32", "Numbers in the sketch of a tensor."),
    CaptureOption("evaluation", parse_flag, "", "Record evaluation between training steps, too."),
    CaptureOption("budget", _parse_share, "SHARE", "Share of the time that recording may take, like 0.02."),
    CaptureOption("on_nonfinite", str, "stop|keep", "Reaction to a NaN or Inf that is born."),
    CaptureOption("ring", _parse_count, "STEPS", "Number of last steps whose tensors are held."),
    CaptureOption("loss", str, "OUTPUT", "The output that is the loss, like criterion or (root):loss."),
    CaptureOption("layout", str, "FILE", "A TOML file with the parallel layout of plain tensors, and global names."),
    CaptureOption("spool", str, "FOLDER", "For a URL: the folder for data that is not uploaded yet."),
    CaptureOption("spool_size", _parse_count, "BYTES", "For a URL: upper bound on the bytes of the spool."),
    CaptureOption("upload_timeout", _parse_share, "SECONDS", "For a URL: seconds without progress before it gives up."),
    CaptureOption("operators", _parse_names, "PATTERN,...", "Record the operators of modules whose name matches."),
    CaptureOption("gather", parse_flag, "", "On a GPU, read several tensors in one launch."),
)
"""An option of `capture` joins the command line, the environment and tensortap.toml with one line here."""
