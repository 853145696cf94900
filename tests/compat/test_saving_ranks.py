"""Two processes that train together: each saves into the folder of its rank, and the checker compares both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tensortap
from support.saving import kit_of, saved
from tensortap.compat.hook_result_checker import main

TORCH = """
import os, sys, torch
from torch import distributed as dist, nn
from support.saving import CLASSES, kit_of
from tensortap.compat.saving_hook import register_saving_hook
rank, kit = int(sys.argv[1]), kit_of("torch")
for path in sys.argv[2:]:
    early = path.endswith("early")
    model = kit.net()
    if early:
        register_saving_hook(model, path, CLASSES, -1, -1)
    dist.init_process_group("gloo", init_method=f"file://{path}.group", rank=rank, world_size=2)
    if not early:
        register_saving_hook(model, path, CLASSES, -1, -1)
    model = nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        kit.train(model, first=10 * rank + step)
    dist.barrier()
    dist.destroy_process_group()
os._exit(0)  # torch's own threads sometimes abort a process that ends right after its group, with or without hooks
"""
PADDLE = """
import sys
from support.saving import CLASSES, kit_of
from tensortap.compat.saving_hook import register_saving_hook
kit = kit_of("paddle")
model = register_saving_hook(kit.net(), sys.argv[2], CLASSES, -1, -1)
for step in range(2):
    kit.train(model, first=10 * int(sys.argv[1]) + step)
"""


def launch(script: str, *paths: Path) -> None:
    """Run two processes at the same time, as launchers of both frameworks do. They save one run to each path."""
    here = Path(__file__).parents[1]
    found = [here, Path(tensortap.__file__).parents[1]]
    processes = []
    for rank in range(2):
        ranks = {} if script == TORCH else {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2"}
        environment = {**os.environ, **ranks, "PYTHONPATH": os.pathsep.join(map(str, found))}
        command = [sys.executable, "-c", script, str(rank), *map(str, paths)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
    for process in processes:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said.decode()


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders with a run of hooks placed early, before the group exists, and one of hooks placed late."""
    folder = tmp_path_factory.mktemp("saved")
    for name in "ab":
        (folder / name).mkdir()
        launch(TORCH, folder / name / "early", folder / name / "late")
    return folder


@pytest.fixture(params=["late", "early", "paddle"], ids=["torch", "torch, before the group", "paddle"])
def saved_twice(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path]:
    """The framework, and the folders of two equal runs."""
    if request.param != "paddle":
        folder = request.getfixturevalue("of_torch")
        return "torch", folder / "a" / request.param, folder / "b" / request.param
    for name in "ab":
        launch(PADDLE, tmp_path / name)
    return "paddle", tmp_path / "a", tmp_path / "b"


def test_each_process_saves_its_own_tensors(
    saved_twice: tuple[str, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    framework, path, again = saved_twice
    for kind, count in (("tensors", 6), ("grads", 4)):
        assert sorted(folder.name for folder in (path / kind).iterdir()) == ["rank_0", "rank_1"]
        assert [len(saved(path, kind, rank)) for rank in range(2)] == [count, count]
    run = tensortap.open(path)
    assert run.ranks == [0, 1] and run.info["world"] == 2
    kit = kit_of(framework)
    for rank in range(2):
        for step in range(2):
            model = kit.net()  # nobody takes a step, so all forwards are of the same weights
            kit.train(model, first=10 * rank + step)
            (output,) = run.records(rank=rank, step=step, module="fc1", kind="output")
            np.testing.assert_array_equal(run.load(output), model.fc1(kit.batch(10 * rank + step)).detach().numpy())
            (gradient,) = run.records(rank=rank, step=step, module="fc2", kind="param_grad")
            np.testing.assert_allclose(run.load(gradient), np.asarray(model.fc2.weight.grad), rtol=1e-5, atol=1e-8)

    assert main(["--pathA", str(path), "--pathB", str(again)]) == 0
    said = capsys.readouterr().out
    assert "tensors rank_1: 6 compared" in said and "all 20 pairs are equal bit for bit" in said
    assert sorted(file.name for file in (path / "grads/compare_rst").glob("*_rst.csv")) == [
        "rank_0_rst.csv",
        "rank_1_rst.csv",
    ]
