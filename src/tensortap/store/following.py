"""Follows a run while it is written: each look reads the new data, and nothing is read twice."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tensortap.core.arguments import read
from tensortap.core.file_io import BINARY, read_at
from tensortap.core.records import Key
from tensortap.core.urls import Place
from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.store.format import INDEX, LOOP, PROGRESS_JSON, RANK_JSON, RANK_NAME, RUN_JSON
from tensortap.store.index import check_schema
from tensortap.store.metadata import check_run_info
from tensortap.store.segments import read_grown
from tensortap.store.source import Bytes, files_below, read_json

__all__ = ["FollowedRank", "FollowedRun", "FollowedStep"]

_STEPS = 8
"""The newest recorded steps that are shown."""


@dataclass
class FollowedStep:
    """A recorded step."""

    step: int
    records: int = 0
    nonfinite: int = 0
    squares: dict[int, float] = field(default_factory=dict)
    """Sum of squares of all parameter gradients, by micro step; NaN if some are not finite."""
    loss: float | None = None

    @property
    def gradient_norm(self) -> float | None:
        """Norm of the parameter gradients of the last micro step; None without any."""
        return float(np.sqrt(self.squares[max(self.squares)])) if self.squares else None


class FollowedRank:
    """One rank. `look` reads the new data."""

    def __init__(self, folder: Place, number: int) -> None:
        self.number = number
        self._files = files_below(folder)
        self._index = _IndexTail(_tail_of(folder, self._files, INDEX), self._files.address(INDEX))
        self._loop = _LinesTail(_tail_of(folder, self._files, LOOP))
        self.status, self.reason = "starting", ""
        self.progress: dict[str, Any] = {}
        """Step in progress, recorded steps, seconds since the tap was opened, seconds that it took."""
        self.rate = 0.0
        """Steps a second since the look before the last."""
        self.records = self.nonfinite = 0
        self.first_nonfinite: Key | None = None
        self._steps: dict[int, FollowedStep] = {}

    def look(self) -> None:
        """Read the new data. The status comes first, so that nothing of an ended rank is missed."""
        self._files.close()  # forgets what was listed and opened before
        self._read_status()
        self._read_progress()
        for batch in self._index.read():
            self._add(batch)
        for line in self._loop.read():
            if line.get("fact") == "loss" and isinstance(line.get("value"), dict):
                value = read(line["value"]).get("value")
                self._step(int(line.get("step", 0))).loss = value if isinstance(value, float) else None

        for step in sorted(self._steps)[:-_STEPS]:
            del self._steps[step]

    @property
    def steps(self) -> list[FollowedStep]:
        """The newest recorded steps, in order."""
        return [self._steps[step] for step in sorted(self._steps)]

    @property
    def ended(self) -> bool:
        return self.status not in ("starting", "running")

    def _read_status(self) -> None:
        value = _json(self._files, RANK_JSON)
        if isinstance(value.get("status"), str):
            self.status, self.reason = value["status"], str(value.get("reason") or "")
        here = value.get("host") == socket.gethostname()
        if self.status == "running" and here and type(value.get("pid")) is int and not _alive(value["pid"]):
            self.status, self.reason = "killed", "its process is gone"

    def _read_progress(self) -> None:
        before, found = self.progress, _json(self._files, PROGRESS_JSON)
        if not all(isinstance(found.get(name), (int, float)) for name in ("step", "recorded", "seconds", "cost")):
            return
        self.progress = found
        seconds, steps = found["seconds"] - before.get("seconds", 0), found["step"] - before.get("step", 0)
        if self.ended and found["seconds"] > 0:
            self.rate = found["step"] / found["seconds"]
        elif seconds > 0:
            self.rate = steps / seconds

    def _add(self, batch: Any) -> None:
        columns = {name: np.asarray(batch.column(name)) for name in ("step", "micro", "nan", "posinf", "neginf", "l2")}
        kinds = np.asarray(batch.column("kind").to_pylist())
        bad = (columns["nan"] > 0) | (columns["posinf"] > 0) | ((columns["neginf"] > 0) & ~np.isin(kinds, _ACTIVATIONS))
        gradients = kinds == "param_grad"
        self.records += len(kinds)
        self.nonfinite += int(bad.sum())
        if bad.any() and self.first_nonfinite is None:
            row = int(np.flatnonzero(bad)[0])
            self.first_nonfinite = Key(*(batch.column(name)[row].as_py() for name in Key._fields))
        for number in np.unique(columns["step"]).tolist():
            step, own = self._step(number), columns["step"] == number
            step.records += int(own.sum())
            step.nonfinite += int(bad[own].sum())
            for micro in np.unique(columns["micro"][own & gradients]).tolist():
                rows = own & gradients & (columns["micro"] == micro)
                squares = float("nan") if bad[rows].any() else float(np.square(columns["l2"][rows]).sum())
                step.squares[micro] = step.squares.get(micro, 0.0) + squares

    def _step(self, number: int) -> FollowedStep:
        return self._steps.setdefault(number, FollowedStep(number))


class FollowedRun:
    """A run and all its ranks. Ranks may join later."""

    def __init__(self, path: Place) -> None:
        self._files = files_below(path)
        names = self._files.names()
        if not names and not (isinstance(path, Path) and path.is_dir()):
            raise RunNotFound(f"{path} does not exist: there is no run to watch. --wait waits for it.")
        if RUN_JSON not in names:
            raise RunUnreadable(f"{path} is not a run: it has no {RUN_JSON}.")
        self.path = path
        self.info = check_run_info(_json(self._files, RUN_JSON), str(path / RUN_JSON))
        self.ranks: dict[int, FollowedRank] = {}

    def look(self) -> None:
        """Read the new data of every rank."""
        self._files.close()
        for name in self._files.names():
            if (match := RANK_NAME.fullmatch(name)) and int(match[1]) not in self.ranks:
                self.ranks[int(match[1])] = FollowedRank(self.path / name, int(match[1]))
        for rank in self.ranks.values():
            rank.look()

    @property
    def ended(self) -> bool:
        """Whether all expected ranks have begun, and every rank has ended."""
        chosen = (self.info.get("config") or {}).get("ranks") is not None
        expected = 1 if chosen else self.info["world"]
        return len(self.ranks) >= expected and all(rank.ended for rank in self.ranks.values())


class _FileTail:
    """The bytes that were appended to a file since the last look. A ring may replace the file by a shorter one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._end = 0

    def __del__(self) -> None:
        self._close()

    def read(self) -> tuple[bytes, bool]:
        """Return the new bytes, or all of a file that was replaced, and whether it was."""
        replaced = False
        try:
            # An open file keeps its number, so that another file has another one.
            if self._descriptor >= 0 and os.fstat(self._descriptor).st_ino != self._path.stat().st_ino:
                self._close()
                replaced, self._end = True, 0
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | BINARY)
        except FileNotFoundError:
            return b"", replaced
        data = bytearray(max(0, os.fstat(self._descriptor).st_size - self._end))
        return bytes(data[: read_at(self._descriptor, memoryview(data), self._end) if data else 0]), replaced

    def advance(self, count: int) -> None:
        """Skip `count` bytes, which are not returned again."""
        self._end += count

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _ObjectTail:
    """The same for a file in an object store, which consists of segments and is never replaced."""

    def __init__(self, files: Bytes, name: str) -> None:
        self._files, self._name = files, name
        self._end = 0

    def read(self) -> tuple[bytes, bool]:
        try:
            return bytes(read_grown(self._files, self._name, self._end).data), False
        except FileNotFoundError:
            return b"", False

    def advance(self, count: int) -> None:
        self._end += count


