"""`tensortap watch` follows a run while it is written, and ends with it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tensortap as tt
from tensortap.cli import app
from tensortap.report.terminal import watch as watch_page
from tensortap.report.terminal.watch import WatchedRank, WatchedStep, WatchPage
from tensortap.store.following import FollowedRun


def train(path: Path, each: Any = lambda step, model: None, steps: int = 5, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tt.capture(model, path, optimizer=optimizer, **options) as tap:
        for step in range(steps):
            each(step, model)
            loss = model(torch.randn(4, 8)).square().mean()
            tap.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tap.flush()
    return tap


def watch(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["watch", *map(str, arguments)])


def test_a_run_is_followed_without_reading_anything_twice(tmp_path: Path) -> None:
    found: list[tuple[int, int]] = []
    followed: list[FollowedRun] = []

    def each(step: int, model: nn.Module) -> None:
        if step == 1:
            followed.append(FollowedRun(tmp_path / "run"))
        if step:
            followed[0].look()
            rank = followed[0].ranks[0]
            assert rank.status == "running" and not followed[0].ended
            found.append((rank.records, [each.step for each in rank.steps][-1]))

    tap = train(tmp_path / "run", each)
    assert [step for _, step in found] == [0, 1, 2, 3]
    assert [records for records, _ in found] == [sum(r.key.step <= step for r in tap.run) for step in range(4)]
    followed[0].look()
    rank = followed[0].ranks[0]
    assert followed[0].ended and rank.records == len(tap.run) and rank.progress["recorded"] == 5
    gradients = [r.summary.l2 for r in tap.run.records(step=4, kind="param_grad")]
    assert rank.steps[-1].gradient_norm == pytest.approx(math.sqrt(sum(each**2 for each in gradients)))
    assert rank.steps[-1].loss == pytest.approx(tap.run.loop(0).value("loss", 4)["value"])


def test_a_finished_run_is_printed_once(tmp_path: Path) -> None:
    train(tmp_path / "run")
    result = watch(tmp_path / "run")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[2].split()[:4] == ["rank", "status", "step", "recorded"]
    assert lines[3].split()[:4] == ["0", "finished", "5", "5"]


def test_a_nan_and_a_failure_are_shown(tmp_path: Path) -> None:
    def each(step: int, model: nn.Module) -> None:
        if step == 3:
            model[0].weight.data.fill_(math.nan)

    with pytest.raises(tt.errors.NonfiniteError):
        train(tmp_path / "run", each, on_nonfinite="stop")
    result = watch(tmp_path / "run")
    assert result.exit_code == 1
    assert "the first NaN or Inf is in output 0 of 0, step 3" in result.stdout
    assert "rank 0 failed: NonfiniteError" in result.stdout
    (newest,) = (line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["3"])
    assert newest[1:3] == ["nan", "nan"]  # the loss and the gradient norm


def test_a_killed_run_ends_and_several_ranks_are_listed(tmp_path: Path) -> None:
    train(tmp_path / "run")
    shutil.copytree(tmp_path / "run/rank_0", tmp_path / "run/rank_1")
    status = tmp_path / "run/rank_1/rank.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "running", "pid": 2**22 + 1}))
    index = tmp_path / "run/rank_1/index.arrows"
    index.write_bytes(index.read_bytes()[:-300])  # and its last batch is torn
    result = watch(tmp_path / "run")
    assert result.exit_code == 1
    assert "rank 1 killed: its process is gone" in result.stdout
    assert [line.split()[1] for line in result.stdout.splitlines()[3:5]] == ["finished", "killed"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    result = watch(tmp_path / "nowhere")
    assert result.exit_code == 2 and "--wait waits for it" in result.stderr
    (tmp_path / "other").mkdir()
    assert "is not a run" in watch(tmp_path / "other").stderr


def test_the_screen_fits_its_width() -> None:
    steps = [WatchedStep(12, 300, 2.25, 0.5, 0), WatchedStep(16, 300, math.nan, None, 7)]
    rank = WatchedRank(0, "running", "", 17, 4, 3.25, 0.0173, 1200, 7, "output 0 of " + "layers." * 20, steps)
    page = WatchPage("runs/a", "GPT, torch", [rank])
    for width in (50, 100):
        assert all(len(line.plain) <= width for line in watch_page.render(page, width)[2:])
    assert "step 17, 4 recorded, 3.25 steps/s, cost 1.7 %" in watch_page.render_line(rank)
