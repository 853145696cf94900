"""`compare(zoom=...)`, `compare --zoom` and `check(zoom=...)`: the verdict goes on to the line."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from zoom.planted import ATTENTION, build

import tensortap as tt
from tensortap.cli import app, main
from tensortap.errors import UsageError
from tensortap.replay.recorded_call import CallSelector
from tensortap.zoom.runs import ZoomOptions, zoom_runs

BUILD = """

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(16, 16), Block(), nn.Linear(16, 16)

    def forward(self, x):
        return self.last(self.block(self.first(x)))

def make():
    torch.manual_seed(0)
    return Model()
"""
RIGHT = ATTENTION + BUILD
WRONG = RIGHT.replace("softmax(-1)", "softmax(-2)")
LINE = WRONG[: WRONG.index("softmax(-2)")].count("\n") + 1


def record(model: Any, path: Path, **options: Any) -> Path:
    kinds = ("input", "output", "grad_output", "param_grad", "param")
    with tt.capture(model, path, **{"keep": "tensors", "kinds": kinds, **options}):
        model(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    return path


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Any, Any]:
    return build(tmp_path, "reference", RIGHT), build(tmp_path, "candidate", WRONG)


def test_compare_goes_on_to_the_line(sides: tuple[Any, Any], tmp_path: Path) -> None:
    reference, candidate = (module.make() for module in sides)
    runs = record(reference, tmp_path / "a"), record(candidate, tmp_path / "b", keep="summary")
    result = tt.compare(*runs, zoom=(reference, candidate))
    assert result.verdict == "diverged" and result.first.module == "block"
    assert result.zoom is not None and result.zoom.line.line == LINE
    assert f"Zoomed in: In {Path(sides[1].__file__).name}:{LINE}" in str(result)
    assert not any("to find the line" in note for note in result.notes)
    saved = json.loads(result.save(tmp_path / "result.json").read_text(encoding="utf-8"))
    assert saved["zoom"]["line"]["line"] == LINE


@pytest.mark.parametrize(("keep", "kept"), [("tensors", True), ({"block": "tensors", "*": "summary"}, False)])
def test_a_note_says_whose_parameters_the_candidate_has(
    sides: tuple[Any, Any], tmp_path: Path, keep: Any, kept: bool
) -> None:
    reference, candidate = (module.make() for module in sides)
    runs = record(reference, tmp_path / "a", keep=keep), record(candidate, tmp_path / "b", keep="summary")
    options = ZoomOptions(*runs, CallSelector("block"), reference, candidate)
    notes = zoom_runs(options).notes
    assert ("the candidate has the parameters of the reference: its own run kept none" in notes) == kept


def test_the_command_goes_on_to_the_line(sides: tuple[Any, Any], tmp_path: Path) -> None:
    reference, candidate = sides
    runs = record(reference.make(), tmp_path / "a"), record(candidate.make(), tmp_path / "b", keep="summary")
    given = f"{reference.__file__}:make,{candidate.__file__}:make"
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "--zoom", given])
    assert done.exit_code == 1 and f":{LINE}" in done.output.replace("\n", "")
    wrong = CliRunner().invoke(app, ["compare", *map(str, runs), "--zoom", "one.py:make"])
    assert wrong.exit_code != 0


@pytest.mark.parametrize("where", ["def make():", "def forward(self, x):"])
@pytest.mark.parametrize("side", [0, 1])
def test_an_interrupted_zoom_prints_one_line_and_leaves_nothing(
    sides: tuple[Any, Any],
    tmp_path: Path,
    where: str,
    side: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [record(module.make(), tmp_path / name) for module, name in zip(sides, "ab", strict=True)]
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    file = Path(sides[side].__file__)
    file.write_text(re.sub(rf"( *){re.escape(where)}", r"\g<0>\n\1    raise KeyboardInterrupt", file.read_text()))
    before = sorted(tmp_path.rglob("*"))
    given = ",".join(f"{module.__file__}:make" for module in sides)
    monkeypatch.setattr(sys, "argv", ["tensortap", "compare", *map(str, runs), "--zoom", given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "tensortap: interrupted\n")
    assert [path for path in sorted(tmp_path.rglob("*")) if path.parent.name != "__pycache__"] == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_match_says_why_there_is_no_line(sides: tuple[Any, Any], tmp_path: Path) -> None:
    reference, _ = sides
    runs = record(reference.make(), tmp_path / "a"), record(reference.make(), tmp_path / "b")
    result = tt.compare(*runs, zoom=(reference.make(), reference.make()))
    assert result.zoom is None and "not zoomed in: nothing diverged" in result.notes


def test_without_inputs_the_comparison_is_not_lost(sides: tuple[Any, Any], tmp_path: Path) -> None:
    reference, candidate = (module.make() for module in sides)
    runs = (record(model, tmp_path / name, keep="summary") for model, name in ((reference, "a"), (candidate, "b")))
    result = tt.compare(*runs, zoom=(reference, candidate))
    assert result.verdict == "diverged" and result.zoom is None
    assert any(note.startswith("not zoomed in: ") for note in result.notes)


def test_check_goes_on_to_the_line(sides: tuple[Any, Any], tmp_path: Path) -> None:
    reference, candidate = (module.make() for module in sides)
    run = record(reference, tmp_path / "a")
    before = [parameter.clone() for parameter in candidate.parameters()]
    with tt.check(candidate, run, zoom=reference) as check:
        candidate(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    assert check.result.verdict == "diverged" and check.result.zoom.line.line == LINE
    assert "Zoomed in: In " in str(check.result)
    assert all(torch.equal(one, two) for one, two in zip(before, candidate.parameters(), strict=True))


def test_check_takes_the_model_of_the_truth(sides: tuple[Any, Any], tmp_path: Path) -> None:
    reference, candidate = (module.make() for module in sides)
    run = record(reference, tmp_path / "a")
    with tt.check(candidate, run, truth=reference, zoom=True) as check:
        candidate(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    assert check.result.zoom.line.line == LINE
    with pytest.raises(UsageError, match="zoom=True needs the reference's model"):
        tt.check(candidate, run, zoom=True)


def test_check_names_the_command(sides: tuple[Any, Any], tmp_path: Path) -> None:
    reference, candidate = (module.make() for module in sides)
    run = record(reference, tmp_path / "a")
    with tt.check(candidate, run) as check:
        candidate(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    assert any(
        note.startswith(f"to find the line: tensortap zoom {run} --module 'block'") for note in check.result.notes
    )


@pytest.mark.parametrize("models", ["ref.py:make", ("one",), (1, 2), ("gone.py:make", "gone.py:make")])
def test_other_models_are_refused_before_anything_is_compared(models: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        tt.compare(tmp_path / "a", tmp_path / "b", zoom=models)


def test_no_line_is_to_be_found_of_another_loss(sides: tuple[Any, Any], tmp_path: Path) -> None:
    runs = []
    for factor in (1.0, 2.0):
        model = sides[0].make()
        with tt.capture(model, tmp_path / str(factor), keep="tensors"):
            (factor * model(torch.ones(2, 6, 16)).square().sum()).backward()
        runs.append(tmp_path / str(factor))
    result = tt.compare(*runs)
    assert result.first is not None and result.first.cause == "loss"
    assert not any("to find the line" in note for note in result.notes)
