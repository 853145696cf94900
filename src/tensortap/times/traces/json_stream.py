"""Reads the events of a Chrome trace one at a time, so that memory does not grow with the file."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tensortap.errors import RunNotFound, RunUnreadable

__all__ = ["Progress", "trace_events"]

Progress = Callable[[int, int], None]
"""Called with bytes read and bytes in all."""

_CHUNK = 1 << 20
_LONGEST = 64 << 20
"""An event longer than this is no event; without a bound, a broken file would be read into memory whole."""
_GZIP = b"\x1f\x8b"
_SPACE = " \t\r\n"
_LONGEST_WORD = len("-Infinity") + 1
_NOT_JSON = re.compile(r"-?(?:nan(?:\([^)]*\))?|inf(?:inity)?)\b")


def trace_events(path: str | os.PathLike[str], progress: Progress | None = None) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a `.json` or `.json.gz` file.

    Both forms of the format are read: an object with a list `traceEvents`, and a bare list. Raise RunNotFound if
    there is no file, and RunUnreadable if it is not a trace or ends too early.
    """
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as raw:
            size = os.fstat(raw.fileno()).st_size
            zipped = raw.read(2) == _GZIP
            raw.seek(0)
            source: Any = gzip.GzipFile(fileobj=raw) if zipped else raw
            yield from _Events(name, source, raw, size, progress)
    except FileNotFoundError as error:
        raise RunNotFound(f"there is no file {name}: give the path of a trace that a profiler has exported") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RunUnreadable(f"{name} is damaged or ends too early: {error}") from error
    except OSError as error:
        raise RunUnreadable(f"{name} cannot be read: {error.strerror or error}") from error


class _Events:
    """A window over the text that moves on as events are taken from it."""

    def __init__(self, name: str, source: Any, raw: BinaryIO, size: int, progress: Progress | None) -> None:
        self._name = name
        self._source = source
        self._raw = raw
        self._size = size
        self._progress = progress
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._scan = json.JSONDecoder(strict=False).raw_decode  # names may hold control characters
        self._text = ""
        self._at = 0
        self._gone = 0
        """Characters before the window."""
        self._over = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        opening = self._next_sign()
        if opening == "[":
            yield from self._list()
        elif opening == "{":
            yield from self._object()
        else:
            raise RunUnreadable(f"{self._name} is not a trace: it does not hold JSON")

    def _object(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        found = False
        while self._next_sign() != "}":
            key = self._value()
            if not isinstance(key, str) or self._next_sign() != ":":
                raise self._broken("a key and a colon are expected", self._at)
            self._at += 1
            if key == "traceEvents" and self._next_sign() == "[":
                found = True
                yield from self._list()
            else:
                self._value()
            if self._next_sign() == ",":
                self._at += 1
        if not found:
            raise RunUnreadable(
                f'{self._name} is JSON, but not a trace: it has no list "traceEvents". Export one with '
                "prof.export_chrome_trace(...) (torch) or prof.export(..., format='json') (paddle)"
            )

    def _list(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        while (sign := self._next_sign()) != "]":
            if sign == ",":
                self._at += 1
                continue
            event = self._value()
            if isinstance(event, dict):
                yield event
        self._at += 1

    def _value(self) -> Any:
        self._next_sign()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._mended(error.pos):
                    continue
                cut_off = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _LONGEST_WORD
                if self._over or not cut_off:
                    raise self._broken(error.msg, error.pos, cut_off) from error
            else:
                if end < len(self._text) or self._over:  # a number at the very end may go on
                    self._at = end
                    return value
            if len(self._text) - self._at > _LONGEST:
                raise self._broken("an entry does not end", self._at)
            self._fill()

    def _next_sign(self) -> str:
        """The next character that is not a space, without taking it."""
        while True:
            text, at, end = self._text, self._at, len(self._text)
            while at < end and text[at] in _SPACE:
                at += 1
            self._at = at
            if at < end:
                return text[at]
            if self._over:
                raise self._broken("the file ends", at, cut_off=True)
            self._fill()

    def _fill(self) -> None:
        """Read on; the amount grows with an entry that does not fit, so that each is scanned few times."""
        kept = self._text[self._at :]
        self._gone += self._at
        self._at = 0
        data = self._source.read(max(_CHUNK, len(kept)))
        self._over = not data
        self._text = kept + self._decode(data, self._over)
        if self._progress is not None:
            self._progress(self._raw.tell(), self._size)

    def _mended(self, at: int) -> bool:
        """Replace a number that C prints and JSON does not know, as in the bandwidth of a copy that took no time."""
        found = _NOT_JSON.match(self._text, at)
        if found is None:
            return False
        self._text = f"{self._text[:at]}null{self._text[found.end() :]}"
        return True

    def _broken(self, what: str, at: int, cut_off: bool = False) -> RunUnreadable:
        place = f"{self._gone + at:,} characters"
        if cut_off:
            return RunUnreadable(
                f"{self._name} ends too early, after {place}: the JSON is not complete. Export the trace again; the "
                "program may have stopped while it was written"
            )
        return RunUnreadable(f"{self._name} is not valid JSON after {place}: {what}")
