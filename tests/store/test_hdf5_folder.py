"""A folder of HDF5 dumps as one run: epochs, steps and ranks, in both frameworks, with missing or damaged files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import paddle
import pytest
import torch

import tensortap as tt
from tensortap.compat.dump import HookerAndDumper
from tensortap.errors import RunUnreadable
from tensortap.store.formats.hdf5.file import dump_step

PLACES = [(0, 3), (0, 4), (1, 3)]


def model_of(framework: str) -> Any:
    nn = torch.nn if framework == "torch" else paddle.nn
    (torch.manual_seed if framework == "torch" else paddle.seed)(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def dump(folder: Path, framework: str = "torch", wrong_at: tuple[int, int] | None = None) -> Path:
    """A dump of each place. At one of them the model has other weights."""
    model, dumper = model_of(framework), HookerAndDumper(f"{folder}/")
    for number, (epoch, step) in enumerate(PLACES):
        x = np.random.default_rng(number).normal(size=(3, 4)).astype(np.float32)
        if (epoch, step) == wrong_at:
            model[2].weight.data = model[2].weight.data * 1.1
        with dumper.register_hooks(model, epoch, step):
            model(torch.from_numpy(x) if framework == "torch" else paddle.to_tensor(x)).sum().backward()
    return folder


def old_dump(path: Path, scale: float = 1.0) -> Path:
    """As older dumpers leave it: no attributes."""
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        group = file.create_group("000_Conv2d")
        group["feat_input0"] = np.arange(6, dtype=np.float32)
        group["feat_output"] = np.arange(6, dtype=np.float32) * np.float32(scale)
    return path


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump(tmp_path_factory.mktemp("dumps") / "a")


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_epochs_and_steps_are_one_run(tmp_path: Path, framework: str) -> None:
    folder = dump(tmp_path / "a", framework)
    run = tt.open(folder)
    assert run.steps == [3, 4, 1_000_003] and run.ranks == [0] and run.finished and run.notices == []
    assert run.info["framework"] == framework
    assert [r.seq for r in run] == list(range(len(run)))
    for (epoch, step), number in zip(PLACES, run.steps, strict=True):
        single = tt.open(folder / f"{epoch}-epoch_{step}-step_dump.hdf5")
        assert [r.key for r in single] == [r.key for r in run.records(step=number)]
        for ours, theirs in zip(single, run.records(step=number), strict=True):
            assert single.load(ours).tobytes() == run.load(theirs).tobytes()
        assert tt.compare(folder, single.path).counts["equal"] == len(single)


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_two_folders_are_compared_step_by_step(tmp_path: Path, framework: str) -> None:
    ours = dump(tmp_path / "a", framework)
    same = tt.compare(ours, dump(tmp_path / "same", framework))
    assert same.verdict == "match" and not same.unmatched and len(same) == len(tt.open(ours))
    result = tt.compare(ours, dump(tmp_path / "b", framework, wrong_at=(0, 4)))
    assert result.first is not None
    assert (result.first.key.step, result.first.key.module, result.first.key.kind) == (4, "2", "output")
    other = tt.compare(ours, dump(tmp_path / "c", framework, wrong_at=(1, 3)))
    assert other.first is not None and other.first.key.step == 1_000_003


def test_ranks_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        dump(tmp_path / "a")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"0-epoch_3-step_dump.hdf5", "0-epoch_3-step_dump.rank2.hdf5"} <= names and len(names) == 9
    run = tt.open(tmp_path / "a")
    assert run.ranks == [0, 1, 2] and run.info["world"] == 3 and len(run) == 3 * len(list(run.records(rank=1)))
    (tmp_path / "a/1-epoch_3-step_dump.rank2.hdf5").unlink()
    lacking = tt.open(tmp_path / "a")
    assert "missing dumps, of steps that other ranks have (1): rank 2, step 1000003" in lacking.notices[0]


def test_dumps_of_older_tools(tmp_path: Path) -> None:
    for folder, scale in (("a", 1.0), ("b", 1.5)):
        for step in (10, 2):
            old_dump(tmp_path / folder / f"0-epoch_{step}-step_dump.h5", scale if step == 10 else 1.0)
    run = tt.open(tmp_path / "a")
    assert [(r.key.step, r.key.module, r.key.kind) for r in run] == [
        (step, "0000_Conv2d", kind) for step in (2, 10) for kind in ("input", "output")
    ]
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None and result.first.key.step == 10


def test_the_epoch_of_a_single_file_counts_as_in_a_folder(tmp_path: Path) -> None:
    """Else step 3 of epoch 1 would be compared with step 3 of epoch 0."""
    assert [r.key.step for r in tt.open(old_dump(tmp_path / "2-epoch_3-step_dump.hdf5"))] == [2_000_003] * 2
    assert dump_step("no", None) == 0 and dump_step(True, 1 << 60) == 0


def test_a_damaged_dump_does_not_hide_the_others(dumps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dumps, tmp_path / "b")
    (folder / "0-epoch_4-step_dump.hdf5").write_bytes(b"no hdf5")
    run = tt.open(folder)
    assert run.steps == [3, 1_000_003] and not run.finished
    assert "unreadable dumps (1): 0-epoch_4-step_dump.hdf5" in run.notices[0]
    for path in folder.iterdir():
        path.write_bytes(b"no hdf5")
    with pytest.raises(RunUnreadable, match="none of its 3 dumps can be read"):
        tt.open(folder)


def test_an_unfinished_dump_is_reported(dumps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dumps, tmp_path / "b")
    with h5py.File(folder / "0-epoch_4-step_dump.hdf5", "a") as file:
        file.attrs["complete"] = False
    run = tt.open(folder)
    assert not run.finished and run.notices[0].startswith("0-epoch_4-step_dump.hdf5: the dump is not complete")


def test_several_runs_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    for name in ("gpu_0-epoch_3-step_dump.hdf5", "cpu_0-epoch_4-step_dump.hdf5"):
        old_dump(tmp_path / "a" / name)
    with pytest.raises(RunUnreadable, match="dumps of several runs, whose files begin with 'cpu_' and 'gpu_'"):
        tt.open(tmp_path / "a")
    for name in ("x_0-epoch_3-step_dump.hdf5", "x_0-epoch_3-step_dump.h5"):
        old_dump(tmp_path / "b" / name)
    with pytest.raises(RunUnreadable, match="are dumps of the same step and rank"):
        tt.open(tmp_path / "b")


def test_other_files_in_the_folder_are_left_alone(dumps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dumps, tmp_path / "b")
    (folder / "notes.txt").write_text("mine")
    old_dump(folder / "weights.h5")
    assert tt.compare(dumps, folder).verdict == "match"
