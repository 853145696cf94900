"""A mapping in a comparison: a user's rules, the reports, and no effect without a mapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tensortap as tt
from tensortap.cli import app
from tensortap.errors import UsageError

paddle = pytest.importorskip("paddle")
from support import twins  # noqa: E402 - it needs paddle
from support.read_page import ReadPage  # noqa: E402

X = np.random.default_rng(0).standard_normal((3, 6, 8)).astype(np.float32)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        q, k, v = self.mixed(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


class Apart(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (paddle.nn.Linear(8, 8) for _ in range(4))

    def forward(self, hidden: Any) -> Any:
        scores = paddle.matmul(self.q(hidden), self.k(hidden), transpose_y=True)
        return self.out(paddle.matmul(paddle.nn.functional.softmax(scores, -1), self.v(hidden)))


RULES = """
[[tensor]]
torch = "mixed.weight"
paddle = ["q.weight", "k.weight", "v.weight"]
permute = [1, 0]

[[tensor]]
torch = "mixed.bias"
paddle = ["q.bias", "k.bias", "v.bias"]
"""


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path, Path]:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    ours, theirs = Fused(), Apart()
    assert tt.transfer(ours, theirs, rules).complete
    return twins.train(ours, X, tmp_path / "torch"), twins.train(theirs, X, tmp_path / "paddle"), rules


def test_rules_join_separate_tensors(runs: tuple[Path, Path, Path]) -> None:
    ours, theirs, rules = runs
    assert tt.compare(ours, theirs).counts["unmatched"] > tt.compare(ours, theirs, mapping=rules).counts["unmatched"]
    result = tt.compare(ours, theirs, mapping=rules)
    assert result.verdict == "match", str(result)
    rows = {(row["module"], row["kind"], row["path"]): row for row in result.rows}
    assert rows["mixed", "param_grad", "weight"]["layout"] == "joined (3 along axis 0), transposed"
    assert rows["mixed", "param_grad", "weight"]["rel_l2"] < 1e-5
    back = tt.compare(theirs, ours, mapping=rules)
    assert back.verdict == "match", str(back)
    assert {"q", "k", "v"} <= {row["module"] for row in back.rows if row["layout"]}


def test_details_show_the_converted_tensor(runs: tuple[Path, Path, Path]) -> None:
    result = tt.compare(*runs[:2], mapping=runs[2], kinds="param", details=100)
    rows = list(result.rows)
    looks = {rows[look.row]["path"]: look for look in result.details if rows[look.row]["module"] == "mixed"}
    for path, look in looks.items():
        ours, theirs = look.reference, look.candidate
        assert look.whole and look.histogram is not None and theirs is not None, path
        assert (theirs.shape, theirs.elements) == (ours.shape, ours.elements)
        assert (theirs.min, theirs.max, theirs.l1) == pytest.approx((ours.min, ours.max, ours.l1), rel=1e-5)
        assert look.histogram.candidate is not None and look.histogram.candidate.sum() == ours.elements
    assert set(looks) == {"weight", "bias"}
    assert result.options == ["--map", str(runs[2])]
    assert tt.compare(*runs[:2], mapping={"version": 1}, kinds="param").options is None


def test_the_page_has_the_candidates_names(runs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    args = ["report", *map(str, runs[:2]), "--map", str(runs[2]), "-o", str(out)]
    assert CliRunner().invoke(app, args).exit_code == 0
    page = ReadPage(out.read_text())
    rows = zip(*map(page.words, ("module", "kind", "path", "module_candidate", "layout")), strict=True)
    found = {row[:3]: row[3:] for row in rows}
    assert found["mixed", "param", "weight"] == ("q", "joined (3 along axis 0), transposed")
    assert found["out", "output", "0"] == ("", "")


def test_the_command_accepts_rules(runs: tuple[Path, Path, Path]) -> None:
    ours, theirs, rules = map(str, runs)
    done = CliRunner().invoke(app, ["compare", ours, theirs, "--map", rules, "--json", "-"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert {"reference": "mixed.bias", "candidate": "q.bias + k.bias + v.bias", "how": "rule"}.items() <= next(
        each for each in said["mapping"]["tensors"] if each["reference"] == "mixed.bias"
    ).items()
    page = CliRunner().invoke(app, ["compare", ours, theirs, "--map", rules, "-v"])
    assert "q.bias + k.bias + v.bias → mixed.bias (joined (3 along axis 0), rule)" in page.output


def test_the_command_reports_errors_in_rules(runs: tuple[Path, Path, Path]) -> None:
    runs[2].write_text("[[tensor]]\ntorch = 1\n")
    done = CliRunner().invoke(app, ["compare", str(runs[0]), str(runs[1]), "--map", str(runs[2])])
    assert done.exit_code != 0
    with pytest.raises(UsageError, match=r"rules.toml: \[\[tensor\]\] 1: torch = 1; expected a name"):
        tt.compare(runs[0], runs[1], mapping=runs[2])


def test_values_are_mapped_by_rule(tmp_path: Path) -> None:
    """Batch and sequence have the same size, so shapes do not distinguish them."""
    square = X[:, :3]
    ours, theirs = nn.LSTM(8, 4), paddle.nn.LSTM(8, 4)
    tt.transfer(ours, theirs)

    def run(model: Any, batch: Any, path: Path) -> Path:
        with tt.capture(model, path, keep="tensors", kinds=("input", "output")) as tap:
            model(batch)
            tap.step()
        return path

    first = run(ours, torch.from_numpy(square.transpose(1, 0, 2).copy()), tmp_path / "a")
    second = run(theirs, paddle.to_tensor(square), tmp_path / "b")
    assert tt.compare(first, second).verdict == "diverged"
    turned = [{"torch": f"(root) {kind} 0", "paddle": f"(root) {kind} 0", "permute": [1, 0, 2]} for kind in KINDS]
    result = tt.compare(first, second, mapping={"value": turned})
    assert result.verdict == "match", str(result)


KINDS = ("input", "output")


def test_renamed_keywords_are_matched_in_order(tmp_path: Path) -> None:
    result = twins.compared("Decoder", tmp_path)
    masks = [row for row in result.rows if row["path"] == "mask" and row["kind"] == "input"]
    assert masks and {row["path_candidate"] for row in masks} == {"attn_mask"}
    assert any(each.candidate.endswith("input attn_mask") for each in result.mapping.values)


# --- within one framework ------------------------------------------------------------------------------------------
class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.fc2(self.act(self.fc1(x)))


def renamed() -> tuple[Old, nn.Module]:
    old, new = Old(), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    assert tt.transfer(old, new).complete
    return old, new


def test_without_a_mapping_nothing_is_guessed(tmp_path: Path) -> None:
    old, new = renamed()
    first, second = twins.train(old, X, tmp_path / "a"), twins.train(new, X, tmp_path / "b")
    plain = tt.compare(first, second)
    assert plain.mapping is None
    assert {row["module"] for row in plain.rows} == {""}
    assert {row["module_candidate"] for row in plain.rows} == {None}
    mapped = tt.compare(first, second, mapping={"version": 1})
    assert (mapped.verdict, mapped.unmatched) == ("match", [])
    assert {row["module"]: row["module_candidate"] for row in mapped.rows if row["module"]} == {
        "fc1": "0",
        "act": "1",
        "fc2": "2",
    }


def test_checkpoints_with_a_mapping(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    old = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    save_file(old.state_dict(), tmp_path / "old.safetensors")
    new = {f"net.{'conv' if key[0] == '0' else 'norm'}{key[1:]}": value for key, value in old.state_dict().items()}
    save_file(new, tmp_path / "new.safetensors")
    rules = {"module": [{"reference": "0", "candidate": "net.conv"}, {"reference": "1", "candidate": "net.norm"}]}
    ours, theirs = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    result = tt.compare(ours, theirs, mapping=rules)
    assert (result.verdict, dict(result.counts)) == ("match", {"equal": 7})
    run = twins.train(old, X[:, None, :3].repeat(3, 1).repeat(2, 2), tmp_path / "run")
    assert tt.compare(run, theirs, mapping=rules).counts["equal"] == 7


def test_renames_work_with_a_mapping(tmp_path: Path) -> None:
    old, new = renamed()
    first, second = twins.train(old, X, tmp_path / "a"), twins.train(new, X, tmp_path / "b")
    result = tt.compare(first, second, mapping={"structure": False}, rename=["^0$=fc1"])
    assert {row["module"] for row in result.rows} == {"", "fc1"}
    assert result.mapping is not None
    assert [each.how for each in result.mapping.modules if each.reference == "fc1"] == ["rename"]


def test_a_run_compared_with_itself_is_equal_under_a_mapping(tmp_path: Path) -> None:
    run = twins.train(Old(), X, tmp_path / "a", steps=2)
    plain, mapped = tt.compare(run, run), tt.compare(run, run, mapping={"version": 1})
    assert mapped.counts == plain.counts and mapped.table.equals(plain.table)
