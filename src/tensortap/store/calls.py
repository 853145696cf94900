"""The plain arguments of calls: a line of JSON for each call whose arguments differ from the one before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from tensortap.store.format import utf8
from tensortap.store.lines import LinesWriter, read_lines
from tensortap.store.rotation import RemainingSteps, holding
from tensortap.store.source import Bytes

__all__ = ["CallEntry", "Calls", "CallsWriter", "read_calls"]

_NUMBERS = ("step", "micro", "call")
_NOTHING: Mapping[str, Any] = {}


class CallEntry(NamedTuple):
    """A call whose plain arguments differ from those of the module's previous call."""

    step: int
    micro: int
    module: str
    call: int
    arguments: Mapping[str, Any]
    """The arguments, in the form of `tensortap.core.arguments`."""


class CallsWriter(LinesWriter):
    """Writes calls.jsonl: a row must not be on disk before its call's line."""

    several_in_a_step = True

    def add(self, called: CallEntry) -> None:
        self.add_line(called._asdict(), called.step, called.module)


class Calls:
    """The plain arguments of one rank's calls. Each entry holds until the module's next one."""

    def __init__(self) -> None:
        self._modules: dict[str, list[tuple[tuple[int, int, int], Mapping[str, Any]]]] = {}

    def add(self, called: CallEntry) -> None:
        """Add a call, in the order in which the calls were made."""
        arguments = {utf8(path): value for path, value in called.arguments.items()}
        spot = called.step, called.micro, called.call
        self._modules.setdefault(utf8(called.module), []).append((spot, arguments))

    def drop_all_but(self, remaining: RemainingSteps) -> None:
        """Remove the entries that hold in none of these steps. A copy that was made before keeps them."""
        self._modules = {
            module: list(compress(known, holding([spot[0] for spot, _ in known], remaining, several=True)))
            for module, known in self._modules.items()
        }

    def of(self, step: int, micro: int, module: str, call: int) -> Mapping[str, Any]:
        """Return the arguments of a call, as `core.arguments` writes them. Equal ones in a row share one object."""
        known = self.of_module(module)
        place = bisect_right(known, (step, micro, call), key=lambda each: each[0])
        return known[place - 1][1] if place else _NOTHING

    def of_module(self, module: str) -> Sequence[tuple[tuple[int, int, int], Mapping[str, Any]]]:
        """Return the arguments of a module, each with the step, micro step and call that brought them."""
        return self._modules.get(module, ())

    def __iter__(self) -> Iterator[CallEntry]:
        """Yield all calls, module by module."""
        for module, known in self._modules.items():
            for (step, micro, call), arguments in known:
                yield CallEntry(step, micro, module, call, arguments)


def read_calls(source: Bytes, name: str) -> Calls | None:
    """Read a calls.jsonl. Return None if the run has none, as one of an older version; raise ValueError if damaged."""
    calls = Calls()
    try:
        for value in read_lines(source, name):
            calls.add(_parse(value))
    except FileNotFoundError:
        return None
    return calls


def _parse(value: Mapping[str, Any]) -> CallEntry:
    numbers = [value.get(name) for name in _NUMBERS]
    module, arguments = value.get("module"), value.get("arguments")
    if not all(type(each) is int and abs(each) < 1 << 63 for each in numbers):
        raise ValueError("a call is not counted by whole numbers")
    if not isinstance(module, str) or not isinstance(arguments, dict):
        raise ValueError("a call lacks its module or its arguments")
    step, micro, call = numbers
    return CallEntry(step, micro, module, call, arguments)  # type: ignore[arg-type]  # checked above
