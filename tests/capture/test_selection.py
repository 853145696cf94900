"""Which modules, kinds, steps and ranks are recorded, and how much of them is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.tapping import tapped
from tensortap.errors import UsageError
from tensortap.report.html.data.environment import settings


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.Tanh())


def modules_of(run: Any) -> set[str]:
    return {record.key.module for record in run}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"", "0", "1", "1.0", "1.1", "2"}),
        ({"modules": "1.*"}, {"1.0", "1.1"}),
        ({"modules": ["0", "1.?"]}, {"0", "1.0", "1.1"}),
        ({"modules": "(root)"}, {""}),
        ({"modules": lambda name, module: isinstance(module, nn.Tanh)}, {"2"}),
        ({"classes": "Linear"}, {"0", "1.1"}),
        ({"classes": ["LayerNorm", "Tanh"]}, {"1.0", "2"}),
        ({"classes": ["Linear"], "modules": "1*"}, {"1.1"}),
    ],
)
def test_modules(run_path: Path, options: dict[str, Any], expected: set[str]) -> None:
    run, tap = tapped(net(), run_path, **options)
    assert modules_of(run) == expected
    assert {row.module for row in tap.coverage} == expected


@pytest.mark.parametrize("kind", ["input", "output", "grad_input", "grad_output", "param", "param_grad"])
def test_kinds(run_path: Path, kind: str) -> None:
    run, _ = tapped(net(), run_path, kinds=kind)
    assert {record.key.kind for record in run} == {kind}


def test_keep_as_a_mapping_takes_the_first_pattern(run_path: Path) -> None:
    run, _ = tapped(net(), run_path, keep={"1.0": "summary", "1.*": "tensors", "nothing": "tensors"})
    kept = {record.key.module for record in run if record.location is not None}
    assert kept == {"1.1"}
    assert all(record.summary.elements for record in run)


def test_a_pattern_that_keeps_nothing_is_reported(run_path: Path) -> None:
    run, tap = tapped(net(), run_path, modules="1*", keep={"1.O": "tensors", "0": "tensors", "*": "summary"})
    said = [notice for notice in tap.notices if notice.startswith("keep:")]
    assert len(said) == 2 and all(notice in " ".join(run.notices) for notice in said)
    assert "'1.O' matches no tapped module" in said[0] and "did you mean 1." in said[0]
    assert "'0' matches no tapped module" in said[1]  # it is in the model, but was not chosen


def test_a_pattern_or_class_that_matches_nothing_is_reported_at_once(run_path: Path, capsys: Any) -> None:
    model = net()
    with tt.capture(model, run_path, modules=["1.*", "2.*", "(root)"]) as tap:
        said = capsys.readouterr().err
        assert said.count("tensortap: modules: '2.*' matches no module of the model; did you mean 2?") == 1
        assert "'1.*'" not in said and "(root)" not in said
        zoo.loss_of(model(zoo.batch())).backward()
    assert any("'2.*' matches no module" in notice for notice in tap.notices)
    assert any("'2.*' matches no module" in notice for notice in tt.open(run_path).notices)
    with tt.capture(model, run_path.with_name("classes"), classes=["Linear", "Conv3d"]):
        assert "classes: the model has no module of class Conv3d" in capsys.readouterr().err


@pytest.mark.parametrize(("wrong", "meant"), [("module.1.1", "1.1"), ("module.1.*", "1.*"), ("net._orig_mod.2", "2")])
def test_a_name_with_a_wrapper_in_front_is_corrected(run_path: Path, wrong: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"did you mean {re.escape(meant)}\?$"):
        tt.capture(net(), run_path, modules=wrong)


def test_a_selection_by_class_alone_names_no_pattern(run_path: Path) -> None:
    expected = r"^no module of the model matches classes=\['Conv3d'\]; the model has LayerNorm, Linear"
    with pytest.raises(UsageError, match=expected):
        tt.capture(net(), run_path, classes=["Conv3d"])


def test_only_chosen_steps_are_recorded(run_path: Path) -> None:
    model = net()
    with tt.capture(model, run_path, steps=range(1, 6, 2)) as tap:
        for _ in range(5):
            zoo.loss_of(model(zoo.batch())).backward()
            tap.step()
    assert tt.open(run_path).steps == [1, 3]


def test_other_ranks_write_nothing(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = net()
    with tt.capture(model, run_path, ranks=[0]) as tap:
        zoo.loss_of(model(zoo.batch())).backward()
        tap.step()
    assert not run_path.exists()


def test_rank_from_the_launcher(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        model = net()
        with tt.capture(model, run_path) as tap:
            zoo.loss_of(model(zoo.batch())).backward()
            tap.step()
    run = tt.open(run_path)
    assert run.ranks == [0, 1] and {record.rank for record in run} == {0, 1}
    assert json.loads((run_path / "run.json").read_text())["world"] == 2


def test_the_run_records_how_it_was_read(tmp_path: Path) -> None:
    runs = {gather: tapped(net(), tmp_path / str(gather), gather=gather)[0] for gather in (True, False)}
    assert [run.info["config"]["gather"] for run in runs.values()] == [True, False]
    said = {setting.name: setting for setting in settings(runs[True].info, runs[False].info)}["gather"]
    assert (said.reference, said.candidate) == ("on", "off")


def test_a_run_without_the_gather_option(tmp_path: Path) -> None:
    """As those of older versions."""
    torch.manual_seed(0)
    model = net()
    for name in ("old", "new"):
        tapped(model, tmp_path / name)
    about = json.loads((tmp_path / "old/run.json").read_text())
    del about["config"]["gather"]
    (tmp_path / "old/run.json").write_text(json.dumps(about))
    assert tt.compare(tmp_path / "old", tmp_path / "new").first is None
    said = {s.name: s for s in settings(tt.open(tmp_path / "old").info, tt.open(tmp_path / "new").info)}["gather"]
    assert (said.reference, said.candidate) == ("–", "on")


def test_optimizer_counts_the_steps(run_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, run_path, optimizer=optimizer):
        for _ in range(3):
            zoo.loss_of(model(zoo.batch())).backward()
            optimizer.step()
    assert tt.open(run_path).steps == [0, 1, 2]
    optimizer.step()  # after the block nobody counts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ("outputs",)}, "grad_input"),
        ({"kinds": ()}, "empty"),
        ({"keep": "everything"}, "summary"),
        ({"keep": {"*": "all"}}, "'all'"),
        ({"modules": "layers.*"}, r"no module .*modules='layers\.\*'; its outermost modules are 0, 1, 2$"),
        ({"modules": "1.O"}, r"did you mean .*1\.0"),
        ({"classes": "Conv2d"}, "LayerNorm, Linear"),
        ({"steps": 3.5}, "container of ints"),
        ({"steps": "0-5"}, r"steps takes an int .*range\(0, 100, 10\), not '0-5'"),
        ({"steps": ["0", "1"]}, "container of ints"),
        ({"ranks": "0"}, "ranks takes an int"),
        ({"on_error": "ignore"}, "warn"),
        ({"compiled": "yes"}, "eager"),
    ],
)
def test_invalid_arguments_are_refused(run_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tt.capture(net(), run_path, **options)
    assert not run_path.exists()


def test_not_a_model(run_path: Path) -> None:
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        tt.capture(nn.Linear, run_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="DataParallel would want the model on the GPUs")
def test_wrappers_are_stripped(tmp_path: Path) -> None:
    plain, _ = tapped(net(), tmp_path / "plain")
    wrapped, _ = tapped(nn.DataParallel(net()), tmp_path / "wrapped")
    assert {r.key for r in plain} == {r.key for r in wrapped}
    assert {r.cls for r in plain} == {r.cls for r in wrapped}


def test_a_module_called_module_is_not_a_wrapper(run_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.module(x))

    run, _ = tapped(Own(), run_path)
    assert modules_of(run) == {"", "module", "other"}


def test_hostile_names_stay_inside_the_index(run_path: Path) -> None:
    model = nn.Module()
    names = ["../../etc/passwd", "a\nb", "[red]", "名前", 'quote"', "x" * 300]
    for name in names:
        model.add_module(name.replace(".", "_"), nn.Linear(4, 4))
    model.forward = lambda x: sum(m(x) for m in model.children())  # type: ignore[method-assign]
    run, _ = tapped(model, run_path)
    assert modules_of(run) == {"", *(n.replace(".", "_") for n in names)}
    assert {p.name.split("_")[0] for p in (run_path / "rank_0").iterdir()} <= {
        "index.arrows",
        "calls.jsonl",
        "loop.jsonl",
        "progress.json",
        "rank.json",
        "coverage.json",
        "step",
    }
    assert all(run.load(record) is not None for record in run)
