"""`tensortap run`: a program as it runs alone, its exit code, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

import tensortap
from tensortap.cli.run import _conclude
from tensortap.launch.settings import LaunchSettings
from tensortap.launch.startup import watching

RUN = [sys.executable, "-m", "tensortap", "run"]
NOTHING = "tensortap: nothing was recorded"
TRAINS = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LeakyReLU(float(sys.argv[1])))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""
DESCRIBES = """
import json, os, sys
print(json.dumps([__name__, __file__, sys.argv, sys.path, sys.stdin.read(), sys.flags.optimize, sys.warnoptions,
                  type(__spec__).__name__, sys.modules["__main__"].__dict__ is globals(), sorted(sys.modules)]))
print("to stderr", file=sys.stderr)
"""


def program(folder: Path, text: str, name: str = "program.py") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return name


def call(folder: Path, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=300)


def test_a_script_sees_what_it_sees_alone(tmp_path: Path) -> None:
    program(tmp_path, DESCRIBES, "scripts/describes.py")
    given = ["scripts/describes.py", "--out", "x", "-m", "--help"]
    flags = [sys.executable, "-O", "-W", "error"]
    alone = call(tmp_path, *flags, *given, stdin="typed")
    recorded = call(tmp_path, *flags, *RUN[1:], "--steps", "0", *given, stdin="typed")
    theirs, ours = json.loads(alone.stdout), json.loads(recorded.stdout)
    assert ours[:-1] == theirs[:-1]
    assert not {"numpy", "tensortap", "torch"} & set(ours[-1])
    assert recorded.stderr.startswith(alone.stderr + NOTHING) and recorded.stderr.count("\n") == 2
    assert (alone.returncode, recorded.returncode) == (0, 0)


def test_a_module_and_its_own_sitecustomize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, DESCRIBES, "package/__main__.py")
    program(tmp_path, "print('of the environment')", "site/sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    alone = call(tmp_path, sys.executable, "-m", "package", "--lr", "3")
    recorded = call(tmp_path, *RUN, "-m", "package", "--lr", "3")
    *said, described = recorded.stdout.splitlines()
    assert said == ["of the environment"] * 2  # by the interpreter of the command, and by that of the program
    assert json.loads(described)[:-1] == json.loads(alone.stdout.splitlines()[1])[:-1]


@pytest.mark.parametrize("ending", ["sys.exit(7)", "raise ValueError('mine')", "os._exit(3)"])
def test_exit_codes_and_tracebacks(ending: str, tmp_path: Path) -> None:
    name = program(tmp_path, f"import os, sys\n{ending}\n")
    alone, recorded = call(tmp_path, sys.executable, name), call(tmp_path, *RUN, name)
    assert recorded.returncode == alone.returncode
    assert recorded.stderr.replace(alone.stderr, "", 1).count("\n") <= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [[], ["--compare", "nowhere"]])
def test_signals_reach_the_program(number: signal.Signals, options: list[str], tmp_path: Path) -> None:
    name = program(tmp_path, "import time\nprint('started', flush=True)\ntime.sleep(60)\n")
    started = time.monotonic()
    # In a group of its own: a terminal sends an interrupt to all processes of a group, `kill` to one.
    with subprocess.Popen(
        [*RUN, *options, name], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"started\n"
        if number is signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode in (-number, 128 + number)
    assert time.monotonic() - started < 50


def test_the_verdict_is_the_exit_code(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    name = program(tmp_path, TRAINS)
    first = call(tmp_path, *RUN, "--out", "runs/a", "--steps", "0-5", name, "0.1")
    assert first.returncode == 0, first.stderr
    assert "tensortap: recording Sequential, trained by SGD into runs/a" in first.stderr
    assert tensortap.open(tmp_path / "runs/a").steps == [0, 1]
    same = call(tmp_path, *RUN, "--compare", "runs/a", name, "0.1")
    assert (same.returncode, "The runs match" in same.stdout) == (0, True)
    assert tensortap.open(tmp_path / "runs/program").steps == [0, 1]
    other = call(tmp_path, *RUN, "--compare", "runs/a", name, "0.3", "5")
    assert (other.returncode, "part in 1 (LeakyReLU)" in other.stdout) == (5, True)
    assert tensortap.open(tmp_path / "runs/program-2").steps == [0, 1]


def test_every_model_that_a_program_trains_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")

    def record(name: str, *rates: float) -> Path:
        torch.manual_seed(0)
        with watching(LaunchSettings(str(tmp_path / name)), "torch"):
            for rate in rates:
                model = torch.nn.Linear(2, 2)
                optimizer = torch.optim.SGD(model.parameters(), lr=rate)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        return tmp_path / name

    def conclude(candidate: Path) -> tuple[int, str]:
        with pytest.raises(typer.Exit) as ended:
            _conclude(str(reference), candidate, 0)
        said = capsys.readouterr()
        return ended.value.exit_code, " ".join((said.out + said.err).split())

    reference = record("a", 0.1, 0.1)
    notices = tensortap.open(reference).notices
    assert any("trains another model later, which is recorded into a-2" in text for text in notices)
    code, said = conclude(record("b", 0.1, 0.3))
    assert code == 1 and "The runs match" in said and "lr is 0.1 in the reference and 0.3" in said
    code, said = conclude(record("c", 0.1))
    assert code == 3 and "a-2 was not compared" in said
    record("c-2", 0.1)  # of another launch
    assert conclude(tmp_path / "c")[0] == 3


def test_a_comparison_without_a_recording_does_not_succeed(tmp_path: Path) -> None:
    ended = call(tmp_path, *RUN, "--compare", "runs/a", program(tmp_path, "print('done')"))
    assert (ended.returncode, ended.stdout, ended.stderr.count(NOTHING)) == (3, "done\n", 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gone.py"], "gone.py does not exist"),
        (["no-such-command"], "neither a script nor a command"),
        (["--kinds", "outputs", "program.py"], "'outputs' is not a kind"),
        (["--steps", "x", "program.py"], "steps: 'x' is not numbers"),
        (["--out", "full", "program.py"], "exists already"),
    ],
)
def test_wrong_usage_starts_nothing(arguments: list[str], words: str, tmp_path: Path) -> None:
    program(tmp_path, "print('started')")
    program(tmp_path, "", "full/file")
    ended = call(tmp_path, *RUN, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "") and words in ended.stderr


def test_ranks_that_start_alone_must_share_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    ended = call(tmp_path, *RUN, program(tmp_path, ""))
    assert ended.returncode == 2 and "several ranks write one run" in ended.stderr
