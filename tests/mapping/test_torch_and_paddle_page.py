"""The worked examples in the documentation run, print what the page says, and agree at every pair."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensortap as tt
from tensortap.mapping.rules_file import read_rules

pytest.importorskip("paddle")
PAGE = (Path(__file__).parents[2] / "docs" / "torch-and-paddle.md").read_text()
EXAMPLES = list(
    zip(
        ("block", "resnet"),
        re.findall(r"```python\n(.*?)```", PAGE, re.S),
        re.findall(r"```text\n(.*?)```", PAGE, re.S),
        strict=True,
    )
)


def without_digits(text: str) -> str:
    """The size of an error is the machine's; where a line is broken is the page's."""
    return re.sub(r"\s+", " ", re.sub(r"\d\.\d+e-\d+", "#", text)).strip()


@pytest.mark.parametrize(("name", "code", "said"), EXAMPLES, ids=[name for name, _, _ in EXAMPLES])
def test_the_example_prints_what_the_page_says(name: str, code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "example.py"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert without_digits(done.stdout) == without_digits(said)
    assert all(len(line) <= 80 for line in said.splitlines())
    result = tt.compare(tmp_path / "runs" / f"{name}-torch", tmp_path / "runs" / f"{name}-paddle")
    assert {row["kind"] for row in result.rows} == {"input", "output", "grad_output", "param_grad"}
    for row in result.rows:
        assert row["exact"] and row["rel_l2"] <= 1e-5, row
    assert not [each for each in result.unmatched if each.key.kind == "param_grad"]


def test_the_rules_on_the_page_are_rules(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    (tmp_path / "rules.toml").write_text(text)
    rules = read_rules(tmp_path / "rules.toml")
    assert (len(rules.modules), len(rules.tensors), len(rules.values)) == (2, 1, 1)
    assert (len(rules.classes), len(rules.ignores), rules.structure) == (1, 1, True)
