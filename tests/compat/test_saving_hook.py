"""The saving hook on torch: its files, their content, and that training is unchanged."""

from __future__ import annotations

import copy
import errno
import gc
import logging
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.tapping import hooks_on
from tensortap.compat import npy_files, saving_hook
from tensortap.compat.saving_hook import register_hook, register_saving_hook, remove_saving_hook
from tensortap.errors import StoreWriteError, UsageError
from tensortap.store.formats.npy.names import files_in, grad_file, parse, tensor_file


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.fc2(self.norm(self.fc1(x)))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def train(model: Any, steps: int = 1) -> None:
    for step in range(steps):
        model(batch(step)).square().sum().backward()


def names(path: Path, kind: str = "tensors", rank: int = 0) -> list[str]:
    return [name for name, _ in files_in(path / kind / f"rank_{rank}")]


def short(path: Path, kind: str = "tensors") -> list[tuple[int, str, str, int]]:
    found = (name for _, name in files_in(path / kind / "rank_0"))
    return [(n.number, n.name, n.path, n.micro) for n in found if n is not None]


# --- as people use it ----------------------------------------------------------------------------------------------
def test_outputs_and_gradients_of_the_chosen_classes(tmp_path: Path) -> None:
    model = net()
    wrapped = register_saving_hook(
        model,
        path=str(tmp_path / "t"),
        target_class_names=["Linear", "LayerNorm"],
        max_saved_tensors=100,
        max_saved_grads=200,
    )
    assert wrapped is model
    train(model, 2)
    assert names(tmp_path / "t") == [
        "tensor_idx_0_layer_class_Linear_layer_name_fc1_micro_step_0.npy",
        "tensor_idx_1_layer_class_LayerNorm_layer_name_norm_micro_step_0.npy",
        "tensor_idx_2_layer_class_Linear_layer_name_fc2_micro_step_0.npy",
        "tensor_idx_3_layer_class_Linear_layer_name_fc1_micro_step_1.npy",
        "tensor_idx_4_layer_class_LayerNorm_layer_name_norm_micro_step_1.npy",
        "tensor_idx_5_layer_class_Linear_layer_name_fc2_micro_step_1.npy",
    ]
    grads = names(tmp_path / "t", "grads")
    assert len(grads) == 12
    assert {g.split("_of_param_name_")[1] for g in grads[:6]} == {
        f"{name}_micro_step_0.npy" for name, _ in model.named_parameters()
    }
    saved = np.load(tmp_path / "t/tensors/rank_0" / names(tmp_path / "t")[0], allow_pickle=False)
    np.testing.assert_array_equal(saved, model.fc1(batch(0)).detach().numpy())


def test_the_older_name_and_one_class_as_a_string(tmp_path: Path) -> None:
    train(register_hook(net(), tmp_path / "t", "LayerNorm"))
    assert short(tmp_path / "t") == [(0, "norm", "0", 0)]
    assert {name for _, name, _, _ in short(tmp_path / "t", "grads")} == {"norm.weight", "norm.bias"}


def test_without_targets_every_class_is_saved(tmp_path: Path) -> None:
    model = net()
    assert register_saving_hook(model, tmp_path / "t") is model
    train(model)
    assert [name for _, name, _, _ in short(tmp_path / "t")] == ["fc1", "norm", "fc2", ""]
    assert "layer_class_Net_layer_name_(root)_micro_step_0" in names(tmp_path / "t")[-1]


def test_a_relative_path_is_resolved_at_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = register_saving_hook(net(), target_class_names="Linear")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(model)
    assert len(names(tmp_path / "tmp_tensors")) == 2


def test_each_rank_has_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    train(register_saving_hook(net(), tmp_path / "t", "Linear"))
    assert len(names(tmp_path / "t", rank=3)) == 2
    assert len(names(tmp_path / "t", "grads", rank=3)) == 4


# --- limits --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("limit", "tensors", "grads"), [(0, 0, 0), (3, 3, 3), (-1, 12, 24)])
def test_limits(tmp_path: Path, limit: int, tensors: int, grads: int) -> None:
    model = register_saving_hook(net(), tmp_path / "t", ["Linear", "LayerNorm"], limit, limit)
    train(model, 4)
    assert len(names(tmp_path / "t")) == tensors
    assert len(names(tmp_path / "t", "grads")) == grads


