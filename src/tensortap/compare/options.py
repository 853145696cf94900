"""The options of a comparison: name, type, default, help text and command-line flag, in one place.

`tensortap.compare`, the verbs compare, report and view, the pytest plugin and docs/compare-options.md follow this
class; a test holds them to it. Importing it is cheap: every command does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from tensortap.errors import UsageError, shorten

if TYPE_CHECKING:
    from tensortap.compare.sources import Source
    from tensortap.store import Run

__all__ = ["CLUSTERS", "ENGINES", "ComparisonOptions", "OptionInfo", "option_info", "options_table"]


CLUSTERS = ("ray", "dask")
"""Engines whose workers may be on other machines."""
ENGINES = ("serial", "processes", *CLUSTERS)


@dataclass(frozen=True)
class OptionInfo:
    """The help text and command-line form of an option."""

    help: str
    flag: str = ""
    """On the command line; empty if it has none."""
    metavar: str | None = None
    pairing: bool = False
    """Whether it decides which records are paired and what they are allowed, not only which of them to show."""


def _option(default: Any, help: str, flag: str = "", metavar: str | None = None, pairing: bool = False) -> Any:
    return field(default=default, metadata={"info": OptionInfo(help, flag, metavar, pairing)})


@dataclass(frozen=True)
class ComparisonOptions:
    """The options of a comparison. Raise UsageError if an option has a value that it cannot have."""

    rename: Sequence[str] = _option(
        (),
        "Rename the candidate's modules by a regular expression; repeatable.",
        *("--rename", "'PATTERN=REPLACEMENT'"),
        pairing=True,
    )
    mapping: str | os.PathLike[str] | Mapping[str, Any] | None = _option(  # noqa: RUF009 - it returns a field
        None, "Rules for names and tensor layouts, in TOML.", "--map", "FILE", pairing=True
    )
    steps: Collection[int] | Mapping[int, int] | None = _option(
        None,
        "Compare only these steps: 3 or 0,5 or 10-20. 3:4 pairs step 3 with the candidate's step 4.",
        *("--step", "STEPS"),
        pairing=True,
    )
    ranks: Collection[int] | Mapping[int, int] | None = _option(
        None, "Compare only these ranks; repeatable.", "--rank", "N"
    )
    modules: str | Collection[str] | None = _option(
        None, 'Compare only modules with such names; "(root)" is the model; repeatable.', "--module", "GLOB"
    )
    kinds: str | Collection[str] | None = _option(
        None, "Compare only input, output, grad_output, ...; repeatable.", "--kind", "KIND"
    )
    rtol: float | None = _option(
        None,
        "Relative error to allow, instead of the tolerance by dtype and incoming error.",
        "--rtol",
        "X",
        pairing=True,
    )
    atol: float | None = _option(None, "Absolute error to allow.", "--atol", "X", pairing=True)
    noise: tuple[Source, ...] = _option(
        (),
        "Allow the noise of another run of the reference, or of a file by tensortap.noise; repeatable.",
        *("--noise", "RUN"),
        pairing=True,
    )
    truth: str | os.PathLike[str] | Run | None = _option(  # noqa: RUF009 - it returns a field
        None,
        "A run in float32 or float64 that tells which side is further off, and which rounds more, also in gradients.",
        *("--truth", "RUN"),
        pairing=True,
    )
    zoom: tuple[Any, Any] | None = _option(
        None,
        "Zoom into the module that is named: what builds the reference's model, and the candidate's.",
        *("--zoom", "FILE.py:FUNC,FILE.py:FUNC"),
    )
    until_first: bool = _option(False, "Stop measuring at the first divergence.", "--until-first")
    workers: int | None = _option(None, "Processes that measure.  [default: by the machine]", "--workers", "N")
    engine: str | None = _option(
        None,
        "Where to measure: serial, processes, ray or dask.  [default: by the machine]",
        *("--engine", "NAME"),
    )
    address: str | None = _option(
        None, "The cluster of --engine: auto for the Ray cluster of this machine, or an address.", "--address", "WHERE"
    )
    device: str = _option("cpu", "cuda measures whole tensors on the GPU, through torch.", "--device", "DEVICE")
    details: int = _option(0, "Number of tensors to inspect element by element, for Comparison.details.")
    progress: Callable[[int, int], None] | None = _option(  # noqa: RUF009 - it returns a field
        None, "Called with bytes done and bytes in all."
    )

    def __post_init__(self) -> None:
        # A text is a sequence, too: of its characters.
        rules = (self.rename,) if isinstance(self.rename, str) else self.rename
        object.__setattr__(self, "rename", tuple(rules) if isinstance(rules, Iterable) else rules)
        for name, (is_valid, wanted) in _VALID.items():
            value = getattr(self, name)
            if value is not None and not is_valid(value):
                raise UsageError(f"{name}={shorten(repr(value))}: give {wanted}")
        if self.address is not None and self.engine not in CLUSTERS:
            raise UsageError(f"address={self.address!r}: give engine='ray' or engine='dask' with it")
        if self.engine == "serial" and self.workers not in (None, 1):
            raise UsageError(f"workers={self.workers}: engine='serial' measures in this process alone")

    def as_arguments(self, pairing_only: bool = False) -> list[str] | None:
        """Return these options as `tensortap compare` takes them; None if they cannot be given there.

        pairing_only: leave out options that only select what to show.

        >>> ComparisonOptions(rename=("^m.=",), rtol=1e-3).as_arguments()
        ['--rename', '^m.=', '--rtol', '0.001']
        """
        arguments: list[str] = []
        for each in fields(self):
            info, value = _info(each), getattr(self, each.name)
            if not info.flag or value == each.default or (pairing_only and not info.pairing):
                continue
            if each.name == "steps" and pairing_only and not _pairs_other_steps(value):
                continue
            texts = list(_as_texts(each.name, value))
            if None in texts:
                return None
            for text in texts:
                arguments += [info.flag] if text is True else [info.flag, str(text)]
        return arguments


def _are_numbers(value: Any) -> bool:
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        return False
    both = (value, value.values()) if isinstance(value, Mapping) else (value,)
    return isinstance(value, range) or all(isinstance(each, Integral) for side in both for each in side)


def _are_texts(value: Any) -> bool:
    return isinstance(value, Collection) and all(isinstance(each, str) for each in value)


def _is_tolerance(value: Any) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < math.inf


_NUMBERS = "numbers, like [0, 5], or a mapping of the reference's to the candidate's"
_VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rename": (_are_texts, "texts of the form 'PATTERN=REPLACEMENT'"),
    "mapping": (lambda value: isinstance(value, (str, os.PathLike, Mapping)), "the path of a TOML file, or a mapping"),
    "steps": (_are_numbers, _NUMBERS),
    "ranks": (_are_numbers, _NUMBERS),
    "modules": (_are_texts, "a name pattern, or several"),
    "kinds": (_are_texts, "a kind, or several"),
    "rtol": (_is_tolerance, "zero or more"),
    "atol": (_is_tolerance, "zero or more"),
    "engine": (lambda value: value in ENGINES, f"one of {', '.join(ENGINES)}"),
    "workers": (lambda value: isinstance(value, Integral) and int(value) >= 1, "at least one"),
    "details": (lambda value: isinstance(value, Integral) and int(value) >= 0, "zero or more"),
}
"""For each option that can be wrong by itself: whether a value is valid, and the values that are."""


def option_info(name: str) -> OptionInfo:
    """Return the help text and command-line form of an option."""
    return _info(next(each for each in fields(ComparisonOptions) if each.name == name))


def options_table() -> str:
    """Return all options as a Markdown table."""
    lines = ["| `tensortap.compare` | `tensortap compare` | default | meaning |", "|---|---|---|---|"]
    for each in fields(ComparisonOptions):
        info = _info(each)
        flag = f"`{' '.join(filter(None, (info.flag, info.metavar)))}`" if info.flag else ""
        text = info.help.split("  [")[0].replace("|", "\\|")
        lines.append(f"| `{each.name}=` | {flag} | `{each.default!r}` | {text} |")
    return "\n".join(lines) + "\n"


def _info(option: Field[Any]) -> OptionInfo:
    info: OptionInfo = option.metadata["info"]
    return info


def _pairs_other_steps(steps: Collection[int] | Mapping[int, int]) -> bool:
    return isinstance(steps, Mapping) and any(ours != theirs for ours, theirs in steps.items())


def _as_texts(name: str, value: Any) -> Iterator[str | bool | None]:
    """Yield the command line's values of an option, True for a flag without one, and None for what has none there."""
    if value is True:
        yield True
    elif name == "steps":
        pairs = value.items() if isinstance(value, Mapping) else ((step, step) for step in value)
        yield ",".join(f"{ours}:{theirs}" if ours != theirs else f"{ours}" for ours, theirs in pairs)
    elif name == "zoom":
        yield ",".join(value) if all(isinstance(each, str) for each in value) else None
    elif isinstance(value, Mapping):  # rules in memory, or ranks that are paired with others
        yield None
    elif isinstance(value, (str, os.PathLike)) or not isinstance(value, Collection):
        yield _as_text(name, value)
    else:
        for each in value:
            yield _as_text(name, each)


def _as_text(name: str, value: Any) -> str | None:
    if getattr(value, "in_memory", False):
        return None
    if name in ("noise", "truth"):
        value = getattr(value, "path", value)  # an open run is named by its path
    return "(root)" if name == "modules" and value == "" else str(value)
