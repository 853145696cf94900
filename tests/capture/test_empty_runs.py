"""A run without records reports the reason, on stderr and in the run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tt


def reason_on_stderr(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """The one line on stderr; the run has it as well."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tensortap: nothing was recorded into {path}: ")
    assert any(line.removeprefix("tensortap: ") in notice for notice in tt.open(path).notices)
    return line


def test_a_model_that_is_never_called(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    with tt.capture(model, run_path):
        pass
    assert "no module of the tapped model ran" in reason_on_stderr(capsys, run_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_function_that_calls_the_model(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    function = torch.compile(lambda x: model(x).sum(), backend="aot_eager")
    with tt.capture(model, run_path):
        function(torch.ones(1, 2)).backward()
    assert "compiled" in reason_on_stderr(capsys, run_path)


def test_a_model_that_was_replaced(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with tt.capture(model, run_path):
        model = copy.deepcopy(model)
        model(torch.ones(1, 2)).sum().backward()
    assert "if it was replaced, tap the one that is called" in reason_on_stderr(capsys, run_path)


def test_a_model_that_was_replaced_after_some_steps(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    with tt.capture(model, run_path) as tap:
        for called in (model, nn.Linear(2, 2), nn.Linear(2, 2)):
            called(torch.ones(1, 2)).sum().backward()
            tap.step()
    assert "no module ran in 2 of 3 recorded steps" in capsys.readouterr().err


def test_steps_of_which_none_has_run(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    with tt.capture(model, run_path, steps=[100]) as tap:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            tap.step()
    assert "none of the steps 0 to 3" in reason_on_stderr(capsys, run_path)


def test_kinds_of_which_none_came(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    with tt.capture(model, run_path, kinds="grad_output"):
        model(torch.ones(1, 2))
    assert "kinds=grad_output" in reason_on_stderr(capsys, run_path)


def test_nothing_but_evaluation(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    with tt.capture(model, run_path, optimizer=torch.optim.SGD(model.parameters())), torch.no_grad():
        model(torch.ones(1, 2))
    assert "leave optimizer= out" in reason_on_stderr(capsys, run_path)


def test_a_run_with_records_prints_nothing(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with tt.capture(model, run_path):
        model[0](torch.ones(1, 2))
    assert not capsys.readouterr().err


def test_an_exception_of_the_user_is_reason_enough(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), tt.capture(nn.Linear(2, 2), run_path):
        raise ZeroDivisionError
    assert not capsys.readouterr().err


def test_an_empty_index_is_whole(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tt.capture(nn.Linear(2, 2), run_path):
        pass
    capsys.readouterr()
    run = tt.open(run_path)
    assert len(run) == 0 and len(run.notices) == 1 and "nothing was recorded" in run.notices[0]