def test_limits_per_micro_step_restart_in_each(tmp_path: Path) -> None:
    model = register_saving_hook(
        net(), tmp_path / "t", "Linear", max_saved_tensors_per_step=1, max_saved_grads_per_step=2
    )
    train(model, 3)
    assert short(tmp_path / "t") == [(0, "fc1", "0", 0), (0, "fc1", "0", 1), (0, "fc1", "0", 2)]
    assert [(number, micro) for number, _, _, micro in short(tmp_path / "t", "grads")] == [
        (number, micro) for micro in range(3) for number in range(2)
    ]


def test_a_limit_must_be_a_number(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_saved_tensors"):
        register_saving_hook(net(), tmp_path, max_saved_tensors="all")  # type: ignore[arg-type]


# --- what is in the files ------------------------------------------------------------------------------------------
def test_gradients_are_those_of_one_backward(tmp_path: Path) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear", -1, -1)
    train(model, 3)  # nobody clears the gradients
    saved = {
        (name.name, name.micro): np.load(tmp_path / "t/grads/rank_0" / file)
        for file, name in files_in(tmp_path / "t/grads/rank_0")
        if name
    }
    total = sum(saved["fc1.weight", micro] for micro in range(3))
    np.testing.assert_allclose(total, model.fc1.weight.grad.numpy(), rtol=1e-5)
    alone = net()
    alone(batch(2)).square().sum().backward()
    np.testing.assert_array_equal(saved["fc1.weight", 2], alone.fc1.weight.grad.numpy())


def test_a_shared_parameter_is_saved_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    train(register_saving_hook(model, tmp_path / "t", "Linear"))
    assert sorted(name for _, name, _, _ in short(tmp_path / "t", "grads")) == ["0.bias", "0.weight", "1.bias"]


def test_tuples_containers_and_a_leaf_as_the_root(tmp_path: Path) -> None:
    lstm = register_saving_hook(nn.LSTM(4, 5), tmp_path / "lstm", "LSTM")
    lstm(torch.randn(2, 3, 4))[0].sum().backward()
    assert [path for _, _, path, _ in short(tmp_path / "lstm")] == ["0", "1.0", "1.1"]
    assert len(names(tmp_path / "lstm", "grads")) == 4
    box = register_saving_hook(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU())), tmp_path / "box", "Sequential")
    train(box)
    assert [name for _, name, _, _ in short(tmp_path / "box")] == ["1", ""]


def test_bfloat16_is_saved_as_float32(tmp_path: Path) -> None:
    model = register_saving_hook(nn.Linear(4, 4).bfloat16(), tmp_path / "t", "Linear")
    out = model(batch().bfloat16())
    out.float().sum().backward()
    saved = np.load(tmp_path / "t/tensors/rank_0" / names(tmp_path / "t")[0], allow_pickle=False)
    assert saved.dtype == np.float32
    np.testing.assert_array_equal(saved, out.detach().float().numpy())


