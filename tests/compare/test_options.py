"""One class of options: Python, the command line, the pytest plugin and the docs follow it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

import tensortap as tt
from tensortap.cli import app
from tensortap.compare.options import ComparisonOptions, option_info, options_table
from tensortap.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs" / "compare-options.md"
ONLY_COMPARE = ("until_first", "zoom")  # report and view show all pairs, and run no model


def verb(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands[name]


def flags(command: Any) -> dict[str, Any]:
    """Options of a command by their flags."""
    return {flag: each for each in command.params for flag in each.opts if flag.startswith("-")}


def test_the_python_signature_has_these_options() -> None:
    parameters = dict(list(inspect.signature(tt.compare).parameters.items())[2:])
    options = {each.name: each for each in fields(ComparisonOptions)}
    assert list(parameters) == list(options)
    for name, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default == (None if name == "noise" else options[name].default), name
        if name not in ("rename", "noise"):  # sequences there, tuples here
            assert parameter.annotation == options[name].type, name
    documented = re.findall(r"^    ([a-z_, ]+): ", inspect.getdoc(tt.compare).replace("\n", "\n    "), re.MULTILINE)  # type: ignore[union-attr]
    assert set(options) <= {name for line in documented for name in line.split(", ")}


@pytest.mark.parametrize("name", ["compare", "report", "view"])
def test_the_command_line_has_these_options(name: str) -> None:
    found = flags(verb(name))
    for each in fields(ComparisonOptions):
        info = option_info(each.name)
        if not info.flag or (each.name in ONLY_COMPARE and name != "compare"):
            continue
        option = found[info.flag]
        assert option.help == info.help, each.name
        assert option.metavar == info.metavar or each.type == "bool", each.name
        nothing = (None, (), "", False, [])
        assert option.default == each.default or (option.default in nothing and each.default in nothing), each.name


def test_every_option_of_the_command_line_is_one_of_them() -> None:
    known = {option_info(each.name).flag for each in fields(ComparisonOptions)}
    own = {
        "--csv",
        "--html",
        "--json",
        "--junit",
        "--markdown",
        "--parquet",
        "--verbose",
        "-v",
        "--exit-zero",
        "--quiet",
    }
    assert set(flags(verb("compare"))) - own - {"-q", "--help"} <= known


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, []),
        ({"rename": ("a=b", "c=d")}, ["--rename", "a=b", "--rename", "c=d"]),
        ({"rename": "a=b"}, ["--rename", "a=b"]),  # one rule, not its characters
        ({"mapping": Path("rules.toml"), "device": "cuda"}, ["--map", "rules.toml", "--device", "cuda"]),
        ({"mapping": {"version": 1}}, None),
        ({"steps": {3: 4, 5: 5}}, ["--step", "3:4,5"]),
        ({"steps": [0, 7]}, ["--step", "0,7"]),
        ({"ranks": [0, 2]}, ["--rank", "0", "--rank", "2"]),
        ({"ranks": {0: 1}}, None),
        ({"modules": "layers.*", "kinds": ("input",)}, ["--module", "layers.*", "--kind", "input"]),
        ({"modules": ["", "a"]}, ["--module", "(root)", "--module", "a"]),
        ({"rtol": 1e-3, "atol": 0.0}, ["--rtol", "0.001", "--atol", "0.0"]),
        (
            {"noise": ("runs/a2",), "until_first": True, "workers": 2},
            ["--noise", "runs/a2", "--until-first", "--workers", "2"],
        ),
        ({"details": 3}, []),
    ],
)
def test_options_as_arguments(given: dict[str, Any], arguments: list[str] | None) -> None:
    found = ComparisonOptions(**given).as_arguments()
    assert found == arguments
    if found is not None:  # the command line takes them
        verb("compare").make_context("compare", ["a", "b", *found])


def test_arguments_that_decide_on_pairs_alone() -> None:
    options = ComparisonOptions(rename=("a=b",), steps={3: 3}, modules="x", rtol=0.5, workers=3)
    assert options.as_arguments(pairing_only=True) == ["--rename", "a=b", "--rtol", "0.5"]
    assert ComparisonOptions(steps={3: 4}).as_arguments(pairing_only=True) == ["--step", "3:4"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"rename": [3]}, "PATTERN=REPLACEMENT"),
        ({"rename": 3}, "PATTERN=REPLACEMENT"),
        ({"mapping": 4}, "TOML"),
        ({"steps": "3"}, "numbers"),
        ({"steps": {3: "4"}}, "numbers"),
        ({"ranks": 3}, "numbers"),
        ({"modules": 5}, "name pattern"),
        ({"kinds": [None]}, "kind"),
        ({"rtol": "x"}, "zero or more"),
        ({"rtol": float("nan")}, "zero or more"),
        ({"atol": -1}, "zero or more"),
        ({"workers": 0}, "at least one"),
        ({"details": -1}, "zero or more"),
    ],
)
def test_values_that_an_option_cannot_have(given: dict[str, Any], wanted: str) -> None:
    (name,) = given
    with pytest.raises(UsageError, match=f"{name}=.*: give .*{wanted}"):
        tt.compare("a", "b", **given)


def test_the_docs_have_the_table() -> None:
    assert options_table() in PAGE.read_text()
