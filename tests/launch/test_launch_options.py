"""Options of a launch: one table for the command line, the environment and tensortap.toml."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import tensortap
from tensortap.errors import UsageError
from tensortap.launch.options import CAPTURE_OPTIONS, parse_all
from tensortap.launch.settings import LaunchSettings, collect, free_path

# A program names the first two itself, and the last is for runs in memory.
NOT_LAUNCHED = {"model", "path", "optimizer", "max_memory"}


def test_every_option_of_capture_is_in_the_table() -> None:
    parameters = set(inspect.signature(tensortap.capture).parameters)
    assert {option.name for option in CAPTURE_OPTIONS} == parameters - NOT_LAUNCHED


def test_text_becomes_what_capture_takes() -> None:
    options = parse_all(
        {
            "keep": "layers.0.*=tensors,*=summary",
            "kinds": "input, output",
            "steps": "0,10-20,100-200/50,*/1000",
            "overwrite": "yes",
            "max_buffer": "1024",
        }
    )
    assert options["keep"] == {"layers.0.*": "tensors", "*": "summary"}
    assert options["kinds"] == ("input", "output")
    found = [step for step in range(3000) if step in options["steps"]]
    assert found == [0, *range(10, 21), 100, 150, 200, 1000, 2000]
    assert options["overwrite"] is True and options["max_buffer"] == 1024


@pytest.mark.parametrize(
    ("name", "text"), [("steps", "3:4"), ("steps", "*/0"), ("gather", "maybe"), ("max_buffer", "1 GB"), ("kinds", ",")]
)
def test_wrong_text_is_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        parse_all({name: text})


def test_the_command_line_comes_before_the_environment_and_the_file(tmp_path: Path) -> None:
    (tmp_path / "tensortap.toml").write_text(
        '[capture]\nout = "file"\nkeep = {"a.*" = "tensors"}\nsteps = [0, 5]\ngather = false\n'
    )
    found = collect({"out": "given", "keep": None}, tmp_path, {"TENSORTAP_OUT": "variable", "TENSORTAP_STEPS": "7"})
    assert found == {"out": "given", "keep": {"a.*": "tensors"}, "steps": "7", "gather": False}
    options = parse_all(found)
    assert options["keep"] == {"a.*": "tensors"} and 7 in options["steps"] and options["gather"] is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[capture]\nstep = 3", "did you mean steps"),
        ("[capture]\nsteps = 'x'", "steps: 'x' is not numbers"),
        ("capture = 3", "is not a section"),
        ("[capture", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "tensortap.toml").write_text(text)
    with pytest.raises(UsageError, match=words):
        collect({}, tmp_path, {})


def test_settings_survive_the_environment() -> None:
    settings = LaunchSettings("/runs/a", {"steps": "0-3", "keep": {"*": "tensors"}}, ["torch"], main=7)
    assert LaunchSettings.inherited({"TENSORTAP_RUN": settings.to_text()}) == settings
    assert LaunchSettings.inherited({}) is None


def test_a_free_path_is_numbered(tmp_path: Path) -> None:
    for expected in ("a", "a-2", "a-3"):
        free = free_path(tmp_path / "a")
        assert free.name == expected
        free.mkdir()
