"""The pair of hooks that scripts register by hand."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensortap.compat.gradients import save_gradients_and_inputs
from tensortap.errors import StoreWriteError, UsageError

# Torch says so of every full backward hook on a first layer.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class DownBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.b = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_blk2 = DownBlock(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_blk2(x)


def register(module: nn.Module, name: str, folder: Path, **options: Any) -> None:
    forward_hook, back_hook = save_gradients_and_inputs(name, folder, **options)
    module.register_forward_hook(forward_hook)
    module.register_full_backward_hook(back_hook)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def load(folder: Path, name: str = "gradients_and_inputs_x.npz") -> dict[str, Any]:
    return dict(np.load(folder / name, allow_pickle=False))


def test_registered_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Net()
    register(model.down_blk2.b[4], "down_blk2_b4", tmp_path)
    seen: list[Any] = []
    model.down_blk2.b[4].register_full_backward_hook(lambda m, i, o: seen.append((i[0].clone(), o[0].clone())))
    model(torch.randn(2, 4)).sum().backward()
    data = load(tmp_path, "gradients_and_inputs_down_blk2_b4.npz")
    assert set(data) == {"grad_input", "grad_output", "input", "output", "dtypes"}
    np.testing.assert_array_equal(data["grad_input"], seen[0][0])
    np.testing.assert_array_equal(data["grad_output"], seen[0][1])
    assert data["input"].shape == data["output"].shape == (2, 4)
    text = capsys.readouterr().out
    assert "output <class 'torch.Tensor'>" in text and "grad_input_0 shape [2, 4]" in text
    assert "Grad Output for down_blk2_b4:" in text


def test_every_step_has_a_file_unless_overwrite_is_set(tmp_path: Path) -> None:
    model = Net()
    register(model.down_blk2.b[4], "x", tmp_path, quiet=True)
    register(model.down_blk2.b[5], "y", tmp_path, quiet=True, overwrite=True)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    assert files(tmp_path) == [
        "gradients_and_inputs_x.1.npz",
        "gradients_and_inputs_x.2.npz",
        "gradients_and_inputs_x.npz",
        "gradients_and_inputs_y.npz",
    ]


def test_a_first_layer_has_no_grad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    register(model[0], "x", tmp_path)
    model(torch.randn(2, 4)).sum().backward()
    assert set(load(tmp_path)) == {"grad_output", "input", "output", "dtypes"}
    assert "Grad Input for x: None" in capsys.readouterr().out


def test_bfloat16_and_tuples(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, y * 3

    two = Two()
    register(two, "x", tmp_path, quiet=True)
    x, y = (torch.ones(3, dtype=torch.bfloat16, requires_grad=True) * k for k in (1, 2))
    two(x, y)[0].sum().backward()  # the second output is not used
    data = load(tmp_path)
    assert {"input", "input_1", "output", "output_1", "grad_input", "grad_output"} <= set(data)
    assert data["input_1"].dtype == np.float32 and json.loads(str(data["dtypes"]))["input_1"] == "bfloat16"


def test_each_call_is_saved_with_its_own_backward(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    register(layer, "x", tmp_path, quiet=True)
    start = torch.randn(2, 4, requires_grad=True)
    layer(layer(start)).sum().backward()
    last, first = load(tmp_path), load(tmp_path, "gradients_and_inputs_x.1.npz")
    np.testing.assert_array_equal(first["input"], start.detach())
    np.testing.assert_array_equal(first["output"], last["input"])
    np.testing.assert_array_equal(first["grad_output"], last["grad_input"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    layer = nn.Linear(4, 4)
    register(layer, "x", tmp_path, quiet=True)
    x = torch.randn(2, 4, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert files(tmp_path) == ["gradients_and_inputs_x.npz"]
    assert {"input", "output", "grad_input", "grad_output"} <= set(load(tmp_path))


def test_no_references_are_held(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    attributes = set(vars(layer))
    register(layer, "x", tmp_path, quiet=True)
    x = torch.randn(2, 4, requires_grad=True)
    output = layer(x)
    gone = weakref.ref(output)
    output.sum().backward()
    del output
    gc.collect()
    assert gone() is None and set(vars(layer)) == attributes
    with torch.no_grad():
        layer(x)
    layer(x)  # a forward without a backward
    layer(x).sum().backward()
    assert len(files(tmp_path)) == 2


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    layer = nn.Linear(4, 4)
    register(layer, "x", tmp_path, quiet=True)
    layer(torch.ones(1, 4)).sum().backward()
    assert files(tmp_path) == []
    register(layer, "y", tmp_path, quiet=True, rank=None)
    layer(torch.ones(1, 4)).sum().backward()
    assert files(tmp_path) == ["gradients_and_inputs_y.rank1.npz"]


def test_a_name_must_not_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder="):
        save_gradients_and_inputs("../x", tmp_path)


# --- where the files go ----------------------------------------------------------------------------------------------
def test_a_missing_folder_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    layer = nn.Linear(4, 4)
    forward_hook, backward_hook = save_gradients_and_inputs("x", folder="debug/new")
    layer.register_forward_hook(forward_hook)
    layer.register_full_backward_hook(backward_hook)
    monkeypatch.chdir(tmp_path / "elsewhere")  # the folder stays where it was meant
    layer(torch.ones(1, 4)).sum().backward()
    assert files(tmp_path / "debug/new") == ["gradients_and_inputs_x.npz"]
    assert f"saved {tmp_path}/debug/new/gradients_and_inputs_x.npz" in capsys.readouterr().out


def test_a_folder_that_cannot_be_created_raises_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(StoreWriteError, match=r"cannot be created: .*folder="):
            save_gradients_and_inputs("x", folder)


def test_a_failed_write_stops_the_saving_not_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(1, 4, requires_grad=True)
    register(layer, "x", tmp_path / "debug")
    layer(x).sum().backward()
    (tmp_path / "debug/gradients_and_inputs_x.npz").rename(tmp_path / "first.npz")
    (tmp_path / "debug").rmdir()
    assert "saved" in capsys.readouterr().out
    with pytest.warns(RuntimeWarning, match=r"stopped saving x: .*could not be written.*training continues") as told:
        for _ in range(3):
            layer(x).sum().backward()
    assert len(told) == 1
    assert "saved" not in capsys.readouterr().out
    assert layer.weight.grad is not None and (layer.weight.grad == 4).all()  # all four backwards came through
