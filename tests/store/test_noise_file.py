"""Noise files: written and read back; every damaged one ends in one error."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tensortap.errors import RunUnreadable
from tensortap.store.noise_file import _SCHEMA, read_noise, write_noise

ROWS = [((f"layers.{number}", 0, "output", "0"), (1e-3 * number, 2e-3)) for number in range(20)]


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    write_noise(tmp_path / "noise", ROWS, {"seeds": "1", "model": "Net"}, overwrite=False)
    return tmp_path / "noise"


def rewritten(path: Path, columns: dict[str, Any], **metadata: str) -> Path:
    """The file with other columns or another header."""
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    arrays = [columns.get(name, table.column(name).combine_chunks()) for name in table.column_names]
    about = {**table.schema.metadata, **{name.encode(): value.encode() for name, value in metadata.items()}}
    schema = pa.schema([(name, array.type) for name, array in zip(table.column_names, arrays, strict=True)], about)
    if schema.equals(_SCHEMA.with_metadata(None)):
        schema = _SCHEMA.with_metadata(about)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return path


def strings(offsets: list[int], text: bytes = b"layers") -> Any:
    return pa.Array.from_buffers(
        pa.string(), len(offsets) - 1, [None, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(text)]
    )


def test_written_files_are_read_back(noise: Path) -> None:
    found = read_noise(noise)
    assert len(found) == len(ROWS)
    assert all(found.of(spot) == spread for spot, spread in ROWS)


@pytest.mark.parametrize("wild", [1 << 30, 7, -1])
def test_wild_offsets_are_an_error_and_no_crash(noise: Path, wild: int) -> None:
    rewritten(noise, {"module": strings([0] * 10 + [wild] + [6] * 10)})
    with pytest.raises(RunUnreadable, match=r"noise cannot be read as a noise file.*measure the noise again"):
        read_noise(noise)


def test_text_that_is_not_utf8(noise: Path) -> None:
    rewritten(noise, {"path": strings([0] * 20 + [2], b"\xff\xfe")})
    with pytest.raises(RunUnreadable, match="noise file"):
        read_noise(noise)


@pytest.mark.parametrize("value", [float("nan"), -1.0, None])
def test_an_invalid_spread_is_refused(noise: Path, value: float | None) -> None:
    rewritten(noise, {"rel_l2": pa.array([0.0] * 19 + [value], pa.float64())})
    with pytest.raises(RunUnreadable, match="noise file"):
        read_noise(noise)


@pytest.mark.parametrize("version", ["", "two", "1.5"])
def test_a_version_that_is_not_a_number(noise: Path, version: str) -> None:
    with pytest.raises(RunUnreadable, match="noise file"):
        read_noise(rewritten(noise, {}, version=version))


def test_a_newer_version_asks_for_an_upgrade(noise: Path) -> None:
    with pytest.raises(RunUnreadable, match="upgrade"):
        read_noise(rewritten(noise, {"kind": pa.array(range(20))}, version="9"))


def test_other_columns_are_refused(noise: Path) -> None:
    with pytest.raises(RunUnreadable, match="columns"):
        read_noise(rewritten(noise, {"call": pa.array(["0"] * 20)}))


def test_flipped_bits_and_cut_off_files_never_crash(noise: Path) -> None:
    data = noise.read_bytes()
    dice = np.random.default_rng(0)
    for number in range(400):
        torn = bytearray(data)
        for _ in range(1 + number % 3):
            torn[dice.integers(len(data))] ^= 1 << int(dice.integers(8))
        noise.unlink()  # a new file: the old one may still be mapped
        noise.write_bytes(torn if number % 4 else torn[: dice.integers(len(data))])
        with suppress(RunUnreadable):
            assert len(read_noise(noise)) <= len(ROWS)
