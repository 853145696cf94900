"""With which plain arguments modules were called. A line of JSON for each call that got others than the one before."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensortap.core.file_io import BINARY, write_at
from tensortap.store.format import utf8
from tensortap.store.writer.state import State, write_error

__all__ = ["Called", "Calls", "CallsWriter", "read_calls"]

_MOST_WAITING = 1024
_NUMBERS = ("step", "micro", "call")
_NOTHING: Mapping[str, Any] = {}


class Called(NamedTuple):
    """A call that got other plain arguments than the module's call before it."""

    step: int
    micro: int
    module: str
    call: int
    arguments: Mapping[str, Any]
    """As `tensortap.core.arguments` writes them."""


class CallsWriter:
    """Lines wait for the index: what it says of a call must not be on disk before the call's own line is."""

    def __init__(self, path: Path, state: State) -> None:
        self._path = path
        self._state = state
        self._waiting: list[str] = []
        self._end = 0
        """Where in the file they belong."""
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # apart, so that nobody who adds waits for the disk
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
        except OSError as error:
            raise write_error(error, path, begun=False) from error

    def add(self, called: Called) -> None:
        line = json.dumps(called._asdict(), separators=(",", ":"), allow_nan=False) + "\n"
        with self._lock:
            self._waiting.append(line)
            many = len(self._waiting) >= _MOST_WAITING
        if many:  # the index has nothing to say of these calls, or not for long
            self.write()

    def write(self) -> bool:
        """Write all that waits; False if that fails. Whoever is interrupted here can write the same again."""
        with self._writing:
            with self._lock:
                if self._state.failure is not None:  # behind half a line nothing could be read
                    self._waiting.clear()
                    return False
                lines = self._waiting.copy()
            data, end = memoryview("".join(lines).encode()), self._end
            try:
                while data:
                    written = write_at(self._fd, data, end)
                    data, end = data[written:], end + written
            except OSError as error:
                self._state.fail(error, self._path)
                return False
            with self._lock:
                self._waiting, self._end = self._waiting[len(lines) :], end
        return True

    def close(self) -> None:
        self.write()
        os.close(self._fd)


class Calls:
    """The plain arguments of one rank's calls. They hold from the call that brought them to the module's next such."""

    def __init__(self) -> None:
        self._modules: dict[str, list[tuple[tuple[int, int, int], Mapping[str, Any]]]] = {}

    def add(self, called: Called) -> None:
        """In the order in which the calls were made."""
        arguments = {utf8(path): value for path, value in called.arguments.items()}
        spot = called.step, called.micro, called.call
        self._modules.setdefault(utf8(called.module), []).append((spot, arguments))

    def of(self, step: int, micro: int, module: str, call: int) -> Mapping[str, Any]:
        """What the call was given, as `core.arguments` writes it. Calls that were given the same in a row share
        one object."""
        known = self.of_module(module)
        place = bisect_right(known, (step, micro, call), key=lambda each: each[0])
        return known[place - 1][1] if place else _NOTHING

    def of_module(self, module: str) -> Sequence[tuple[tuple[int, int, int], Mapping[str, Any]]]:
        """What the module was given, with the step, micro step and call that brought it; nothing if it never was."""
        return self._modules.get(module, ())

    def __iter__(self) -> Iterator[Called]:
        """Module by module."""
        for module, known in self._modules.items():
            for (step, micro, call), arguments in known:
                yield Called(step, micro, module, call, arguments)


def read_calls(path: Path) -> Calls | None:
    """None if the run has none, as one of an older version; ValueError if what it has is damaged."""
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # no record refers to a line that was cut off
    except FileNotFoundError:
        return None
    calls = Calls()
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            value = json.loads(line)
            where = [value[name] for name in _NUMBERS]
            sound = all(type(each) is int for each in where) and isinstance(value["arguments"], dict)
            sound = sound and isinstance(value["module"], str)
        except (ValueError, TypeError, LookupError, RecursionError):
            sound = False
        if not sound:
            raise ValueError(f"line {number} is no call")
        calls.add(Called(value["step"], value["micro"], value["module"], value["call"], value["arguments"]))
    return calls
