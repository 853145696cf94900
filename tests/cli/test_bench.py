"""`tensortap bench`: what it prints, its JSON, and wrong usage."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from showing import call

Capsys = pytest.CaptureFixture[str]
SHORT = ("bench", "--device", "cpu", "--model", "llama-tiny", "--rounds", "1")


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_it_prints_the_cost_of_a_tap_and_its_limit(capsys: Capsys, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = call(capsys, *SHORT, "--out", tmp_path / "scratch", "--json", tmp_path / "bench.json")
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 80
    table = ended.out.partition("what the machine can do")[0]
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line}
    facts = json.loads((tmp_path / "bench.json").read_text())
    for way in ("plain", "summary", "tensors"):
        assert f"{facts['ways'][way]['ratio']:.3f}×" in rows[way]
    assert "summary is limited by" in ended.out
    assert "tensors is limited by" in ended.out
    assert not list((tmp_path / "scratch").iterdir())


def test_json_on_stdout_is_json_alone(capsys: Capsys) -> None:
    pytest.importorskip("torch")
    ended = call(capsys, *SHORT, "--keep", "summary", "--json", "-")
    assert list(json.loads(ended.out)["ways"]) == ["plain", "summary"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--keep", "all"), "summary, tensors"),
        (("--device", "tpu"), "auto, cpu, cuda"),
        (("--model", "gpt"), "llama-small"),
        (("--json", "/nowhere/bench.json"), "/nowhere"),
        (("--out", "/proc/nowhere"), "--out /proc/nowhere"),
    ],
)
def test_wrong_usage(capsys: Capsys, args: tuple[str, ...], told: str) -> None:
    pytest.importorskip("torch")
    ended = call(capsys, *SHORT, *args)
    assert ended.code == 2
    assert told in ended.err
    assert len(ended.err.splitlines()) == 1
