"""Operators in a comparison: aligned although the code differs, judged by their module, named in the sentence."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tensortap as tt  # noqa: E402
from tensortap.core.operator_paths import OperatorPath, parse_operator  # noqa: E402
from tensortap.core.records import MODULE_KINDS  # noqa: E402
from tensortap.core.sequences import best_alignment  # noqa: E402

MODEL = """import torch, torch.nn as nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1)
        scores = scores * 8**-0.5
        weights = scores.softmax(-1)
        y = weights @ self.v(x)
        gate = torch.sigmoid(x.mean(-1, keepdim=True))
        return self.o(y * gate)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attn, self.last = nn.Linear(8, 8), Attention(), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.attn(self.first(x)))
"""
SCALE = "        scores = scores * 8**-0.5\n"
REWRITTEN = (
    f"        scores = self.q(x) @ self.k(x).transpose(-2, -1)\n{SCALE}",
    "        scores = (self.q(x) * 8**-0.5) @ self.k(x).transpose(-2, -1)\n",
)


def record(folder: Path, name: str, *changes: tuple[str, str], **options: Any) -> Path:
    text = MODEL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.Model()
    with tt.capture(model, folder / "runs" / name, **{"operators": "attn", **options}):
        model(torch.randn(2, 4, 8)).square().sum().backward()
    return folder / "runs" / name


def statuses(result: Any, phase: str = "forward") -> dict[str, str]:
    rows = (row for row in result.rows if row["kind"] == "operator" and row["phase"] == phase)
    return {row["path"]: row["status"] for row in rows}


def test_a_run_matches_itself(tmp_path: Path) -> None:
    result = tt.compare(record(tmp_path, "reference"), record(tmp_path, "again"))
    assert result.verdict == "match" and set(statuses(result).values()) == {"equal"} == set(
        statuses(result, "backward").values()
    )


def test_a_missing_operator_is_named_with_its_line(tmp_path: Path) -> None:
    result = tt.compare(record(tmp_path, "reference"), record(tmp_path, "unscaled", (SCALE, "")))
    assert result.verdict == "diverged" and result.first is not None and result.first.module == "attn"
    place = result.first.operator
    assert place is not None and place.missing == ("mul@reference.py:10",) and not place.added
    assert place.reference == "_softmax@reference.py:11" and place.candidate == "_softmax@unscaled.py:10"
    assert "first operator that differs is softmax in reference.py:11 (unscaled.py:10 in the candidate)" in str(result)
    assert "the candidate lacks mul in reference.py:10" in str(result)
    found = statuses(result)
    assert found["bmm@reference.py:9"] == "equal" and found["sigmoid@reference.py:13"] == "equal"
    saved = json.loads(result.save(tmp_path / "result.json").read_text(encoding="utf-8"))
    assert saved["first"]["operator"]["missing"] == ["mul@reference.py:10"]


def test_an_added_operator_shifts_no_other(tmp_path: Path) -> None:
    added = ("        weights = scores", "        scores = scores + 0.0\n        weights = scores")
    result = tt.compare(record(tmp_path, "reference"), record(tmp_path, "added", added))
    assert result.verdict == "match" and set(statuses(result).values()) == {"equal"}
    assert not result.unmatched


def test_another_way_to_the_same_outputs_is_no_divergence(tmp_path: Path) -> None:
    result = tt.compare(record(tmp_path, "reference"), record(tmp_path, "rewritten", REWRITTEN))
    assert result.verdict == "match"
    assert statuses(result)["bmm@reference.py:9"] == "unjudged"


def test_a_cut_gradient_is_named_at_its_operator(tmp_path: Path) -> None:
    cut = ("        y = weights @", "        y = weights.detach() @")
    result = tt.compare(record(tmp_path, "reference"), record(tmp_path, "cut", cut))
    assert result.verdict == "diverged"
    assert "the candidate computes no gradient at bmm in reference.py:12" in str(result)


def test_a_wrong_backward_is_named_at_its_operator(tmp_path: Path) -> None:
    wrong = ("        gate = torch.sigmoid(", "        x = Twice.apply(x)\n        gate = torch.sigmoid(")
    function = (
        "class Model",
        "class Twice(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 1\n"
        "    @staticmethod\n    def backward(ctx, gradient):\n        return gradient * FACTOR\n\nclass Model",
    )
    right = record(tmp_path, "reference", wrong, (function[0], function[1].replace("FACTOR", "1")))
    result = tt.compare(right, record(tmp_path, "candidate", wrong, (function[0], function[1].replace("FACTOR", "2"))))
    assert result.verdict == "diverged" and result.first is not None
    assert result.first.operator is not None and result.first.operator.reference == "grad Twice@reference.py:13"


def test_operators_of_one_run_alone_are_left_out_with_a_note(tmp_path: Path) -> None:
    reference, candidate = record(tmp_path, "reference"), record(tmp_path, "candidate", operators=None)
    result = tt.compare(reference, candidate)
    assert result.verdict == "match" and not statuses(result) and not result.unmatched
    assert any("operators, which were not compared: the candidate has none" in note for note in result.notes)


def test_operators_of_other_modules_are_counted(tmp_path: Path) -> None:
    result = tt.compare(record(tmp_path, "reference"), record(tmp_path, "candidate", operators=["attn", "last"]))
    assert result.verdict == "match"
    assert any("records of operators of the candidate" in note for note in result.notes)


@pytest.mark.parametrize(
    "path",
    [
        OperatorPath("softmax", "attention.py:48"),
        OperatorPath("mul", "a.py:1", 3, 2, gradient=True),
        OperatorPath("native_layer_norm", "", 1, 1, "~2"),
        OperatorPath("Doubled.<locals>.F", "<stdin>:7", 12),
    ],
)
def test_a_path_reads_back(path: OperatorPath) -> None:
    assert parse_operator(str(path)) == path


def test_the_best_alignment_leaves_gaps() -> None:
    scores = np.array([[1, 0, 0], [0, 0, 2], [0, 0, 1]])
    assert best_alignment(scores) == [(0, 0), (None, 1), (1, 2), (2, None)]
    assert best_alignment(np.zeros((0, 2), np.int64)) == [(None, 0), (None, 1)]


def test_a_check_takes_a_reference_with_operators(tmp_path: Path) -> None:
    run = record(tmp_path, "reference", keep="tensors")
    spec = importlib.util.spec_from_file_location("again", tmp_path / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.Model()
    with tt.check(model, run) as check:
        model(torch.randn(2, 4, 8)).square().sum().backward()
    assert check.result.verdict == "match"


def test_show_and_the_page_have_operators(tmp_path: Path) -> None:
    result = tt.compare(record(tmp_path, "reference"), record(tmp_path, "unscaled", (SCALE, "")))
    page = result.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "the candidate lacks mul in reference.py:10" in page
    with tt.open(tmp_path / "runs" / "reference") as run:
        assert [each.key.path for each in run.records(kind="operator", path="_softmax*", phase="forward")] == [
            "_softmax@reference.py:11"
        ]
    assert tt.health(tmp_path / "runs" / "reference").verdict == "healthy"


def test_an_operator_is_not_taken_for_one_behind_a_module(tmp_path: Path) -> None:
    after = ("        return self.o(y * gate)", "        y = self.o(y)\n        return y * gate")
    before = ("        return self.o(y * gate)", "        y = y * gate\n        return self.o(y)")
    result = tt.compare(record(tmp_path, "reference", after), record(tmp_path, "candidate", before))
    assert result.first is not None and result.first.operator is not None
    assert result.first.operator.added == ("mul@candidate.py:14",)


def test_a_missing_operator_is_found_behind_others_that_are_right(tmp_path: Path) -> None:
    first = (
        "        y = weights",
        "        x = x - 1\n        low = x.amin(-1, keepdim=True)\n        y = low * weights",
    )
    changed = (first[0], first[1].replace("x = x - 1", "pass").replace("x.amin", "(x * 1).amin"))
    result = tt.compare(record(tmp_path, "reference", first), record(tmp_path, "candidate", changed))
    assert result.first is not None and result.first.operator is not None
    assert "sub@reference.py:12" in result.first.operator.missing


@pytest.mark.parametrize(
    "change", [(SCALE, ""), REWRITTEN, ("softmax(-1)", "softmax(-2)"), ("weights @", "weights.detach() @")]
)
def test_operators_change_no_verdict(change: tuple[str, str], tmp_path: Path) -> None:
    reference, candidate = record(tmp_path, "reference"), record(tmp_path, "candidate", change)
    alone, both = tt.compare(reference, candidate, kinds=MODULE_KINDS), tt.compare(reference, candidate)
    assert alone.verdict == both.verdict
    assert (alone.first and alone.first.key) == (both.first and both.first.key)
