"""Files appear complete or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tensortap.errors import StoreWriteError
from tensortap.report.files.output import check, encoded, opened


def test_a_file_appears_when_it_is_done(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    with opened(target) as file:
        file.write(b"all of it")
        assert not target.exists()
    assert target.read_bytes() == b"all of it"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_failure_leaves_the_earlier_file_alone(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    target.write_text("before")
    with pytest.raises(KeyError), opened(target) as file:
        file.write(b"half")
        raise KeyError
    assert target.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreWriteError, match=r"out\.txt could not be written: No space left"),
        opened(tmp_path / "out.txt"),
    ):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with opened(tmp_path / "link") as file:
        file.write(b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"x"


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no such device")
def test_a_device_is_written_to_and_not_replaced() -> None:
    check("/dev/null")
    with opened("/dev/null") as file:
        file.write(b"x")
    assert not Path("/dev/null").is_file()


def test_stdout(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    check("-")
    sys.stdout.write("before ")
    with opened("-") as file:
        file.write("✖".encode())
    assert capsysbinary.readouterr().out == "before ✖".encode()


def test_an_unwritable_path_is_refused_beforehand(tmp_path: Path) -> None:
    check(tmp_path / "new.txt")
    with pytest.raises(StoreWriteError, match="it is a folder"):
        check(tmp_path)
    with pytest.raises(StoreWriteError, match="there is no folder"):
        check(tmp_path / "gone" / "new.txt")


def test_odd_bytes_of_a_path_are_spelled_out() -> None:
    assert list(encoded(["a\udc80"])) == [b"a\\udc80"]