def test_a_module_called_twice_has_two_files(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.fc(self.fc(x))

    train(register_saving_hook(Twice(), tmp_path / "t", "Linear"))
    assert short(tmp_path / "t") == [(0, "fc", "0", 0), (1, "fc", "0", 0)]
    assert len(names(tmp_path / "t", "grads")) == 2


# --- micro steps ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("pipelined", [True, False])
def test_recomputation_counts_nothing_twice(tmp_path: Path, reentrant: bool, pipelined: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Any) -> Any:
            x = self.fc1(x)
            return self.fc2(checkpoint(self.norm, x, use_reentrant=reentrant))

    torch.manual_seed(0)
    model = register_saving_hook(Checkpointed(), tmp_path / "t", ["Linear", "LayerNorm"], -1, -1)
    if pipelined:
        losses = [model(batch(step)).square().sum() for step in range(3)]
        for loss in losses:
            loss.backward()
    else:
        train(model, 3)
    one = [(0, "fc1"), (1, "norm"), (2, "fc2")]
    assert [(n, name, m) for n, name, _, m in short(tmp_path / "t")] == [
        (n + 3 * m, name, m) for m in range(3) for n, name in one
    ]
    assert len(names(tmp_path / "t", "grads")) == 18


def test_a_gradient_that_comes_in_pieces_is_saved_whole(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            x = checkpoint(self.fc, x, use_reentrant=True)
            return checkpoint(self.fc, x, use_reentrant=True)

    model = register_saving_hook(Shared(), tmp_path / "t", "Linear")
    for step in range(2):
        model.zero_grad()
        model(batch(step).requires_grad_()).square().sum().backward()
    remove_saving_hook(model)  # or the end of the process: until then more might come
    assert [(name, micro) for _, name, _, micro in sorted(short(tmp_path / "t", "grads"))] in (
        [("fc.bias", 0), ("fc.weight", 0), ("fc.bias", 1), ("fc.weight", 1)],
        [("fc.weight", 0), ("fc.bias", 0), ("fc.weight", 1), ("fc.bias", 1)],
    )
    file = next((tmp_path / "t/grads/rank_0").glob("*fc.weight_micro_step_1.npy"))
    np.testing.assert_allclose(np.load(file), model.fc.weight.grad.numpy(), rtol=1e-6)


def test_parameters_that_are_replaced_or_unfrozen_later_are_seen(tmp_path: Path) -> None:
    model = net()
    model.fc2.weight.requires_grad_(False)
    register_saving_hook(model, tmp_path / "t", "Linear", -1, -1)
    train(model)
    model.fc1.weight = nn.Parameter(torch.randn(8, 4))
    model.fc2.weight.requires_grad_(True)
    train(model)
    found = [(name, micro) for _, name, _, micro in short(tmp_path / "t", "grads")]
    assert ("fc2.weight", 0) not in found
    assert {("fc1.weight", 0), ("fc1.weight", 1), ("fc2.weight", 1)} <= set(found)
    assert len(set(found)) == len(found) == 7


def test_a_whole_model_recomputed(tmp_path: Path) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear")
    for step in range(2):
        checkpoint(model, batch(step).requires_grad_(), use_reentrant=False).sum().backward()
    assert [(name, micro) for _, name, _, micro in short(tmp_path / "t")] == [
        ("fc1", 0),
        ("fc2", 0),
        ("fc1", 1),
        ("fc2", 1),
    ]


def test_a_model_whose_parts_are_called_without_it(tmp_path: Path) -> None:
    model = register_saving_hook(net(), tmp_path / "t", ["Linear", "LayerNorm"])
    for step in range(3):
        model.forward(batch(step)).sum().backward()  # hooks of the root do not run
    assert [micro for _, _, _, micro in short(tmp_path / "t")] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_submodule_called_before_the_model_belongs_to_its_first_micro_step(tmp_path: Path) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear")
    model.fc1(batch())
    train(model, 2)
    assert [micro for _, _, _, micro in short(tmp_path / "t")] == [0, 0, 0, 1, 1]


def test_nothing_grows_with_the_micro_steps(tmp_path: Path) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear", 4, -1)
    (hook,) = [h for h in saving_hook._live_hooks if h.watches(model)]
    sizes = []
    for _ in range(5):
        train(model, 3)
        sizes.append((sum(map(len, hook._clock._past.values())), len(hook._watcher._step_hooks), hooks_on(model)))
    assert len(set(sizes)) == 1


# --- what it leaves alone ------------------------------------------------------------------------------------------
def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain, saved = net(), register_saving_hook(net(), tmp_path / "t", None, -1, -1)
    train(plain, 3)
    train(saved, 3)
    for ours, theirs in zip(plain.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_removal_leaves_no_hook_and_saves_nothing(tmp_path: Path) -> None:
    model = net()
    before = hooks_on(model)
    register_saving_hook(model, tmp_path / "t", "Linear")
    train(model)
    assert remove_saving_hook(model) == 1
    assert hooks_on(model) == before
    assert remove_saving_hook(model) == 0
    train(model)
    assert len(names(tmp_path / "t")) == 2


def test_every_registration_counts_separately(tmp_path: Path) -> None:
    first, second = net(), net(1)
    register_saving_hook(first, tmp_path / "a", "Linear")
    train(first, 2)
    register_saving_hook(second, tmp_path / "b", "LayerNorm")
    register_saving_hook(first, tmp_path / "c", "Linear")
    train(second)
    train(first)
    assert short(tmp_path / "b") == [(0, "norm", "0", 0)]
    assert short(tmp_path / "c") == [(0, "fc1", "0", 0), (1, "fc2", "0", 0)]
    assert len(names(tmp_path / "a")) == 6
    assert remove_saving_hook(first) == 2


def test_a_model_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear")
    train(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_copies_do_not_save(tmp_path: Path) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear")
    train(copy.deepcopy(model))
    assert names(tmp_path / "t") == names(tmp_path / "t", "grads") == []


def test_a_hooked_model_can_be_saved_whole(tmp_path: Path) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear")
    train(model)
    torch.save(model, tmp_path / "model.pt")
    train(torch.load(tmp_path / "model.pt", weights_only=False))
    assert len(names(tmp_path / "t")) == 2


def test_a_full_disk_stops_saving_and_not_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear")
    train(model)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(npy_files, "write_npy", full)
    train(model)
    train(model)
    train(model)
    said = capsys.readouterr().err
    assert said.count("No space left") == 1 and "Errno" not in said
    assert re.search(r"tensors/rank_0/tensor_idx_\S+\.npy could not be written: .*; earlier files are readable", said)
    assert len(names(tmp_path / "t")) == 2
    assert not list((tmp_path / "t").rglob("*.partial"))


def test_a_write_that_stops_in_the_middle_names_the_reason(tmp_path: Path) -> None:
    script = f"""
import resource, signal, torch
from tensortap.compat.saving_hook import register_saving_hook
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))  # a larger file is cut, as on a full disk
model = register_saving_hook(torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.Linear(2, 40)), {str(tmp_path)!r})
model(torch.ones(64, 8)).sum().backward()
print("trained")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout == "trained\n"
    assert "could not be written: File too large; earlier files are readable" in ran.stderr
    assert len(names(tmp_path)) == 1


def test_a_limit_that_leaves_tensors_out_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear", max_saved_tensors=3, max_saved_grads=8)
    train(model)
    assert caplog.messages == []
    for _ in range(3):
        train(model)
    assert caplog.messages == [
        "tensortap: max_saved_tensors=3 is reached: later tensors are not saved; a negative number saves all",
        "tensortap: max_saved_grads=8 is reached: later grads are not saved; a negative number saves all",
    ]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_saved_tensors": 4, "max_saved_grads": 8},
        {"max_saved_tensors": 0, "max_saved_grads": 0},
        {"max_saved_tensors_per_step": 1, "max_saved_grads_per_step": 1},
    ],
)
def test_limits_that_leave_out_what_they_are_asked_to_are_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limits: dict[str, int]
) -> None:
    model = register_saving_hook(net(), tmp_path / "t", "Linear", **limits)
    train(model)
    train(model)
    remove_saving_hook(model)
    assert caplog.messages == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_output_that_is_not_saved_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.fc(x), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    model = register_saving_hook(Ragged(), tmp_path / "t")
    model(torch.ones(1, 2))[0].sum().backward()
    remove_saving_hook(model)
    assert caplog.messages == ["tensortap: (root): output 1 is not recorded: a nested tensor has no single shape"]


# --- mistakes ------------------------------------------------------------------------------------------------------
def test_a_class_that_the_model_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match=r"no module of the model matches target_class_names=\['Liner'\].*Linear.*Net"):
        register_saving_hook(net(), tmp_path / "t", "Liner")
    with caplog.at_level(logging.WARNING):
        register_saving_hook(net(), tmp_path / "t", ["Linear", "Conv2D"])
    assert "target_class_names: the model has no module of class Conv2D" in caplog.text


def test_a_stage_without_target_layers_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.ReLU()
    assert register_saving_hook(model, tmp_path / "t", "Linear") is model
    assert "saves nothing" in caplog.text


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = net()
    before = hooks_on(model)
    with pytest.raises(StoreWriteError):
        register_saving_hook(model, tmp_path / "file", "Linear")
    assert hooks_on(model) == before


def test_files_of_an_earlier_run_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(register_saving_hook(net(), tmp_path / "t", "Linear"))
    register_saving_hook(net(), tmp_path / "t", "Linear")
    assert "holds 2 files of an earlier run" in caplog.text


# --- names ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["layers.0.fc1", "", "a/b", "..", "100%", "x@y", "(root)", "层.0", "a_micro_step_1"])
def test_names_can_be_read_back(name: str) -> None:
    file = tensor_file(7, "Linear", name, "past.0", 12)
    assert Path(file).name == file
    assert parse(file) == (7, "Linear", name, "past.0", 12)
    if name:
        assert parse(grad_file(7, name, 0)) == (7, "", name, "0", 0)


def test_names_that_are_too_long_stay_apart() -> None:
    one, two = (tensor_file(0, "Linear", f"{start}{'x' * 400}", "0", 0) for start in "ab")
    assert one != two
    assert len(one) <= 255
    assert parse(one) is not None
