"""The saving hook on paddle: names of files, and its trainers' peculiarities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortap.compat.hook_result_checker import main
from tensortap.compat.saving_hook import register_saving_hook, remove_saving_hook
from tensortap.store.formats.npy.names import files_in

paddle = pytest.importorskip("paddle")
nn = paddle.nn


class Net(nn.Layer):  # type: ignore[misc, name-defined]
    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.recomputed = recomputed

    def forward(self, x: Any) -> Any:
        x = self.fc1(x)
        if self.recomputed:
            from paddle.distributed.fleet.utils import recompute

            return self.fc2(recompute(self.norm, x))
        return self.fc2(self.norm(x))


def batch(seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal((3, 4)), dtype="float32")


def train(model: Any, steps: int = 1) -> None:
    for step in range(steps):
        model(batch(step)).square().sum().backward()


def saved(path: Path, kind: str = "tensors") -> dict[tuple[str, int], Any]:
    folder = path / kind / "rank_0"
    return {(name.name, name.micro): np.load(folder / file) for file, name in files_in(folder) if name}


def test_files_are_named_as_paddle_names_layers_and_parameters(tmp_path: Path) -> None:
    model = Net()
    wrapped = register_saving_hook(
        model,
        path=str(tmp_path / "t"),
        target_class_names=["Linear", "LayerNorm"],
        max_saved_tensors=100,
        max_saved_grads=200,
    )
    assert wrapped is model
    train(model)
    fc1, norm, fc2 = (layer.full_name() for layer in (model.fc1, model.norm, model.fc2))
    assert [file for file, _ in files_in(tmp_path / "t/tensors/rank_0")] == [
        f"tensor_idx_0_layer_class_Linear_layer_name_{fc1}_micro_step_0.npy",
        f"tensor_idx_1_layer_class_LayerNorm_layer_name_{norm}_micro_step_0.npy",
        f"tensor_idx_2_layer_class_Linear_layer_name_{fc2}_micro_step_0.npy",
    ]
    files = [file for file, _ in files_in(tmp_path / "t/grads/rank_0")]
    assert len(files) == 6
    assert f"of_param_name_{model.fc2.weight.name}_micro_step_0.npy" in " ".join(files)
    found = saved(tmp_path / "t", "grads")
    np.testing.assert_array_equal(found[model.fc1.weight.name, 0], model.fc1.weight.grad.numpy())
    assert remove_saving_hook(model) == 1
    train(model)
    assert len(saved(tmp_path / "t")) == 3


def test_gradients_are_seen_before_a_trainer_moves_them_to_master_gradients(tmp_path: Path) -> None:
    model = register_saving_hook(Net(), tmp_path / "t", "Linear", -1, -1)
    main_grads: dict[str, Any] = {}

    def take(parameter: Any) -> Any:
        def hook(gradient: Any) -> None:
            main_grads[parameter.name] = main_grads.get(parameter.name, 0) + gradient.astype("float32").numpy()
            gradient._clear_data()

        return hook

    for parameter in model.parameters():
        parameter.register_hook(take(parameter))
    train(model, 3)
    found = saved(tmp_path / "t", "grads")
    name = model.fc1.weight.name
    np.testing.assert_allclose(sum(found[name, micro] for micro in range(3)), main_grads[name], rtol=1e-5)


def test_recomputation_counts_nothing_twice(tmp_path: Path) -> None:
    model = register_saving_hook(Net(recomputed=True), tmp_path / "t", ["Linear", "LayerNorm"], -1, -1)
    train(model, 2)
    assert [micro for _, micro in saved(tmp_path / "t")] == [0, 0, 0, 1, 1, 1]
    assert len(saved(tmp_path / "t", "grads")) == 12


def test_the_rank_comes_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", "2")
    train(register_saving_hook(Net(), tmp_path / "t", "Linear"))
    assert len(files_in(tmp_path / "t/tensors/rank_2")) == 2


def test_bfloat16_is_saved_as_float32(tmp_path: Path) -> None:
    class Cast(nn.Layer):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x.astype("bfloat16")

    register_saving_hook(cast := Cast(), tmp_path / "t", "Cast")
    out = cast(batch())
    (array,) = saved(tmp_path / "t").values()
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, out.astype("float32").numpy())


def test_two_models_of_one_process_are_paired_by_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their layers' names go on counting: linear_0, linear_1 here and linear_2, linear_3 there."""
    for name in "ab":
        paddle.seed(0)
        train(register_saving_hook(Net(), tmp_path / name, ["Linear", "LayerNorm"]), 2)
    assert main(["--pathA", str(tmp_path / "a"), "--pathB", str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "6 compared; lowest cosine 1 at" in said
    assert "6 paired by order" in said
