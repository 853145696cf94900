"""`tensortap demo`: a real run, where it goes, and what happens without torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from showing import call

import tensortap
from tensortap.cli.demo import _free

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)


def test_the_demo_leaves_a_run_and_shows_it(capsys: Capsys) -> None:
    pytest.importorskip("torch")
    said = call(capsys, "demo", "--steps", "2", "--keep", "tensors")
    assert said.code == 0
    assert "step 1   loss" in said.out
    assert "Decoder" in said.out
    assert "all bytes kept" in said.out
    assert "tensortap show runs/demo --nonfinite" in said.out
    run = tensortap.open("runs/demo")
    assert run.finished
    assert run.steps == [0, 1]
    assert not list(run.records(nonfinite=True))


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tensortap.demo.model import train

    before = torch.get_rng_state()
    seen: list[tuple[int, float]] = []
    first = train("a", steps=2, on_step=lambda step, loss: seen.append((step, loss)))
    assert train("b", steps=2) == first
    assert train("c", steps=2, seed=1) != first
    assert seen == list(enumerate(first))
    assert torch.equal(torch.get_rng_state(), before)
    digests = [[(r.key, r.summary.digest) for r in tensortap.open(name)] for name in ("a", "b")]
    assert digests[0] == digests[1]


def test_the_next_free_folder() -> None:
    assert _free(Path("runs/demo")) == Path("runs/demo")
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo-2").mkdir()
    assert _free(Path("runs/demo")) == Path("runs/demo-3")


def test_a_run_is_not_replaced_unasked(capsys: Capsys) -> None:
    Path("mine").mkdir()
    Path("mine/run.json").write_text("{}")
    said = call(capsys, "demo", "--out", "mine")
    assert (said.code, said.out) == (2, "")
    assert "--overwrite" in said.err


@pytest.mark.parametrize("options", [["--keep", "all"], ["--steps", "0"]])
def test_wrong_usage(capsys: Capsys, options: list[str]) -> None:
    said = call(capsys, "demo", *options)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"tensortap: {options[0]} {options[1]}: ")


def test_without_torch_it_says_what_to_install(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensortap.demo.model", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    said = call(capsys, "demo")
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert 'pip install "tensortap[torch]"' in said.err
    assert not Path("runs").exists()
