"""The selection of modules, steps and ranks to tap, and of the parts of each tensor to keep."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any, Literal, cast, get_args

from tensortap.core.records import KINDS, MODULE_KINDS, display_name
from tensortap.errors import UsageError

__all__ = ["DEFAULT_KINDS", "OPTIMIZER_KINDS", "Keep", "Selection"]

Keep = Literal["summary", "tensors", "ring"]
Predicate = Callable[[str, Any], bool]

DEFAULT_KINDS = ("input", "output", "grad_output", "param_grad")
OPTIMIZER_KINDS = (*DEFAULT_KINDS, "step_grad", "param")
"""The default with `optimizer=`."""
_FEW = 8
"""Number of modules that a message names."""


@dataclass(frozen=True)
class Selection:
    """The user's selection, validated once. `tensortap.capture` documents each field."""

    keep: str | Mapping[str, str] = "summary"
    kinds: Collection[str] = DEFAULT_KINDS
    modules: str | Sequence[str] | Predicate = "*"
    classes: str | Collection[str] | None = None
    steps: Collection[int] | None = None
    ranks: Collection[int] | None = None
    operators: str | Sequence[str] | None = None
    params_after_alone: bool = False
    """Whether parameters before a step are left out if they were recorded after the step before."""
    classes_argument: str = "classes"
    """The name that messages give to the argument `classes`."""
    _rules: tuple[tuple[str, str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.kinds, str):
            object.__setattr__(self, "kinds", (self.kinds,))
        for kind in self.kinds:
            if kind not in KINDS:
                raise UsageError(f"kinds: {kind!r} is not a kind; there are {', '.join(MODULE_KINDS)}")
        if not self.kinds:
            raise UsageError(f"kinds is empty: nothing would be tapped; there are {', '.join(MODULE_KINDS)}")
        if "operator" in self.kinds:
            raise UsageError("kinds: operators are recorded for chosen modules: pass operators='layers.2.*' instead")
        if self.operators is not None and "output" not in self.kinds:
            raise UsageError("operators= needs outputs, by which a comparison judges operators: add output to kinds=")
        rules = {"*": self.keep} if isinstance(self.keep, str) else dict(self.keep)
        for pattern, kept in rules.items():
            if kept not in get_args(Keep):
                raise UsageError(f'keep: {kept!r} for {pattern!r} is neither "summary" nor "tensors" nor "ring"')
        object.__setattr__(self, "_rules", tuple(rules.items()))
        for name in ("steps", "ranks"):
            if isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, (value,))
            elif value is not None and not _holds_ints(value):
                raise UsageError(
                    f"{name} takes an int or any container of ints, like [0, 5] or range(0, 100, 10), not {value!r}"
                )

    def wants_step(self, step: int) -> bool:
        return self.steps is None or step in self.steps

    def wants_rank(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def wants_module(self, name: str, cls: str, module: Any) -> bool:
        if (classes := self._class_names) is not None and cls not in classes:
            return False
        if callable(self.modules):
            return bool(self.modules(name, module))
        return any(_matches(name, pattern) for pattern in self._patterns)

    @property
    def _class_names(self) -> Collection[str] | None:
        return (self.classes,) if isinstance(self.classes, str) else self.classes

    def wants_operators(self, name: str) -> bool:
        return any(_matches(name, pattern) for pattern in self._operator_patterns)

    @property
    def _operator_patterns(self) -> tuple[str, ...]:
        if self.operators is None:
            return ()
        return (self.operators,) if isinstance(self.operators, str) else tuple(self.operators)

    def check_operators(self, chosen: Collection[str]) -> None:
        """Raise UsageError if a pattern of operators= matches none of the chosen modules, and suggest similar names."""
        for pattern in self._operator_patterns:
            if not any(_matches(name, pattern) for name in chosen):
                raise UsageError(f"operators: {pattern!r} matches no tapped module{_similar(pattern, chosen)}")

    def keep_of(self, name: str) -> Keep:
        """Return the value of keep= for a module: the first matching pattern decides, and the default is a summary."""
        for pattern, kept in self._rules:
            if _matches(name, pattern):
                return cast(Keep, kept)
        return "summary"

    def check_found(self, chosen: int, names: Collection[str], classes: Collection[str]) -> list[str]:
        """Return a notice for each pattern and class that the model lacks. Raise UsageError if no module was chosen.

        Both suggest similar names.
        """
        if chosen:
            return [*self._unmatched_modules(names), *self._unmatched_classes(classes)]
        hints = [] if self._patterns == ("*",) else self._patterns
        close = [each for hint in hints for each in _suggestions(hint, names)]
        wanted = [] if self._patterns == ("*",) and self.classes is not None else [f"modules={self._described_modules}"]
        if self.classes is not None:
            wanted.append(f"{self.classes_argument}={self.classes!r}")
        message = f"no module of the model matches {' and '.join(wanted)}"
        if self.classes is not None:
            message += f"; the model has {', '.join(sorted(classes)[:12])}"
        if close:
            message += f"; did you mean {', '.join(dict.fromkeys(close))}?"
        elif self.classes is None and hints and (outermost := [n for n in names if n and "." not in n]):
            more = ", …" if len(outermost) > _FEW else ""
            message += f"; its outermost modules are {', '.join(outermost[:_FEW])}{more}"
        raise UsageError(message)

    @property
    def _patterns(self) -> tuple[str, ...]:
        """The patterns of modules=; none if it is a function."""
        if callable(self.modules):
            return ()
        return (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)

    @property
    def _described_modules(self) -> str:
        return "<function>" if callable(self.modules) else repr(self.modules)

    def _unmatched_modules(self, names: Collection[str]) -> Iterator[str]:
        for pattern in self._patterns:
            if not any(_matches(name, pattern) for name in names):
                yield f"modules: {pattern!r} matches no module of the model{_similar(pattern, names)}"

    def _unmatched_classes(self, classes: Collection[str]) -> Iterator[str]:
        for name in self._class_names or ():
            if name not in classes:
                yield f"{self.classes_argument}: the model has no module of class {name}{_similar(name, classes)}"

    def unmatched(self, chosen: Collection[str]) -> list[str]:
        """Return a notice for each pattern of keep= that matches none of the chosen modules."""
        notices = []
        for pattern, _ in self._rules:
            if not any(_matches(name, pattern) for name in chosen):
                hint = _similar(pattern, chosen)
                notices.append(f"keep: {pattern!r} matches no tapped module, so it decides nothing{hint}")
        return notices

    def described(self) -> dict[str, Any]:
        """Return the selection for run.json, with the names of functions."""
        modules = self.modules if isinstance(self.modules, str) else None
        if modules is None and not callable(self.modules):
            modules = list(self.modules)  # type: ignore[assignment]  # JSON takes both
        return {
            "keep": self.keep if isinstance(self.keep, str) else dict(self.keep),
            "kinds": list(self.kinds),
            "modules": modules if modules is not None else f"<{getattr(self.modules, '__name__', 'function')}>",
            "classes": None
            if self.classes is None
            else sorted({self.classes} if isinstance(self.classes, str) else self.classes),
            "steps": None if self.steps is None else repr(self.steps),
            "ranks": None if self.ranks is None else repr(self.ranks),
        } | self._rest_described()

    def _rest_described(self) -> dict[str, Any]:
        rest: dict[str, Any] = {"params_after_alone": True} if self.params_after_alone else {}
        return rest if self.operators is None else rest | {"operators": list(self._operator_patterns)}


def _holds_ints(value: Any) -> bool:
    """Return whether a container may hold numbers. The elements of lists and sets are checked."""
    if isinstance(value, (str, bytes)):  # a container, but of strings
        return False
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(isinstance(each, Integral) for each in value)
    return hasattr(value, "__contains__")


def _similar(pattern: str, names: Collection[str]) -> str:
    close = _suggestions(pattern, names)
    return f"; did you mean {', '.join(close)}?" if close else ""


def _suggestions(pattern: str, names: Collection[str]) -> list[str]:
    """Return what the pattern may have meant: itself without the name of a wrapper in front, or similar names.

    Wrappers are not part of names: the names of DistributedDataParallel(model) are the model's, without "module.".
    """
    rest = pattern
    while "." in rest:
        rest = rest.partition(".")[2]
        if any(fnmatchcase(name, rest) for name in names) and rest.strip("*"):
            return [rest]
    return [display_name(name) for name in difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (not name and pattern == "(root)")
