"""Which models a launch records, found by what the program does."""

from __future__ import annotations

import gc
import multiprocessing
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

import tensortap
from tensortap.frameworks.discovery import Discovery
from tensortap.launch.settings import LaunchSettings
from tensortap.launch.startup import watching

torch = pytest.importorskip("torch")


def settings(folder: Path) -> LaunchSettings:
    return LaunchSettings(str(folder / "run"))


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()


def runs(folder: Path) -> dict[str, tuple[str, list[int]]]:
    opened = {path.name: tensortap.open(path) for path in sorted(folder.iterdir())}
    return {name: (run.info["model"], run.steps) for name, run in opened.items()}


def test_the_first_forward_is_complete(tmp_path: Path) -> None:
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    records = [(record.key.module, record.key.kind) for record in tensortap.open(tmp_path / "run").records()]
    assert [each for each in records if each[1] != "param"][:2] == [("", "input"), ("0", "input")]


def test_calls_before_the_optimizer_are_a_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(settings(tmp_path), "torch"):
        model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 3)
        other(torch.ones(1, 4))
        model(torch.ones(1, 4))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert runs(tmp_path) == {"run": ("Linear", [0, 1])}
    assert {record.key.micro for record in tensortap.open(tmp_path / "run").records()} == {0}


def test_inference_records_the_whole_model(tmp_path: Path) -> None:
    class Pipeline(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)

        def generate(self, x: Any) -> Any:
            return self.decoder(self.encoder(x))

    with watching(settings(tmp_path), "torch"), torch.no_grad():
        pipeline = Pipeline()
        pipeline.generate(torch.ones(1, 4))
    assert runs(tmp_path) == {"run": ("Pipeline", [0])}
    seen = {record.key.module for record in tensortap.open(tmp_path / "run").records()}
    assert seen == {"encoder", "decoder"}


def test_several_trainings_are_several_runs(tmp_path: Path) -> None:
    with watching(settings(tmp_path), "torch"):
        for width in (2, 3):
            model = torch.nn.Linear(4, width)
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=width)
    assert runs(tmp_path) == {"run": ("Linear", [0, 1]), "run-2": ("Linear", [0, 1, 2])}


def test_a_second_optimizer_goes_on_with_the_same_run(tmp_path: Path) -> None:
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Linear(4, 2)
        for _ in range(2):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert runs(tmp_path) == {"run": ("Linear", [0, 1, 2, 3])}


def test_an_optimizer_that_was_replaced_does_not_hold_the_steps_back(tmp_path: Path) -> None:
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Linear(4, 2)
        unused = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, torch.optim.Adam(model.parameters(), lr=0.1))
        assert unused.param_groups
    assert runs(tmp_path) == {"run": ("Linear", [0, 1])}


def test_an_optimizer_that_others_seemed_to_replace_counts_once_it_steps(tmp_path: Path) -> None:
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Linear(4, 2)
        first, second = (cls(model.parameters(), lr=0.1) for cls in (torch.optim.Adam, torch.optim.SGD))
        for optimizer in (first, second, first):
            train(model, optimizer)
    run = tensortap.open(tmp_path / "run")
    assert run.steps == [0, 1, 2, 3, 4, 5]
    classes = [run.loop().value("optimizer", step, "0")["class"] for step in run.steps]
    assert classes == ["Adam", "Adam", "SGD", "SGD", "Adam", "Adam"]


def test_an_optimizer_of_parameters_that_are_added_later_counts_alone(tmp_path: Path) -> None:
    """A second phase, as of LoRA, trains new parameters and freezes those of the first optimizer."""
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, first)
        model.requires_grad_(False)
        model.append(torch.nn.Linear(4, 2))
        train(model, torch.optim.SGD(model[1].parameters(), lr=0.1), steps=3)
        assert first.param_groups
    assert runs(tmp_path) == {"run": ("Sequential", [0, 1, 2, 3, 4])}
    assert {record.key.micro for record in tensortap.open(tmp_path / "run").records()} == {0}


def test_two_optimizers_of_one_model(tmp_path: Path) -> None:
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert runs(tmp_path) == {"run": ("Sequential", [0, 1])}


def test_a_training_that_has_ended_frees_its_model(tmp_path: Path) -> None:
    with watching(settings(tmp_path), "torch"):
        alive = []
        for _ in range(3):
            model = torch.nn.Linear(4, 2)
            alive.append(weakref.ref(model))
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        gc.collect()
        assert alive[0]() is None
    assert [len(steps) for _, steps in runs(tmp_path).values()] == [2, 2, 2]


def test_a_model_compiled_in_place(tmp_path: Path) -> None:
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        model.compile(backend="eager")
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert runs(tmp_path) == {"run": ("Sequential", [0, 1])}
    assert type(model._compiled_call_impl).__name__ == "function"


def test_a_model_that_only_a_compiled_function_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(torch.compile(lambda x: model(x), backend="eager", fullgraph=True), optimizer)
    assert 'pass compiled="eager"' in capsys.readouterr().err


def test_a_program_without_a_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(settings(tmp_path), "torch"):
        weight = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        torch.nn.ReLU()(weight).sum().backward()
        optimizer.step()
    assert capsys.readouterr().err.count("tensortap: nothing was recorded") == 1
    assert not list(tmp_path.iterdir())


def test_a_failure_of_the_search_does_not_end_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Discovery, "trained_by", lambda *_: 1 / 0)
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Linear(4, 2)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "the search for the trained model failed: ZeroDivisionError" in capsys.readouterr().err


def test_a_run_that_exists_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with watching(settings(tmp_path), "torch"):
            model = torch.nn.Linear(4, 2)
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "nothing is recorded" in capsys.readouterr().err and runs(tmp_path) == {"run": ("Linear", [0, 1])}


def test_a_failed_program_leaves_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), watching(settings(tmp_path), "torch"):
        model = torch.nn.Linear(4, 2)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        raise ValueError("mine")
    run = tensortap.open(tmp_path / "run")
    assert not run.finished and any("ValueError: mine" in notice for notice in run.notices)


def test_later_processes_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORTAP_RUN", "{}")
    with watching(settings(tmp_path), "torch"):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert "TENSORTAP_RUN" in os.environ
        train(model, optimizer)
        assert "TENSORTAP_RUN" not in os.environ
    assert multiprocessing.parent_process() is None
