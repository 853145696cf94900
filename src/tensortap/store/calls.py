"""The plain arguments of calls: a line of JSON for each call whose arguments differ from the one before."""

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
from tensortap.store.source import Bytes
from tensortap.store.writer.state import WriterState, write_error

__all__ = ["CallEntry", "Calls", "CallsWriter", "read_calls"]

_MOST_WAITING = 1024
_NUMBERS = ("step", "micro", "call")
_NOTHING: Mapping[str, Any] = {}


class CallEntry(NamedTuple):
    """A call whose plain arguments differ from those of the module's previous call."""

    step: int
    micro: int
    module: str
    call: int
    arguments: Mapping[str, Any]
    """As `tensortap.core.arguments` writes them."""


class CallsWriter:
    """Writes lines before the index rows that refer to them: a row must not be on disk before its call's line."""

    def __init__(self, path: Path, state: WriterState) -> None:
        self._path = path
        self._state = state
        self._waiting: list[str] = []
        self._end = 0
        """Offset in the file at which the waiting lines belong."""
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # a lock of its own, so that `add` never waits for the disk
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
        except OSError as error:
            raise write_error(error, path, begun=False) from error

    def add(self, called: CallEntry) -> None:
        line = json.dumps(called._asdict(), separators=(",", ":"), allow_nan=False) + "\n"
        with self._lock:
            self._waiting.append(line)
            many = len(self._waiting) >= _MOST_WAITING
        if many:  # these calls have few rows, if any
            self.write()

    def write(self) -> bool:
        """Write the waiting lines; return False if that fails. An interrupted write is repeated from its start."""
        with self._writing:
            with self._lock:
                if self._state.failure is not None:  # a line behind half a line could not be read
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
    """The plain arguments of one rank's calls. Each entry holds until the module's next one."""

    def __init__(self) -> None:
        self._modules: dict[str, list[tuple[tuple[int, int, int], Mapping[str, Any]]]] = {}

    def add(self, called: CallEntry) -> None:
        """Add a call, in the order in which the calls were made."""
        arguments = {utf8(path): value for path, value in called.arguments.items()}
        spot = called.step, called.micro, called.call
        self._modules.setdefault(utf8(called.module), []).append((spot, arguments))

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
    try:
        size = source.size(name)
    except FileNotFoundError:
        return None
    whole, _, _ = bytes(source.read(name, 0, size)).rpartition(b"\n")  # no record refers to a line that was cut off
    calls = Calls()
    for number, line in enumerate(whole.splitlines(), 1):
        if (call := _parse(line)) is None:
            raise ValueError(f"line {number} is not a call")
        calls.add(call)
    return calls


def _parse(line: bytes) -> CallEntry | None:
    try:
        value = json.loads(line)
        numbers = [value[name] for name in _NUMBERS]
        module, arguments = value["module"], value["arguments"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    if not all(type(each) is int and abs(each) < 1 << 63 for each in numbers):
        return None
    if not isinstance(module, str) or not isinstance(arguments, dict):
        return None
    step, micro, call = numbers
    return CallEntry(step, micro, module, call, arguments)
