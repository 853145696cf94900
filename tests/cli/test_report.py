"""`tensortap report` and `tensortap view`: real runs in, a page out, and one clear error where that is not possible."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from showing import call, write

from support.read_page import ReadPage

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    write(tmp_path / "a", steps=1)
    write(tmp_path / "same", steps=1)
    write(tmp_path / "b", steps=2)


def test_two_runs_make_a_page_and_end_as_compare_does(capsys: Capsys) -> None:
    ended = call(capsys, "report", "a", "same", "-o", "page.html")
    assert ended.code == 0
    assert "Page written to page.html" in ended.out
    page = ReadPage(Path("page.html").read_text())
    assert (page.head["page"], page.head["verdict"], page.head["rows"]) == ("comparison", "match", 8)
    assert page.head["details"]
    assert ended.out.splitlines()[0] == page.head["sentence"]


def test_a_page_about_a_run_with_a_nan_ends_with_0(capsys: Capsys) -> None:
    ended = call(capsys, "report", "b")
    assert ended.code == 0
    page = ReadPage(Path("report.html").read_text())
    assert (page.head["page"], page.head["verdict"]) == ("run", "suspicious")
    assert "layers.0.fc2" in ended.out


def test_a_page_about_nothing_ends_with_3(capsys: Capsys) -> None:
    ended = call(capsys, "report", "b", "--step", "99")
    assert ended.code == 3
    assert "There is nothing to examine" in ended.out
    assert ReadPage(Path("report.html").read_text()).head["verdict"] == "empty"


def test_options_select_the_content_of_the_page(capsys: Capsys) -> None:
    assert call(capsys, "report", "b", "--step", "1", "--kind", "output", "--module", "layers.0.*", "-q").out == ""
    assert ReadPage(Path("report.html").read_text()).head["rows"] == 2
    call(capsys, "report", "a", "b", "--kind", "output")
    assert ReadPage(Path("report.html").read_text()).head["rows"] == 4


def test_compare_writes_the_page_too(capsys: Capsys) -> None:
    assert call(capsys, "compare", "a", "same", "--html", "page.html").code == 0
    page = ReadPage(Path("page.html").read_text())
    assert page.head["verdict"] == "match"
    assert page.head["details"]


def test_the_page_goes_to_stdout() -> None:
    command = [sys.executable, "-m", "tensortap", "report", "a", "same", "-o", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert ReadPage(done.stdout.decode()).head["verdict"] == "match"
    assert b"The runs match" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("gone", "a"), "gone does not exist"),
        (("gone",), "gone does not exist"),
        (("a", "same", "-o", "nowhere/page.html"), "there is no folder"),
        (("a", "same", "-o", "."), "it is a folder"),
        (("a", "-o", ""), "the path of a report is empty"),
        (("a", "--rtol", "0.1"), "--rtol needs two runs"),
        (("a", "--map", "names.txt"), "--map needs two runs"),
        (("a", "--map", "rules.toml"), "--map needs two runs"),
        (("a", "--device", "cuda"), "--device needs two runs"),
        (("a", "--noise", "same"), "--noise needs two runs"),
        (("a", "--step", "0:1"), "--step 3:4 needs two runs"),
        (("a", "same", "--kind", "outputs"), "did you mean output?"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(capsys: Capsys, args: tuple[str, ...], words: str) -> None:
    before = sorted(Path().iterdir())
    ended = call(capsys, "report", *args)
    assert ended.code == 2
    assert ended.err.startswith("tensortap: ")
    assert words in ended.err
    assert len(ended.err.splitlines()) == 1
    assert sorted(Path().iterdir()) == before


def test_a_page_that_fails_half_way_leaves_the_old_one(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensortap.report.html.data.blocks import DataBlock

    Path("page.html").write_text("the old one")

    def full(self: DataBlock) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DataBlock, "element", full)
    ended = call(capsys, "report", "a", "same", "-o", "page.html")
    assert ended.code == 2
    assert "page.html could not be written: No space left on device" in ended.err
    assert Path("page.html").read_text() == "the old one"
    assert [path.name for path in Path().iterdir() if "partial" in path.name] == []


@contextmanager
def control_c_is_heard() -> Iterator[None]:
    """Whether new processes ignore SIGINT: tests in the background ignore it, and their children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("runs", [("a", "same"), ("b",)], ids=len)
def test_view_prints_an_address_serves_it_and_ends_with_control_c(runs: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tensortap", "view", *runs, "--no-browser"]
    with (
        control_c_is_heard(),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running,
    ):
        assert running.stdout is not None
        assert running.stderr is not None
        try:
            lines = iter(running.stdout.readline, "")
            url = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32,}/", line)))
            with urllib.request.urlopen(url, timeout=30) as response:
                page = ReadPage(response.read().decode())
            with urllib.request.urlopen(f"{url}detail?row=0", timeout=30) as response:
                assert response.headers["Content-Type"] == "application/json"
        finally:
            running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0
        assert running.stderr.read() == ""
    assert page.head["page"] == ("comparison" if len(runs) == 2 else "run")


@pytest.mark.parametrize("args", [("gone",), ("a", "gone"), ("a", "--rtol", "1")])
def test_view_of_a_missing_run_is_one_line(capsys: Capsys, args: tuple[str, ...]) -> None:
    ended = call(capsys, "view", *args, "--no-browser")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
