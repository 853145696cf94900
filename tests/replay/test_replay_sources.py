"""Models from a user's file, and errors in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from support import zoo
from support.tapping import tapped
from tensortap import replay
from tensortap.errors import UsageError

GOOD = """
from dataclasses import dataclass
import torch
from beside import width

@dataclass
class Config:
    width: int = width

def build():
    return torch.nn.Sequential(torch.nn.Linear(Config().width, 4))

def list_of_things(): return [1, 2]
def needs(what): return what
"""


@pytest.fixture
def run(run_path: Path) -> Path:
    tapped(nn.Sequential(nn.Linear(4, 4)), run_path, zoo.batch())
    return run_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("width = 4\n")
    path = tmp_path / "model file.py"
    path.write_text(GOOD)
    return path


def test_a_model_is_built_from_a_file_with_imports_from_its_folder(run: Path, file: Path) -> None:
    before = list(sys.path)
    result = replay(run, "0", f"{file}:build")
    assert result.verdict == "match"
    assert result.candidate == f"0 of {file}:build, replayed"
    assert sys.path == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{file}", "expected file.py:function"),
        ("{file}:", "expected file.py:function"),
        ("nowhere.py:build", "there is no file nowhere.py"),
        ("{file}:bild", "has no function bild; it has build"),
        ("{file}:list_of_things", "returned list, not a torch.nn.Module"),
        ("{file}:needs", r"needs\(\) failed: TypeError"),
    ],
)
def test_errors_name_what_is_wrong(run: Path, file: Path, source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replay(run, "0", source.format(file=file))


def test_a_file_that_cannot_be_run(run: Path, file: Path) -> None:
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(UsageError, match="could not be run: ModuleNotFoundError"):
        replay(run, "0", f"{file}:build")
    (file.parent / "model.txt").write_text("hello")
    with pytest.raises(UsageError, match="not a Python file"):
        replay(run, "0", f"{file.parent / 'model.txt'}:build")


def test_something_that_is_not_a_model(run: Path) -> None:
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        replay(run, "0", object())
