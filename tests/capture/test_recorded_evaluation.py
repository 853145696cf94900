"""`evaluation=True`: evaluation is recorded in a phase of its own, and compared with the other side's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import coverage, everything
from tensortap.cli import main
from tensortap.store.exports.export import FORMATS, export

Training = Callable[..., Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def evaluate(model: nn.Module, batches: int = 2, wrong: float = 0.0) -> None:
    model.eval()
    with torch.no_grad():
        for batch in range(batches):
            model(torch.full((3, 4), batch + 1.0) + wrong)
    model.train()


def train(path: Path | None, batches: int = 2, wrong: float = 0.0, before: bool = False, **options: Any) -> Any:
    """Train two steps; evaluate after each, also after the last, and before all if asked."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"evaluation": True, "keep": "tensors"} | options
    with tt.capture(model, path, optimizer=optimizer, **options) as tap:
        for _ in range(before):
            evaluate(model)
        for _ in range(2):
            for micro in range(2):
                model(torch.arange(12.0).reshape(3, 4) + micro).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            evaluate(model, batches, wrong)
    return tap


def test_evaluation_has_its_own_phase_and_counts() -> None:
    plain, tap = train(None, batches=0), train(None, before=True)
    evaluated = [record.key for record in tap.run.records(phase="eval")]
    assert {(key.step, key.micro) for key in evaluated} == {(step, micro) for step in (0, 1, 2) for micro in (0, 1)}
    assert {key.kind for key in evaluated} == {"input", "output"}
    assert {key.module for key in evaluated} == {"", "0", "1", "2", "3"} and {key.call for key in evaluated} == {0}
    assert tap.run.steps == [0, 1] and tap.run.recorded_steps == [0, 1, 2]
    training = {key: value for key, value in everything(tap.run).items() if key.phase != "eval"}
    assert training == everything(plain.run)
    assert not tap.notices


def test_evaluation_after_a_recorded_step_belongs_to_the_step_that_follows() -> None:
    run = train(None, steps=[1]).run
    assert {key.step for key in everything(run)} == {1}
    assert {key.phase for key in everything(run)} == {"forward", "backward", "state", "eval"}


def test_a_run_with_and_one_without_recorded_evaluation_match(tmp_path: Path) -> None:
    train(tmp_path / "with"), train(tmp_path / "without", batches=0)
    for reference, candidate in (("with", "without"), ("without", "with")):
        result = tt.compare(tmp_path / reference, tmp_path / candidate)
        assert result.verdict == "match" and not result.unmatched
        assert any("records of an evaluation" in note for note in result.notes)


def test_two_recorded_evaluations_are_compared_with_each_other(tmp_path: Path) -> None:
    train(tmp_path / "a"), train(tmp_path / "b"), train(tmp_path / "wrong", wrong=0.5)
    assert tt.compare(tmp_path / "a", tmp_path / "b").verdict == "match"
    result = tt.compare(tmp_path / "a", tmp_path / "wrong")
    assert result.first is not None and result.first.key.phase == "eval" and result.first.key.step == 1
    assert "of the evaluation before it" in result.sentence
    assert result.counts["diverged"] and all(
        row["phase"] == "eval" for row in result.rows if row["status"] in ("diverged", "close")
    )


def test_more_evaluation_on_one_side_is_no_divergence(tmp_path: Path) -> None:
    train(tmp_path / "a"), train(tmp_path / "b", batches=1)
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "match" and {each.key.phase for each in result.unmatched} == {"eval"}


def test_a_module_that_only_evaluation_uses() -> None:
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Softmax(-1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) if self.training else self.head(self.body(x))

    model = Switching()
    with tt.capture(model, evaluation=True, optimizer=torch.optim.SGD(model.parameters())) as tap:
        model(torch.ones(2, 4)).sum().backward()
        evaluate(model)
    assert coverage(tap)["head"] == ("seen", "in evaluation alone")


@pytest.mark.parametrize("to", FORMATS)
def test_exports_keep_evaluation_apart(tmp_path: Path, to: str) -> None:
    run = train(tmp_path / "a").run
    out = tmp_path / f"out.{to}"
    export(run, to, out)
    assert everything(tt.open(out)) == everything(run)


def test_an_export_without_its_manifest_knows_evaluation_by_name(tmp_path: Path) -> None:
    run = train(tmp_path / "a").run
    export(run, "npy", tmp_path / "out")
    for file in tmp_path.glob("out/manifest*"):
        file.unlink()
    assert set(everything(tt.open(tmp_path / "out"))) == set(everything(run))


def test_show_report_health_and_replay_take_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "a")
    monkeypatch.setattr("sys.argv", ["tensortap", "show", str(tmp_path / "a"), "--phase", "eval"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and "eval" in capsys.readouterr().out
    assert tt.health(tmp_path / "a").verdict in ("healthy", "suspicious")
    tt.compare(tmp_path / "a", tmp_path / "a").save(tmp_path / "page.html")
    assert tt.replay(tmp_path / "a", "2", net(), step=1).verdict == "match"
    run = tt.open(tmp_path / "a")
    assert run.arguments(next(run.records(phase="eval"))) is None


def test_an_inference_only_run_is_recorded_as_without_it() -> None:
    runs = []
    for evaluation in (False, True):
        model = net().eval()
        with tt.capture(model, evaluation=evaluation) as tap, torch.no_grad():
            model(torch.ones(2, 4))
        runs.append(everything(tap.run))
    assert runs[0] == runs[1] and {key.phase for key in runs[0]} == {"forward"}


def test_paddle() -> None:
    paddle = pytest.importorskip("paddle")
    model = paddle.nn.Linear(4, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with tt.capture(model, evaluation=True, optimizer=optimizer) as tap:
        model(paddle.ones([3, 4])).sum().backward()
        optimizer.step()
        model.eval()
        with paddle.no_grad():
            model(paddle.ones([2, 4]))
    ran = {(key.step, key.phase) for key in everything(tap.run) if key.phase != "state"}
    assert ran == {(0, "forward"), (0, "backward"), (1, "eval")}
