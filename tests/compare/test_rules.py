"""The list of tolerance rules: one entry is all that a rule takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import chain, write

import tensortap as tt
from tensortap.compare.judge.rules import table
from tensortap.compare.judge.rules.names import ROUNDING
from tensortap.compare.judge.rules.table import RULES, Rule


def compared(tmp_path: Path, **options: float) -> tuple[str, dict[str, object]]:
    for name, off in (("a", 0.0), ("b", 0.01)):
        if not (tmp_path / name).exists():
            write(tmp_path / name, chain(off={"fc2": off}))
    result = tt.compare(tmp_path / "a", tmp_path / "b", **options)  # type: ignore[arg-type]
    return result.verdict, next(row for row in result.rows if row["module"] == "fc2" and row["kind"] == "output")


def test_names_are_unique() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert ROUNDING not in names


def test_a_new_rule_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, row = compared(tmp_path)
    assert (verdict, row["rule"]) == ("diverged", ROUNDING)
    added = Rule("allowed by a test", lambda pair: pair.kind == "output", lambda pair: 0.5)
    monkeypatch.setattr(table, "RULES", (*RULES, added))
    verdict, row = compared(tmp_path)
    assert (verdict, row["status"], row["rule"], row["tolerance"]) == ("match", "close", "allowed by a test", 0.5)


def test_a_rule_whose_condition_does_not_hold_allows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = Rule("allowed by a test", lambda pair: pair.kind == "param", lambda pair: 0.5)
    monkeypatch.setattr(table, "RULES", (*RULES, never))
    verdict, row = compared(tmp_path)
    assert (verdict, row["rule"]) == ("diverged", ROUNDING)


def test_the_users_own_tolerance_goes_before_all_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RULES", (*RULES, Rule("allowed by a test", lambda pair: True, lambda pair: 0.5)))
    verdict, row = compared(tmp_path, rtol=1e-6)
    assert (verdict, row["rule"], row["tolerance"]) == ("diverged", "rtol and atol as given", 1e-6)
