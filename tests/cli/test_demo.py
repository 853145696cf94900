"""`tensortap demo`: two real runs, what it says about them, where they go, and what happens without torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from showing import call

import tensortap
from support.read_page import ReadPage
from tensortap.cli.demo import _OTHERS, _free
from tensortap.demo.mistakes import MISTAKES

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def words(text: str) -> str:
    """However it was wrapped."""
    return " ".join(text.split())


def test_the_demo_prints_curves_verdict_and_mistake(capsys: Capsys) -> None:
    pytest.importorskip("torch")
    ended = call(capsys, "demo", "--steps", "2", "--keep", "tensors")
    assert (ended.code, ended.err) == (0, "")
    order = ["twice", "loss reference candidate", "last", "✖ The runs part in layers.2.norm2 (Norm)", "born here"]
    order += ["Planted: norm-epsilon in layers.2.norm2", "names exactly this module."]
    order += ["Report for a browser: runs/demo/report.html", "Next:", "Or in Python:"]
    told = words(ended.out)
    places = [told.index(part) for part in order]
    assert places == sorted(places)
    assert max(map(len, ended.out.splitlines())) <= 80
    page = ReadPage(Path("runs/demo/report.html").read_text())
    assert page.head["births"][page.head["first"]]["place"] == "layers.2.norm2"
    assert page.head["details"]
    for name in ("reference", "candidate"):
        run = tensortap.open(f"runs/demo/{name}")
        assert run.finished
        assert run.steps == [0, 1]
        assert not list(run.records(nonfinite=True))


def test_the_commands_it_ends_with_work(capsys: Capsys) -> None:
    pytest.importorskip("torch")
    ended = call(capsys, "demo", "--steps", "1", "--mistake", "gelu-tanh", "--out", "my runs")
    lines = [line.strip() for line in ended.out.splitlines()]
    commands = [line for line in lines[lines.index("Next:") :] if line.startswith("tensortap")]
    assert "tensortap show 'my runs/candidate' --module layers.3.mlp.act" in commands
    import shlex

    for command in commands[:3]:
        assert call(capsys, *shlex.split(command)[1:]).code == ("compare" in command), command
    assert Path("demo.json").stat().st_size
    code = "\n".join(lines[lines.index("Or in Python:") + 1 :])
    exec(code, {})
    assert "layers.3.mlp.act" in capsys.readouterr().out


def test_runs_without_a_mistake_match(capsys: Capsys) -> None:
    pytest.importorskip("torch")
    ended = call(capsys, "demo", "--steps", "2", "--mistake", "none")
    assert ended.code == 0
    assert "✔ The runs match" in ended.out
    assert "The losses are equal to the last bit." in ended.out
    assert "Nothing was planted, and nothing was found." in ended.out


def test_a_random_mistake_is_revealed_after_the_verdict(capsys: Capsys) -> None:
    pytest.importorskip("torch")
    ended = call(capsys, "demo", "--steps", "1", "--mistake", "random")
    assert ended.code == 0
    before, _, after = words(ended.out).partition("Planted: ")
    assert not any(name in before for name in MISTAKES if name != "nan")
    assert after.split()[0] in MISTAKES
    assert "names exactly this module." in after


def test_the_list(capsys: Capsys) -> None:
    ended = call(capsys, "demo", "--list")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines] == [*MISTAKES, *_OTHERS]
    assert max(map(len, lines)) <= 80
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("norm", "did you mean norm-epsilon? "), ("gelu-tan", "did you mean gelu-tanh? "), ("qqq", "; --list"), ("", ";")],
)
def test_an_unknown_mistake(capsys: Capsys, name: str, hint: str) -> None:
    ended = call(capsys, "demo", "--mistake", name)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"tensortap: --mistake {name}: no such mistake")
    assert hint in ended.err
    assert ended.err.count("\n") == 1


def test_the_same_seed_gives_the_same_run() -> None:
    torch = pytest.importorskip("torch")
    from tensortap.demo.model import train

    before, threads = torch.get_rng_state(), torch.get_num_threads()
    seen: list[tuple[int, float]] = []
    first = train("a", steps=2, on_step=lambda step, loss: seen.append((step, loss)))
    assert train("b", steps=2) == first
    assert train("c", steps=2, seed=1) != first
    assert seen == list(enumerate(first))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    digests = [[(r.key, r.summary.digest) for r in tensortap.open(name)] for name in ("a", "b")]
    assert digests[0] == digests[1]


def test_the_next_free_folder() -> None:
    assert _free(Path("runs/demo")) == Path("runs/demo")
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo-2").mkdir()
    assert _free(Path("runs/demo")) == Path("runs/demo-3")


@pytest.mark.parametrize("there", ["mine/reference", "mine/candidate"])
def test_a_run_is_not_replaced_unasked(capsys: Capsys, there: str) -> None:
    Path(there).mkdir(parents=True)
    Path(there, "run.json").write_text("{}")
    ended = call(capsys, "demo", "--out", "mine")
    assert (ended.code, ended.out) == (2, "")
    assert f"{there} has a run already: --overwrite" in ended.err


def test_runs_do_not_go_into_a_run(capsys: Capsys) -> None:
    Path("mine").mkdir()
    Path("mine/run.json").write_text("{}")
    ended = call(capsys, "demo", "--out", "mine", "--overwrite")
    assert (ended.code, ended.out) == (2, "")
    assert "mine is a run itself" in ended.err


@pytest.mark.parametrize("options", [["--keep", "all"], ["--steps", "0"]])
def test_wrong_usage(capsys: Capsys, options: list[str]) -> None:
    ended = call(capsys, "demo", *options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"tensortap: {options[0]} {options[1]}: ")


def test_without_torch_it_names_the_package_to_install(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensortap.demo.model", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert call(capsys, "demo", "--list").code == 0
    ended = call(capsys, "demo")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert 'pip install "tensortap[torch]"' in ended.err
    assert not Path("runs").exists()
