"""`tensortap replay`: exit codes, reports, and wrong usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from showing import call

import tensortap as tt
from support.read_page import ReadPage

torch = pytest.importorskip("torch")
Capsys = pytest.CaptureFixture[str]

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = torch.nn.Linear(4, 4), torch.nn.GELU()

    def forward(self, x):
        return self.act(self.fc(x))

def build():
    return Net()

def tanh(self, x, shift=0.0):
    return torch.nn.functional.gelu(x, approximate="tanh") + shift
"""


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("net.py").write_text(MODEL)
    own: dict[str, object] = {}
    exec(MODEL, own)
    torch.manual_seed(0)
    model = own["build"]()  # type: ignore[operator]
    kinds = ("input", "output", "grad_output", "param")
    with tt.capture(model, "run", keep="tensors", kinds=kinds) as tap:
        model(torch.randn(8, 4)).sum().backward()
        tap.step()


ACT = ("replay", "run", "--module", "act", "--model", "net.py:build")


def test_a_match_ends_with_0(capsys: Capsys) -> None:
    ended = call(capsys, *ACT)
    assert ended.code == 0
    assert "The runs match" in ended.out
    assert "act of net.py:build, replayed" in ended.out


def test_a_divergence_ends_with_1_and_is_reported(capsys: Capsys) -> None:
    ended = call(capsys, *ACT, "--with", "net.py:tanh", "--json", "-", "--markdown", "page.md")
    assert ended.code == 1
    facts = json.loads(ended.out)
    assert facts["first"]["module"] == "act"
    assert "act" in ended.err
    assert "act" in Path("page.md").read_text()
    assert call(capsys, *ACT, "--with", "net.py:tanh", "--exit-zero", "-q").code == 0
    assert call(capsys, *ACT, "--with", "net.py:tanh", "--rtol", "0.01", "-q").code == 0


def test_its_page_has_details_and_no_command_that_would_fail(capsys: Capsys) -> None:
    assert call(capsys, *ACT, "--with", "net.py:tanh", "--html", "page.html", "-q").code == 1
    page = ReadPage(Path("page.html").read_text(encoding="utf-8"))
    assert page.head["births"][0]["place"] == "act"
    assert page.head["births"][0]["command"] == ""
    assert str(page.head["births"][0]["row"]) in page.head["details"]


def test_arguments_are_json_or_text(capsys: Capsys) -> None:
    ended = call(capsys, *ACT, "--with", "net.py:tanh", "--arg", "shift=1.5", "--json", "-")
    row = json.loads(ended.out)["first"]
    assert row["max_abs"] == pytest.approx(1.5, rel=1e-2)
    ended = call(capsys, *ACT, "--with", "net.py:tanh", "--arg", "shift=much")
    assert (ended.code, "TypeError" in ended.err) == (2, True)


def test_a_reproduction_is_written(capsys: Capsys) -> None:
    ended = call(capsys, *ACT, "--repro", "bug")
    assert ended.code == 0
    assert "python bug/repro.py" in ended.err
    assert Path("bug/tensors.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--module", "atc"), "did you mean act"),
        (("--model", "net.py"), "file.py:function"),
        (("--model", "net.py:bild"), "build"),
        (("--with", "nothing.py:f"), "there is no file nothing.py"),
        (("--dtype", "int4"), "float64, float32"),
        (("--device", "moon"), "cannot be moved to moon"),
        (("--arg", "shift"), "NAME=VALUE"),
        (("--rtol", "-1"), "--rtol"),
        (("--step", "9"), "in step 9"),
        (("--json", "/nowhere/x.json"), "/nowhere"),
    ],
)
def test_wrong_usage(capsys: Capsys, args: tuple[str, str], told: str) -> None:
    ended = call(capsys, *ACT, *args)
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert told in ended.err
