"""The command line as a whole: how it starts, helps and ends."""

from __future__ import annotations

import os
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
    "watch",
    "upload",
    "zoom",
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
    assert len(listed) == len(VERBS)
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


@pytest.mark.skipif(sys.platform == "win32", reason="a process there gets no SIGINT of its own")
@pytest.mark.parametrize("during", ["tensortap.capture", "tensortap.cli"])
def test_interruption_of_an_import_is_one_line(tmp_path: Path, during: str) -> None:
    """sitecustomize interrupts the process when it looks for a module, at an early and a late one."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {during!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    commands = [[sys.executable, "-m", "tensortap"], [sys.executable, "-mtensortap"]]
    if SCRIPT.exists():
        commands.append([str(SCRIPT)])
    for command in commands:
        ended = subprocess.run([*command, "--help"], env={**os.environ, "PYTHONPATH": paths}, capture_output=True)
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"tensortap: interrupted\n")
    program = "import tensortap.cli"  # the library leaves the signals of another program alone
    own = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True)
    assert b"KeyboardInterrupt" in own.stderr


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
