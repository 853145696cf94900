"""An HDF5 file whose writes fail stays as it was at the last flush, whichever write fails first."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from tensortap.store.exports.committed_file import CommittedFile
from tensortap.store.exports.hdf5_file import create_file, put, set_attributes

SIZES = (3, 70_000, 0, 500, 9000)


def write(path: Path) -> int:
    """Write one group after the other, and return how many were flushed."""
    flushed = 0
    file = create_file(path)
    set_attributes(file, {"complete": False})
    try:
        file.flush()
        for number, size in enumerate(SIZES):
            group = file.create_group(f"{number:04d}", track_order=True)
            put(group, "values", np.full(size, number, np.float32), {"path": "x" * size})
            put(group, "none", None, {})
            file.flush()
            flushed += 1
        set_attributes(file, {"complete": True})
    finally:
        file.close()
    return flushed


def groups(path: Path) -> int:
    """Return the number of groups in the file, all of them intact."""
    with h5py.File(path, "r") as file:
        for (name, group), size in zip(file.items(), SIZES, strict=False):
            assert (group["values"][()] == int(name)).all() and group["values"].shape == (size,)
            assert group["none"].attrs["none"] and len(group["values"].attrs["path"]) == size
        assert file.attrs["complete"] == (len(file) == len(SIZES))
        return len(file)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert write(tmp_path / "a.h5") == groups(tmp_path / "a.h5") == len(SIZES)


whole_write = CommittedFile._write_at


def test_the_file_has_what_was_flushed_wherever_the_room_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "whole.h5")
    whole = (tmp_path / "whole.h5").stat().st_size
    flushed_before = 0
    for room in range(4096, whole, 2999):
        path = tmp_path / f"{room}.h5"

        def limited(self: CommittedFile, start: int, data: memoryview, room: int = room) -> bool:
            if self.failure is None and start + len(data) > room:
                self._file.seek(start)
                self._file.write(data[: max(room - start, 0)])  # a full disk takes a part of the last write
                self.failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return whole_write(self, start, data)

        with monkeypatch.context() as patch:
            patch.setattr(CommittedFile, "_write_at", limited)
            with pytest.raises(OSError, match="No space left on device"):
                write(path)
        flushed = groups(path)
        assert flushed_before <= flushed < len(SIZES) + 1
        flushed_before = flushed
    assert flushed_before >= 3


def test_changes_wait_for_the_flush(tmp_path: Path) -> None:
    file = CommittedFile(tmp_path / "a")
    file.write(b"0123456789")
    file.flush()
    file.seek(3)
    file.write(b"abc")
    file.seek(8)
    file.write(b"xyz")  # partly a change, partly new
    assert (tmp_path / "a").read_bytes() == b"0123456789z"
    file.seek(0)
    assert file.read() == b"012abc67xyz"
    file.seek(4)
    file.write(b"B")
    file.seek(2)
    assert file.read(4) == b"2aBc"
    file.flush()
    assert (tmp_path / "a").read_bytes() == b"012aBc67xyz"
    file.truncate(2)
    file.close()
    assert (tmp_path / "a").read_bytes() == b"01"
