"""`tensortap show --loop`: the loop as a table over steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from showing import call, write
from torch import nn

import tensortap as tt


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with tt.capture(model, tmp_path / "run", optimizer=optimizer):
        for step in range(3):
            model(torch.ones(4, 2)).sum().backward()
            if step == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.125)
                model[1].p = 0.25
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] /= 2
    return tmp_path / "run"


def test_a_table_over_steps(trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = call(capsys, "show", trained, "--loop").out.splitlines()
    assert lines[2].split("  ")[0] == "step" and "random torch.cpu" in lines[2] and "from backward" in lines[2]
    rows = [line.split() for line in lines[3:6]]
    assert [row[:2] for row in rows] == [["0", "0.5"], ["1", "0.25"], ["2", "0.125"]]
    assert rows[1][2] == "0.125" and float(rows[1][3]) > 0.2 and rows[0][2] == rows[0][3]
    assert any(line.startswith("group 0.0: SGD, momentum=0.9") for line in lines)
    assert "step 2: 1 p 0.5 → 0.25" in lines


def test_steps_are_selected(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 steps more: --limit 0 shows all" in call(capsys, "show", trained, "--loop", "--limit", 1).out
    chosen = call(capsys, "show", trained, "--loop", "--step", "last").out.splitlines()
    assert chosen[3].split()[:2] == ["2", "0.125"] and chosen[4] == ""


def test_json_has_the_changes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(call(capsys, "show", trained, "--loop", "--json").out)["loop"]
    assert [each["value"]["lr"] for each in facts if each["fact"] == "group"] == [0.5, 0.25, 0.125]
    assert all(each["rank"] == 0 for each in facts)
    assert "loop" not in json.loads(call(capsys, "show", trained, "--json").out)


def test_a_run_without_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run")
    found = call(capsys, "show", tmp_path / "run", "--loop")
    assert found.code == 0 and "no loop facts" in found.out
