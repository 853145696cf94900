"""Rules are read from TOML; an error names the file, the key and the expected value."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tensortap.errors import RunNotFound, RunUnreadable, UsageError
from tensortap.mapping.rules import Rules, permute_to
from tensortap.mapping.rules_file import read_rules, shipped_rules


def read(tmp_path: Path, text: str) -> Rules:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return read_rules(path)


def test_the_shipped_table_is_valid() -> None:
    rules = shipped_rules()
    assert rules.canonical(("torch",), ("BatchNorm2d",)) == rules.canonical(("paddle",), ("BatchNorm2D",))
    assert rules.canonical(("torch",), ("ModuleList",)) == rules.canonical(("paddle",), ("LayerList",))
    assert rules.canonical(("torch",), ("GELU",)) == rules.canonical(("paddle",), ("GELU",)) == "gelu"
    assert rules.canonical(("torch",), ("NonDynamicallyQuantizableLinear",)) == "linear"
    assert rules.canonical(("torch",), ("Bilinear",)) == "bilinear"
    assert rules.canonical(("torch",), ("Projection", "Linear")) == "linear", "by what it inherits from"
    assert rules.opaque(("paddle",), ("LSTM",)) and not rules.opaque(("paddle",), ("Sequential",))


def test_a_users_file(tmp_path: Path) -> None:
    rules = read(tmp_path, '[[tensor]]\ntorch = "a.w"\npaddle = ["b.x", "b.y"]\naxis = 1\npermute = [2, 0, 1]\n')
    (rule,) = rules.tensors
    assert (rule.names["torch"], rule.names["paddle"], rule.axis) == (("a.w",), ("b.x", "b.y"), 1)
    assert permute_to(rule, ("paddle",)) == (2, 0, 1)
    assert permute_to(rule, ("torch",)) == (1, 2, 0)


def test_the_root_has_no_name(tmp_path: Path) -> None:
    rules = read(tmp_path, '[[module]]\nreference = "(root)"\ncandidate = "net"\n')
    assert rules.modules[0].names == {"reference": "", "candidate": "net"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[module]\n", "rules.toml is not TOML"),
        ("version = 2\n", "version = 2, but this tensortap reads version 1"),
        ("structure = 1\n", "structure = 1; expected true or false"),
        ("[[modules]]\ntorch = 'a'\n", "unknown key 'modules'; expected version, structure, module, class"),
        ("module = 'a'\n", "[[module]]: expected a list of tables, not 'a'"),
        ("[[module]]\ntorch = 'a'\n", "[[module]] 1: paddle is missing; expected a name for torch and paddle"),
        ("[[module]]\nregex = 'torch'\n", "[[module]] 1: it names no sides; expected torch and paddle, or reference"),
        ("[[module]]\ntorch = 'a'\npaddle = 1\n", "[[module]] 1: paddle = 1; expected a name"),
        (
            "[[module]]\ntorch = 'a'\npaddle = 'b'\npermut = [1]\n",
            "[[module]] 1: unknown key 'permut'; expected torch, paddle",
        ),
        ("[[module]]\ntorch = 'a.*'\npaddle = 'b'\n", "[[module]] 1: 'a.*' and 'b' differ in their wildcards"),
        ("[[module]]\ntorch = 'a'\npaddle = 'b'\nregex = 'jax'\n", "regex = 'jax'; expected torch or paddle"),
        ("[[module]]\ntorch = '('\npaddle = 'b'\nregex = 'torch'\n", "torch = '('; expected a regular expression"),
        (f"[[module]]\ntorch = '{'(' * 5_000}'\npaddle = 'b'\nregex = 'torch'\n", "expected a regular expression"),
        ("[[module]]\ntorch = 'a'\npaddle = 'b\\1'\nregex = 'torch'\n", "is not a replacement for 'a'"),
        ("[[tensor]]\ntorch = 'a'\npaddle = 'b'\npermute = [1, 1]\n", "permute = [1, 1]; expected every axis once"),
        ("[[tensor]]\ntorch = 'a'\npaddle = 'b'\npermute = 'yes'\n", "permute = 'yes'; expected a list of axes"),
        ("[[tensor]]\ntorch = 'a'\npaddle = 'b'\naxis = -1\n", "axis = -1; expected 0 or more"),
        ("[[tensor]]\ntorch = 'a'\npaddle = []\n", "paddle = []; expected a name, or a list of names"),
        ("[[tensor]]\ntorch = ['a', 'b']\npaddle = ['c', 'd']\n", "both sides are lists"),
        (
            "[[value]]\ntorch = 'rnn 0'\npaddle = 'rnn 0'\n",
            "expected 'MODULE KIND PATH', where KIND is input or output",
        ),
        (
            "[[class]]\ntorch = 'A'\npaddle = 'B'\nvalue = [{torch = 'x', paddle = 'y'}]\n",
            "[[class]] 1, value 1: torch",
        ),
        ("[[class]]\ntorch = 'A'\npaddle = '*'\n", "'*' is any class that has the named tensors"),
        ("[[ignore]]\nwhy = 'so'\n", "[[ignore]] 1: expected a name for one of torch, paddle, reference, candidate"),
    ],
)
def test_invalid_rules_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        read(tmp_path, text)
    assert "rules.toml" in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="there is no rules file"):
        read_rules(tmp_path / "gone.toml")
    with pytest.raises(RunUnreadable, match="cannot be read"):
        read_rules(tmp_path)
    os.mkfifo(tmp_path / "fifo.toml")
    with pytest.raises(RunUnreadable, match="it is a FIFO"):
        read_rules(tmp_path / "fifo.toml")
    with pytest.raises(RunUnreadable, match="it is a device"):
        read_rules("/dev/zero")
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RunUnreadable, match="is no rules file"):
        read_rules(tmp_path / "large.toml")


@pytest.mark.parametrize("value", ["[" * 100_000, "{a=" * 100_000, "9" * 10_000])
def test_values_that_toml_cannot_hold(tmp_path: Path, value: str) -> None:
    with pytest.raises(UsageError, match=r"rules\.toml (cannot be read as rules|is no TOML)"):
        read(tmp_path, f"version = {value}\n")


def test_a_mapping_is_read_like_a_file() -> None:
    with pytest.raises(UsageError, match=r"the mapping: \[\[module\]\] 1: unknown key 'x'"):
        read_rules({"module": [{"torch": "a", "paddle": "b", "x": 1}]})
