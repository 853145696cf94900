"""The worked examples in the documentation run, print what the page says, and agree at every pair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tensortap as tt
from support.doc_pages import DOCS, examples, printed_as_said
from tensortap.mapping.rules_file import read_rules

pytest.importorskip("paddle")
PAGE = "torch-and-paddle.md"
EXAMPLES = [(name, *example) for name, example in zip(("block", "resnet"), examples(PAGE), strict=True)]


@pytest.mark.parametrize(("name", "code", "said"), EXAMPLES, ids=[name for name, _, _ in EXAMPLES])
def test_the_example_prints_what_the_page_shows(name: str, code: str, said: str, tmp_path: Path) -> None:
    printed_as_said(code, said, tmp_path, r"\d\.\d+e-\d+")
    result = tt.compare(tmp_path / "runs" / f"{name}-torch", tmp_path / "runs" / f"{name}-paddle")
    assert {row["kind"] for row in result.rows} == {"input", "output", "grad_output", "param_grad"}
    for row in result.rows:
        assert row["exact"] and row["rel_l2"] <= 1e-5, row
    assert not [each for each in result.unmatched if each.key.kind == "param_grad"]


def test_the_rules_on_the_page_are_rules(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (DOCS / PAGE).read_text(), re.S)
    (tmp_path / "rules.toml").write_text(text)
    rules = read_rules(tmp_path / "rules.toml")
    assert (len(rules.modules), len(rules.tensors), len(rules.values)) == (2, 1, 1)
    assert (len(rules.classes), len(rules.ignores), rules.structure) == (1, 1, True)
