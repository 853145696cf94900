"""A reader of an invented format, written outside the package against the contracts alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from support.run_conformance import Array, Example, RunConformance
from tensortap.core import dtypes
from tensortap.core.records import Key, Location, Record, Summary
from tensortap.errors import RunUnreadable
from tensortap.store.formats import register_reader, unregister_reader
from tensortap.store.index import Index
from tensortap.store.run import RunSource
from tensortap.store.source import SingleFile, kept_location

MAGIC = b"TOY1"
"""A file begins with this; then a line of JSON for each tensor, an empty line, and the elements without gaps."""


class ToyFile(RunSource):
    """All tensors are ranges of one file, so other processes can read them."""

    on_disk = True

    def __init__(self, path: Path, summarize: Callable[[Array], Summary]) -> None:
        super().__init__(path, {"framework": "toy", "model": path.stem, "world": 1}, [0])
        self._file = SingleFile(path)
        self._summarize = summarize

    def read_index(self, rank: int) -> Index:
        return Index.of_records(list(self._records()), rank)

    def view(self, record: Record) -> memoryview:
        location = kept_location(record)
        return self._file.view(location.file, location.offset, location.nbytes)

    def address(self, rank: int, file: str) -> str:
        return str(self.path)

    def _records(self) -> Iterator[Record]:
        head, _, _ = bytes(self._file.read("", 0, self._file.size(""))).partition(b"\n\n")
        at = len(head) + 2
        for seq, line in enumerate(head.splitlines()[1:]):
            about = json.loads(line)
            dtype, shape = dtypes.numpy_dtype(about["dtype"]), tuple(about["shape"])
            nbytes = int(np.prod(shape)) * dtype.itemsize
            array = np.frombuffer(self._file.view("", at, nbytes), np.uint8).copy().view(dtype).reshape(shape)
            key = Key(about["step"], 0, "forward", about["module"], 0, "output", "0")
            location = Location("data", at, nbytes)
            yield Record(key, 0, seq, "Toy", about["dtype"], shape, seq, self._summarize(array), location)
            at += nbytes


class ToyReader:
    @staticmethod
    def recognizes(path: Path) -> bool:
        return path.suffix == ".toy"

    @staticmethod
    def open_source(path: Path, summarize: Callable[[Array], Summary]) -> ToyFile:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise RunUnreadable(f"{path} is not a toy file: it does not begin with {MAGIC.decode()}.")
        return ToyFile(path, summarize)


def tensors(scale: float = 1.0) -> dict[tuple[int, Key], Array]:
    rng = np.random.default_rng(0)
    found: dict[tuple[int, Key], Array] = {}
    for step in range(2):
        for module in ("fc1", "fc2"):
            factor = scale if (step, module) == (1, "fc2") else 1.0
            found[0, Key(step, 0, "forward", module, 0, "output", "0")] = rng.normal(size=(2, 3)) * factor
    return found


def write(path: Path, content: dict[tuple[int, Key], Array]) -> Path:
    lines = [
        json.dumps({"step": key.step, "module": key.module, "dtype": array.dtype.name, "shape": array.shape})
        for (_, key), array in content.items()
    ]
    data = b"".join(array.tobytes() for array in content.values())
    path.write_bytes(b"\n".join([MAGIC, *map(str.encode, lines)]) + b"\n\n" + data)
    return path


@pytest.fixture
def toy_reader() -> Iterator[None]:
    register_reader(ToyReader)
    yield
    unregister_reader(ToyReader)


@pytest.mark.usefixtures("toy_reader")
class TestToyReader(RunConformance):
    @pytest.fixture
    def example(self, tmp_path: Path) -> Example:
        path = write(tmp_path / "net.toy", tensors())
        return Example(lambda: tt.open(path), tensors())


@pytest.mark.usefixtures("toy_reader")
def test_toy_files_are_compared(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.toy", tensors()), write(tmp_path / "b.toy", tensors(1.5))
    assert tt.compare(a, a).verdict == "match"
    result = tt.compare(a, b)
    assert result.first is not None and (result.first.key.step, result.first.key.module) == (1, "fc2")
    assert tt.open(a).info["framework"] == "toy"


@pytest.mark.usefixtures("toy_reader")
def test_errors_of_a_reader_are_tensortap_errors(tmp_path: Path) -> None:
    (tmp_path / "a.toy").write_bytes(b"other")
    with pytest.raises(RunUnreadable, match="not a toy file"):
        tt.open(tmp_path / "a.toy")
    path = write(tmp_path / "b.toy", tensors())
    path.write_bytes(path.read_bytes().replace(b'"dtype"', b'"dtyqe"'))
    with pytest.raises(RunUnreadable, match=r"b\.toy cannot be read: KeyError") as caught:
        list(tt.open(path))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_reader_is_imported_when_it_is_first_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("toy_reader_module")
    module.recognizes, module.open_source = ToyReader.recognizes, ToyReader.open_source
    register_reader("toy_reader_module")  # which does not exist yet
    try:
        monkeypatch.setitem(__import__("sys").modules, "toy_reader_module", module)
        assert len(tt.open(write(tmp_path / "a.toy", tensors()))) == 4
    finally:
        unregister_reader("toy_reader_module")


def test_without_the_reader_the_file_has_no_known_format(tmp_path: Path) -> None:
    with pytest.raises(RunUnreadable, match="no known format"):
        tt.open(write(tmp_path / "a.toy", tensors()))
