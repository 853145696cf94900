"""The command line on a real terminal: escape codes, interruption and completion."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from showing import call, write

from support.traces import Trace
from tensortap.core.records import Key, Record
from tensortap.kernels import summarize
from tensortap.report.files import comparison_csv, run_json
from tensortap.report.html import comparison as comparison_html
from tensortap.report.html import run as run_html
from tensortap.store import RunWriter
from tensortap.store.exports import export as exports

if sys.platform == "win32":
    pytest.skip("there are no pseudo-terminals", allow_module_level=True)

Capsys = pytest.CaptureFixture[str]
COMMAND = [sys.executable, "-m", "tensortap"]
ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_STEP_SUMMARY", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    write(tmp_path / "a", steps=1)
    write(tmp_path / "b", steps=2)
    made = Trace()
    made.module("forward (root) (Net)", 10, 200)
    made.write(tmp_path / "trace.json")
    values = np.arange(4, dtype=np.float32)
    with RunWriter(tmp_path / "kept", info={"framework": "torch", "model": "Net"}) as writer:
        where = writer.put("fc output 0", values, step=0)
        key = Key(0, 0, "forward", "fc", 0, "output", "0")
        writer.append(Record(key, 0, 0, "Linear", "float32", (4,), 0, summarize(values), where))


def on_terminal(*words: str, **environment: str) -> str:
    """Run a command with a pseudo-terminal as its stdin, stdout and stderr; return what the terminal received."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [*COMMAND, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **environment},
        start_new_session=True,
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux reports the end this way
            break
        if not part:
            break
        found += part
    os.close(ours)
    assert process.wait(60) in (0, 1)
    return found.decode()


VERBS = {
    "show": ("show", "b"),
    "compare": ("compare", "a", "b"),
    "report": ("report", "b"),
    "export": ("export", "kept", "--to", "npz", "--out", "kept.npz", "--overwrite"),
    "times": ("times", "trace.json"),
    "demo": ("demo", "--steps", "1"),
    "help": ("--help",),
}
OTHER_WISHES = {"show": {"TERM": "dumb"}, "compare": {"NO_COLOR": "1", "FORCE_COLOR": "1"}}


@pytest.mark.parametrize("verb", VERBS)
def test_no_color_means_no_escape_codes(verb: str) -> None:
    if verb == "demo":
        pytest.importorskip("torch")
    ended = on_terminal(*VERBS[verb], **OTHER_WISHES.get(verb, {"NO_COLOR": "1"}))
    assert ended.strip() and ESCAPE not in ended
    if verb in ("show", "export"):  # a page and a progress bar, to see that the test can fail
        assert ESCAPE in on_terminal(*VERBS[verb])


def test_a_usage_error_has_no_escape_codes() -> None:
    end = subprocess.run([*COMMAND, "show", "--limit", "x"], env={**os.environ, "NO_COLOR": "1"}, capture_output=True)
    assert end.returncode == 2 and b"\x1b" not in end.stderr


# --- interruption --------------------------------------------------------------------------------------------------
def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        (("show", "a", "--json"), run_json, "record_object"),
        (("compare", "a", "b", "--csv", "out"), comparison_csv, "write"),
        (("compare", "a", "b", "--html", "out"), comparison_html, "page"),
        (("report", "a", "b", "-o", "out"), comparison_html, "page"),
        (("report", "a", "-o", "out"), run_html, "page"),
        (("export", "kept", "--to", "npz", "--out", "out.npz"), exports, "export"),
    ],
)
def test_an_interrupted_verb_prints_one_line_and_leaves_no_partial_file(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], module: Any, name: str
) -> None:
    before = sorted(os.listdir())
    monkeypatch.setattr(module, name, interrupt)
    ended = call(capsys, *words)
    assert (ended.code, ended.err) == (130, "tensortap: interrupted\n")
    assert sorted(os.listdir()) == before


def test_a_signal_ends_a_verb_with_one_line() -> None:
    slow = "import time, tensortap.cli, tensortap.times as times; times.read_profile = lambda *_: time.sleep(60)"
    words = [sys.executable, "-c", f"{slow}; tensortap.cli.main()", "times", "trace.json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        _until_blocked(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "tensortap: interrupted\n")


def _until_blocked(pid: int) -> None:
    """Wait until the process sleeps: it is idle then, after its imports."""
    deadline = time.monotonic() + 60
    last = -1
    while time.monotonic() < deadline:
        spent = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        if spent == last and spent > 20:  # no CPU time since the last look, and the imports are done
            return
        last = spent
        select.select([], [], [], 1.0)


# --- errors --------------------------------------------------------------------------------------------------------
def test_a_long_error_is_shortened(capsys: Capsys) -> None:
    ended = call(capsys, "show", "a", "--kind", "x" * 100_000)
    assert ended.code == 2
    assert len(ended.err) < 2_500 and ended.err.startswith("tensortap: --kind xxx") and "…" in ended.err


# --- completion ----------------------------------------------------------------------------------------------------
COMPLETE = """
source ./completion
offer() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _tensortap_completion ./command
    echo "${COMPREPLY[*]}"
}
offer tensortap comp
offer tensortap compare --until
offer tensortap show runs/a
offer tensortap ""
complete -p tensortap
"""


def test_verbs_options_and_paths_are_completed() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    command = Path("command")
    command.write_text(f'#!{bash}\nexec {sys.executable} -m tensortap "$@"\n')
    command.chmod(0o755)
    show = f"{sys.executable} -m tensortap --show-completion; true"  # in a shell, which it must recognise
    Path("completion").write_text(subprocess.run([bash, "-c", show], capture_output=True, text=True).stdout)
    end = subprocess.run([bash, "--norc", "-c", COMPLETE], capture_output=True, text=True, check=True)
    verb, option, path, *verbs, how = end.stdout.splitlines()
    assert (verb, option) == ("compare", "--until-first")
    assert path == "" and "-o default" in how  # the shell itself completes paths where nothing else is offered
    assert {"show", "compare", "report", "view"} <= set(" ".join(verbs).split())


def test_completion_is_installed_for_the_shell(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(
        [bash, "-c", f"{sys.executable} -m tensortap --install-completion; true"],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        check=True,
    )
    installed = [path for path in home.rglob("*") if path.is_file() and "_TENSORTAP_COMPLETE" in path.read_text()]
    assert len(installed) == 1 and re.search(re.escape(str(installed[0])), (home / ".bashrc").read_text())
