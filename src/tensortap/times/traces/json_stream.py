"""Stream the events of a Chrome trace one at a time, so that memory does not grow with the file."""

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

from tensortap.core.file_io import check_regular
from tensortap.errors import RunNotFound, RunUnreadable

__all__ = ["Progress", "trace_events"]

Progress = Callable[[int, int], None]
"""Called with the bytes read and the total bytes."""

_CHUNK = 1 << 20
_MAX_EVENT = 64 << 20
"""Upper bound on the characters of one event; without it, a broken file would be read into memory as a whole."""
_GZIP = b"\x1f\x8b"
_SPACE = " \t\r\n"
_MAX_WORD = len("-Infinity") + 1
_INVALID_NUMBER = re.compile(r"-?(?:nan(?:\([^)]*\))?|inf(?:inity)?)\b")


def trace_events(path: str | os.PathLike[str], progress: Progress | None = None) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a `.json` or `.json.gz` file.

    Accept both forms of the format: an object with a list `traceEvents`, and a bare list. Raise RunNotFound if the
    file does not exist, and RunUnreadable if it is not a trace or ends too early.
    """
    name = os.fspath(path)
    try:
        check_regular(Path(path), Path(path).stat().st_mode)
        with Path(path).open("rb") as raw:
            size = os.fstat(raw.fileno()).st_size
            zipped = raw.read(2) == _GZIP
            raw.seek(0)
            source: Any = gzip.GzipFile(fileobj=raw) if zipped else raw
            yield from _TraceParser(name, source, raw, size, progress)
    except FileNotFoundError as error:
        raise RunNotFound(f"there is no file {name}: give the path of a trace that a profiler has exported") from error
    except RecursionError as error:
        raise RunUnreadable(f"{name} is nested too deeply for a trace; export it again") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RunUnreadable(f"{name} is damaged or ends too early: {error}; export the trace again") from error
    except OSError as error:
        raise RunUnreadable(f"{name} cannot be read: {error.strerror or error}") from error


class _TraceParser:
    """A window over the text that moves as events are parsed."""

    def __init__(self, name: str, source: Any, raw: BinaryIO, size: int, progress: Progress | None) -> None:
        self._name = name
        self._source = source
        self._raw = raw
        self._size = size
        self._progress = progress
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._decode_json = json.JSONDecoder(strict=False).raw_decode  # names may hold control characters
        self._text = ""
        self._at = 0
        self._offset = 0
        """Characters before the window."""
        self._at_end = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        opening = self._next_char()
        if opening == "[":
            yield from self._parse_list()
        elif opening == "{":
            yield from self._parse_object()
        else:
            raise RunUnreadable(
                f"{self._name} is not a trace: it does not hold JSON. Give a trace that a profiler has exported"
            )

    def _parse_object(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        found = False
        while self._next_char() != "}":
            key = self._parse_value()
            if not isinstance(key, str) or self._next_char() != ":":
                raise self._error("a key and a colon are expected", self._at)
            self._at += 1
            if key == "traceEvents" and self._next_char() == "[":
                found = True
                yield from self._parse_list()
            else:
                self._parse_value()
            if self._next_char() == ",":
                self._at += 1
        if not found:
            raise RunUnreadable(
                f'{self._name} is JSON, but not a trace: it has no list "traceEvents". Export one with '
                "prof.export_chrome_trace(...) (torch) or prof.export(..., format='json') (paddle)"
            )

    def _parse_list(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        while (char := self._next_char()) != "]":
            if char == ",":
                self._at += 1
                continue
            event = self._parse_value()
            if isinstance(event, dict):
                yield event
        self._at += 1

    def _parse_value(self) -> Any:
        self._next_char()
        while True:
            try:
                value, end = self._decode_json(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._replace_invalid_number(error.pos):
                    continue
                cut_off = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _MAX_WORD
                if self._at_end or not cut_off:
                    raise self._error(error.msg, error.pos, cut_off) from error
            else:
                if end < len(self._text) or self._at_end:  # a number at the end of the window may continue
                    self._at = end
                    return value
            if len(self._text) - self._at > _MAX_EVENT:
                raise self._error("an entry does not end", self._at)
            self._read_more()

    def _next_char(self) -> str:
        """Return the next character that is not a space, without consuming it."""
        while True:
            text, at, end = self._text, self._at, len(self._text)
            while at < end and text[at] in _SPACE:
                at += 1
            self._at = at
            if at < end:
                return text[at]
            if self._at_end:
                raise self._error("the file ends", at, cut_off=True)
            self._read_more()

    def _read_more(self) -> None:
        """Read more text. The amount grows with an entry that does not fit, so that it is scanned only a few times."""
        kept = self._text[self._at :]
        self._offset += self._at
        self._at = 0
        data = self._source.read(max(_CHUNK, len(kept)))
        self._at_end = not data
        self._text = kept + self._decode(data, self._at_end)
        if self._progress is not None:
            self._progress(self._raw.tell(), self._size)

    def _replace_invalid_number(self, at: int) -> bool:
        """Replace a number that C prints but JSON lacks, such as the infinite bandwidth of a copy that took no time."""
        found = _INVALID_NUMBER.match(self._text, at)
        if found is None:
            return False
        self._text = f"{self._text[:at]}null{self._text[found.end() :]}"
        return True

    def _error(self, what: str, at: int, cut_off: bool = False) -> RunUnreadable:
        place = f"{self._offset + at:,} characters"
        if cut_off:
            return RunUnreadable(
                f"{self._name} ends too early, after {place}: the JSON is not complete. The program may have stopped "
                "while it wrote the trace; export it again"
            )
        return RunUnreadable(f"{self._name} is not valid JSON after {place}: {what}")