_Tail = _FileTail | _ObjectTail


def _tail_of(folder: Place, files: Bytes, name: str) -> _Tail:
    return _FileTail(folder / name) if isinstance(folder, Path) else _ObjectTail(files, name)


class _IndexTail:
    """The batches that were appended to an index since the last look."""

    def __init__(self, tail: _Tail, address: str) -> None:
        self._address = address
        self._tail = tail
        self._schema: Any = None
        self._seen: set[int] = set()
        """First `seq` of each batch in the file that was returned."""

    def read(self) -> list[Any]:
        data, replaced = self._tail.read()
        if replaced:
            self._schema = None
        found: list[Any] = []
        stream, end = pa.BufferReader(data), 0
        try:
            if self._schema is None:
                schema = pa.ipc.read_schema(stream)
                check_schema(schema, self._address)
                self._schema, end = schema, stream.tell()
            while (message := pa.ipc.read_message(stream)) is not None:
                batch = pa.ipc.read_record_batch(message, self._schema)
                batch.validate(full=True)
                found.append(batch)
                end = stream.tell()
        except (EOFError, OSError, pa.ArrowException):
            pass  # the rest is not a whole batch yet
        self._tail.advance(end)
        return self._unseen(found, replaced)

    def _unseen(self, batches: list[Any], replaced: bool) -> list[Any]:
        """Return the batches that are new. Those of a replaced file were seen before, except for the last ones."""
        numbers = [batch.column("seq")[0].as_py() if batch.num_rows else -1 for batch in batches]
        new = [batch for batch, number in zip(batches, numbers, strict=True) if number not in self._seen]
        self._seen = {*numbers} if replaced else self._seen | {*numbers}
        return new


class _LinesTail:
    """The lines that were appended to a file since the last look; all lines if it was replaced."""

    def __init__(self, tail: _Tail) -> None:
        self._tail = tail

    def read(self) -> list[dict[str, Any]]:
        data, _ = self._tail.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._tail.advance(len(whole))
        found = []
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found


_ACTIVATIONS = ("input", "output")


def _json(files: Bytes, name: str) -> dict[str, Any]:
    """Return a file's object; an empty one if it is missing or damaged, or has just been replaced."""
    try:
        value = read_json(files, name)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
