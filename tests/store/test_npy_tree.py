"""A tree of .npy files as a run: its keys, its order, and comparing it with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap
from tensortap.compat.saving_hook import register_saving_hook, remove_saving_hook
from tensortap.core.records import Key


def net(scale: float = 1.0) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    with torch.no_grad():
        model[2].weight.mul_(scale)
    return model


def saved(path: Path, scale: float = 1.0, steps: int = 2) -> Path:
    model = register_saving_hook(net(scale), path, None, -1, -1)
    train(model, steps)
    remove_saving_hook(model)
    return path


def train(model: Any, steps: int = 2, after: Any = lambda: None) -> None:
    for step in range(steps):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        after()


def put(root: Path, file: str, array: Any, kind: str = "tensors", rank: int = 0) -> None:
    folder = root / kind / f"rank_{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / file, array)


def test_records_in_execution_order(tmp_path: Path) -> None:
    run = tensortap.open(saved(tmp_path / "t"))
    records = list(run)
    assert [r.key for r in records[:4]] == [
        Key(0, 0, "forward", "0", 0, "output", "0"),
        Key(0, 0, "forward", "1", 0, "output", "0"),
        Key(0, 0, "forward", "2", 0, "output", "0"),
        Key(0, 0, "forward", "", 0, "output", "0"),
    ]
    assert {r.key for r in records[4:10]} == {
        Key(0, 0, "backward", str(module), 0, "param_grad", name) for module in range(3) for name in ("weight", "bias")
    }
    assert [r.key.step for r in records] == [0] * 10 + [1] * 10
    assert [r.cls for r in records[:3]] == ["Linear", "LayerNorm", "Linear"]
    assert run.notices == []
    file = next((tmp_path / "t/tensors/rank_0").glob("tensor_idx_1_*"))
    np.testing.assert_array_equal(run.load(records[1]), np.load(file))
    assert {row.module: row.calls for row in run.coverage[0]} == {"0": 2, "1": 2, "2": 2, "": 2}


def test_a_tree_is_compared_like_any_run(tmp_path: Path) -> None:
    reference = saved(tmp_path / "a")
    same = tensortap.compare(reference, saved(tmp_path / "b"))
    assert same.verdict == "match"
    assert same.counts["equal"] == 20
    other = tensortap.compare(reference, saved(tmp_path / "c", 1.01))
    assert other.verdict == "diverged"
    assert other.first is not None
    assert other.first.module == "2"


def test_a_tree_is_compared_with_a_captured_run(tmp_path: Path) -> None:
    model = net()
    with tensortap.capture(model, tmp_path / "run", keep="tensors", kinds=("output", "param_grad")) as tap:
        train(model, 2, tap.step)
    result = tensortap.compare(tmp_path / "run", saved(tmp_path / "t"))
    assert result.verdict == "match"
    assert result.counts["equal"] == len(result) == 20
    assert not result.unmatched


def test_several_ranks_next_to_results(tmp_path: Path) -> None:
    for rank in (0, 2):
        put(tmp_path, "tensor_idx_0_layer_class_L_layer_name_x_micro_step_0.npy", np.arange(3.0) + rank, rank=rank)
    (tmp_path / "tensors/compare_rst").mkdir()
    run = tensortap.open(tmp_path)
    assert run.ranks == [0, 2]
    assert [r.summary.max for r in run] == [2.0, 4.0]


def test_names_of_the_original_tool(tmp_path: Path) -> None:
    put(tmp_path, "tensor_idx_0_layer_class_LayerNorm_layer_name_layer_norm_0_micro_step_-1.npy", np.ones(2))
    put(tmp_path, "grad_idx_0_of_param_name_layer_norm_0.w_0_micro_step_0.npy", np.ones(2), "grads")
    put(tmp_path, "tensor_idx_1_of_param_name_layer_norm_0.b_0_micro_step_0.npy", np.ones(2), "grads")
    assert [(r.key.step, r.key.module, r.key.path, r.cls) for r in tensortap.open(tmp_path)] == [
        (-1, "layer_norm_0", "0", "LayerNorm"),
        (0, "layer_norm_0", "w_0", "LayerNorm"),
        (0, "layer_norm_0", "b_0", "LayerNorm"),
    ]


def test_a_layer_called_twice_has_two_calls(tmp_path: Path) -> None:
    for index in range(3):
        put(tmp_path, f"tensor_idx_{index}_layer_class_L_layer_name_x_micro_step_0.npy", np.ones(2))
    assert [r.key.call for r in tensortap.open(tmp_path)] == [0, 1, 2]


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    def name(index: int) -> str:
        return f"tensor_idx_{index}_layer_class_L_layer_name_x{index}_micro_step_0.npy"

    put(tmp_path, name(0), np.ones((2, 3)))
    put(tmp_path, name(1), np.asfortranarray(np.ones((2, 3))))
    put(tmp_path, name(2), np.array(["text"]))
    put(tmp_path, "other.npy", np.ones(2))
    (tmp_path / "tensors/rank_0" / name(3)).write_bytes(b"no numbers")
    run = tensortap.open(tmp_path)
    assert len(run.notices) == 4
    assert [r.key.module for r in run] == ["x0", "x1"]
    assert [r.location is None for r in run] == [False, True]


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_odd_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    put(tmp_path, "tensor_idx_0_layer_class_L_layer_name_x_micro_step_0.npy", np.zeros(shape, np.float16))
    run = tensortap.open(tmp_path)
    (record,) = run
    assert run.load(record).shape == record.shape == shape
