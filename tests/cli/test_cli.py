"""The command line as a whole: how it starts, helps and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from showing import call, write

import tensortap
from tensortap.cli import show

Capsys = pytest.CaptureFixture[str]
VERBS = (
    "show",
    "export",
    "compare",
    "report",
    "view",
    "replay",
    "demo",
    "check-hooks",
    "times",
    "bench",
    "health",
    "run",
)
SCRIPT = Path(sys.executable).with_name("tensortap")


def test_version(capsys: Capsys) -> None:
    said = call(capsys, "--version")
    assert (said.code, said.out) == (0, f"tensortap {tensortap.__version__}\n")


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(capsys: Capsys, verb: str) -> None:
    said = call(capsys, verb, "--help")
    assert said.code == 0
    assert f"Example:\n    tensortap {verb}" in said.out


def test_help_lists_the_verbs(capsys: Capsys) -> None:
    said = call(capsys, "--help")
    assert said.code == 0
    assert all(f"\n  {verb} " in said.out for verb in VERBS)


def test_help_describes_every_verb(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    listed = call(capsys, "--help").out.partition("Commands:\n")[2].splitlines()
    assert len(listed) == 13
    assert [line for line in listed if not line.endswith(".") or line.endswith("...") or len(line) > 80] == []


def test_unknown_words_are_wrong_usage(capsys: Capsys) -> None:
    assert call(capsys, "shwo").code == 2
    assert call(capsys, "show", "--colour").code == 2
    assert call(capsys, "show").code == 2


def test_the_module_is_the_command(tmp_path: Path) -> None:
    write(tmp_path / "a")
    commands = [[sys.executable, "-m", "tensortap"]]
    if SCRIPT.exists():
        commands.append([str(SCRIPT)])
    for args in (["--help"], ["show", str(tmp_path / "a")], ["show", "gone"]):
        ended = [subprocess.run([*command, *args], capture_output=True, text=True) for command in commands]
        assert len({(end.returncode, end.stdout, end.stderr) for end in ended}) == 1
        assert "Traceback" not in ended[0].stderr


def test_starting_loads_nothing_heavy() -> None:
    code = (
        "import sys, tensortap.cli\n"
        "heavy = {'torch', 'paddle', 'pyarrow', 'numba', 'safetensors', 'rich.console'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)))"
    )
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert end.stderr.strip() == ""


def test_interruption_is_one_line(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "print_page", interrupted)
    said = call(capsys, "show", "a")
    assert (said.code, said.out, said.err) == (130, "", "tensortap: interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break differently there")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_is_not_an_error(tmp_path: Path, options: list[str]) -> None:
    write(tmp_path / "a")
    command = [sys.executable, "-m", "tensortap", "show", str(tmp_path / "a"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141
