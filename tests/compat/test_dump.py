"""HookerAndDumper on both frameworks: the documented use, the content of the file, and errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import hooks_on
from tensortap.compat.dump import HookerAndDumper, open_dump
from tensortap.errors import RunNotFound, UsageError

Capsys = pytest.CaptureFixture[str]


class Bottleneck(nn.Module):
    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, stride, 1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or wide != out:
            self.downsample = nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def resnet() -> nn.Module:
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    layers = (nn.Sequential(Bottleneck(4, 8, 1), Bottleneck(8, 8, 1)), nn.Sequential(Bottleneck(8, 16, 2)))
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


def images() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def dump(model: nn.Module, folder: Path, *args: Any, backward: bool = True, **options: Any) -> Path:
    dumper = HookerAndDumper(f"{folder}/")
    handle = dumper.register_hooks(model, 0, 3, **options)
    result = model(*(args or (images(),)))
    if backward:
        result.sum().backward()
    dumper.remove_hooks()
    return handle.path


def groups(path: Path, phase: str) -> dict[str, dict[str, Any]]:
    """Datasets by module, of its first call."""
    with h5py.File(path, "r") as file:
        return {
            str(group.attrs["module"]): {name: dataset[()] for name, dataset in group.items()}
            for group in reversed(list(file.values()))
            if group.attrs["phase"] == phase
        }


def test_the_documented_use(tmp_path: Path, capsys: Capsys) -> None:
    model = resnet()
    dumper = HookerAndDumper(file_path=f"{tmp_path}/new/folder/")
    for step in range(5):
        if step == 3:
            dumper.register_hooks(model=model, epoch=0, step=3)
        model(images()).sum().backward()
        if step == 3:
            dumper.remove_hooks()
    path = tmp_path / "new/folder/0-epoch_3-step_dump.hdf5"
    said = capsys.readouterr().out
    assert "hooks registered on" in said and "(Conv2d)" in said
    assert f"dumping to {path}" in said and "all hooks removed" in said and f"file closed: {path}" in said
    assert hooks_on(model) == 0
    contents = dumper.read_h5py_data()
    shown = capsys.readouterr().out
    assert contents["0000_Conv2d"]["feat_output"] == ("float32", (2, 4, 8, 8))
    assert "0000_Conv2d" in shown and "feat_output  float32 [2, 4, 8, 8]" in shown
    with h5py.File(path, "r") as f:
        names: list[str] = []
        f.visit(names.append)
        assert list(f.keys()) == sorted(f.keys()) == list(contents)
        last = next(key for key in reversed(f.keys()) if "BatchNorm2d" in key)
        assert f[f"{last}/grad_input0"][:].shape == (2, 4, 8, 8)
        assert f.attrs["complete"] and set(f.attrs) >= {"epoch", "step"}
        assert {"module", "phase", "call", "class", "dtype"} <= set(f[last].attrs)
        assert {"path", "dtype"} <= set(f[f"{last}/grad_input0"].attrs)


def test_the_values_are_those_of_the_model(tmp_path: Path) -> None:
    plain, dumped = resnet(), resnet()
    path = dump(dumped, tmp_path)
    forward, backward = groups(path, "forward"), groups(path, "backward")
    plain(images()).sum().backward()
    for one, two in zip(plain.parameters(), dumped.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    assert set(forward) == {name for name, _ in plain.named_modules() if name}
    assert (forward["2"]["feat_input0"] < 0).any() and (forward["2"]["feat_output"] >= 0).all()
    assert np.array_equal(forward["1"]["feat_output"], forward["2"]["feat_input0"])
    assert np.array_equal(backward["8"]["grad_output0"], np.ones((2, 5)))
    weight = plain[8].weight.detach().numpy()
    assert np.allclose(backward["8"]["grad_input0"], np.ones((2, 5)) @ weight, rtol=1e-5)
    # The input of a block goes two ways: the share of each adds up to what the block sends back.
    block = backward["5.0"]["grad_input0"]
    assert np.allclose(
        block, backward["5.0.conv1"]["grad_input0"] + backward["5.0.downsample"]["grad_input0"], atol=1e-5
    )
    assert backward["0"]["grad_input0"].shape == (0,) and backward["0"]["grad_input0"].dtype == np.float32


def test_only_the_first_level(tmp_path: Path) -> None:
    found = groups(dump(resnet(), tmp_path, recursive=False), "forward")
    assert sorted(found) == [str(n) for n in range(9)]


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner((x, (x * 2, None)), None, scale=x + 1)
        return out["sum"] + out["more"][0]


class Inner(nn.Module):
    def forward(self, pair: Any, nothing: None, scale: torch.Tensor) -> dict[str, Any]:
        return {"sum": pair[0] + pair[1][0] * scale, "more": (scale * 2, None)}


def test_nested_arguments_none_keywords_and_dicts(tmp_path: Path) -> None:
    x = torch.randn(3, requires_grad=True)
    path = dump(Awkward(), tmp_path, x)
    with h5py.File(path, "r") as file:
        forward = file["0000_Inner"]
        paths = {name: forward[name].attrs["path"] for name in forward}
        assert paths == {
            **{f"feat_input{n}": p for n, p in enumerate(("0.0", "0.1.0", "0.1.1", "1", "scale"))},
            **{f"feat_output{n}": p for n, p in enumerate(("sum", "more.0", "more.1"))},
        }
        assert forward["feat_input2"].shape == (0,) and forward["feat_input2"].attrs["none"]
        assert np.array_equal(forward["feat_input4"][:], (x + 1).detach())
        backward = file["0001_Inner"]
        assert np.array_equal(backward["grad_input0"][:], np.ones(3))
        assert backward["grad_input3"].shape == (0,)
        assert np.allclose(backward["grad_input4"][:], (x * 2 + 2).detach())
        assert np.array_equal(backward["grad_output1"][:], np.ones(3))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.att = nn.Linear(4, 4), nn.MultiheadAttention(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        mask = torch.zeros(3, 3)
        return self.att(y, y, y, need_weights=False, attn_mask=mask)[0]


def test_a_tensor_passed_several_times_has_one_gradient_that_the_others_refer_to(
    tmp_path: Path, capsys: Capsys
) -> None:
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    path = dump(Attends(), tmp_path, x)
    with h5py.File(path, "r") as file:
        group = next(g for g in file.values() if g.attrs["module"] == "att" and g.attrs["phase"] == "backward")
        fed = next(g for g in file.values() if g.attrs["module"] == "first" and g.attrs["phase"] == "backward")
        assert np.array_equal(group["grad_input0"][()], fed["grad_output0"][()])  # all of what y gets back
        for name in ("grad_input1", "grad_input2"):
            assert group[name].attrs["none"] and group[name].shape == (0,)
            assert group[name].attrs["same_as"] == "grad_input0"
        (mask,) = (d for d in group.values() if d.attrs["path"] == "attn_mask")  # it simply has none
        assert mask.attrs["none"] and "same_as" not in mask.attrs
        assert "same_as" not in group["grad_input0"].attrs
    assert {r.key.path for r in tt.open(path).records(module="att", kind="grad_input")} == {"0"}
    assert tt.compare(path, path).verdict == "match"
    HookerAndDumper().read_h5py_data(path)
    assert "grad_input1  None (same as grad_input0)" in capsys.readouterr().out


def test_a_missing_gradient_without_a_repeated_tensor_is_none(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * y * weight

    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    with h5py.File(dump(Twice(), tmp_path, x, x, weight), "r") as file:
        (group,) = (g for g in file.values() if g.attrs["phase"] == "backward")
        assert group["grad_input2"].shape == (3,)
        assert all(group[f"grad_input{n}"].attrs["none"] for n in range(2))
        assert "same_as" not in group["grad_input1"].attrs


class OneTuple(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2,)


def test_a_tuple_of_one_has_a_number(tmp_path: Path) -> None:
    with h5py.File(dump(nn.Sequential(OneTuple()), tmp_path, torch.ones(2), backward=False), "r") as file:
        assert list(file["0000_OneTuple"]) == ["feat_input0", "feat_output0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool])
def test_dtypes_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(64, dtype=torch.float64).to(dtype)
    path = dump(nn.Sequential(nn.Identity()), tmp_path, x, backward=False)
    with h5py.File(path, "r") as file:
        dataset = file["0000_Identity/feat_output"]
        assert dataset.attrs["dtype"] == str(dtype).removeprefix("torch.")
        assert np.array_equal(dataset[:], (x.float() if dtype == torch.bfloat16 else x).numpy())
    run = tt.open(path)
    assert all(torch.equal(run.torch(record), x) for record in run)


def test_each_epoch_and_step_has_its_own_file(tmp_path: Path, capsys: Capsys) -> None:
    model, dumper = nn.Sequential(nn.Linear(2, 2)), HookerAndDumper(f"{tmp_path}/")
    for step in range(3):
        dumper.register_hooks(model, 1, step)  # never removed: the next one finishes it
        model(torch.ones(1, 2))
    dumper.remove_hooks()
    dumper.remove_hooks()
    assert "still registered: finishing" in capsys.readouterr().out
    assert hooks_on(model) == 0
    for step in range(3):
        with h5py.File(tmp_path / f"1-epoch_{step}-step_dump.hdf5", "r") as file:
            assert list(file) == ["0000_Linear"] and file.attrs["complete"]


def test_a_dump_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    model, dumper = nn.Sequential(nn.Linear(2, 2)), HookerAndDumper(f"{tmp_path}/", is_screen_display=True)
    with pytest.raises(RunNotFound):
        dumper.read_h5py_data()
    with dumper.register_hooks(model, 0, 0):
        model(torch.ones(1, 2))
        assert list(dumper.read_h5py_data()) == ["0000_Linear"]
    assert hooks_on(model) == 0


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")


def test_an_exception_leaves_no_hook_and_a_readable_file(tmp_path: Path) -> None:
    model, dumper = nn.Sequential(nn.Linear(2, 2), Broken()), HookerAndDumper(f"{tmp_path}/")
    with pytest.raises(RuntimeError, match="no"), dumper.register_hooks(model, 0, 0) as handle:
        model(torch.ones(1, 2))
    assert hooks_on(model) == 0
    run = tt.open(handle.path)
    assert not run.finished and "RuntimeError: no" in run.notices[0]
    assert [r.key.module for r in run] == ["0", "0", "1"]


def test_a_killed_dump_is_readable_and_marked_incomplete(tmp_path: Path) -> None:
    script = f"""
import os, torch
from tensortap.compat.dump import HookerAndDumper
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
HookerAndDumper({str(tmp_path)!r} + "/").register_hooks(model, 0, 0)
model(torch.ones(1, 2))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 9
    path = tmp_path / "0-epoch_0-step_dump.hdf5"
    with h5py.File(path, "r") as file:
        assert list(file) == ["0000_Linear", "0001_ReLU"] and not file.attrs["complete"]
    assert "not complete" in tt.open(path).notices[0]


_LIMITED = """
import resource, signal, sys, torch
from tensortap.compat.dump import HookerAndDumper

folder, way = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # writes past it fail, as on a full disk
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)))
dumper = HookerAndDumper(folder + "/")
if way == "register_hooks":
    dumper.register_hooks(model, 0, 0)
else:
    for layer in model:
        layer.register_forward_hook(dumper.forward_hook_fn)
for _ in range(3):
    model(torch.ones(64, 32)).sum().backward()
if way != "neither removed":
    dumper.remove_hooks()
print("trained")
"""


@pytest.mark.parametrize("way", ["register_hooks", "plain hooks", "neither removed"])
def test_a_full_disk_ends_the_dump_and_not_the_training(tmp_path: Path, way: str) -> None:
    ran = subprocess.run([sys.executable, "-c", _LIMITED, str(tmp_path), way], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.endswith("trained\n"), ran.stderr
    assert ran.stderr.count("File too large; earlier groups are readable") == 1
    assert "Exception ignored" not in ran.stderr and "h5py" not in ran.stderr
    with h5py.File(tmp_path / "0-epoch_0-step_dump.hdf5", "r") as file:
        assert 2 <= len(file) <= 4 and not file.attrs["complete"]
        assert all(np.isfinite(group["feat_output"][()]).all() for group in file.values())
    if way != "neither removed":
        assert f"{len(tt.open(tmp_path)) // 2} groups written, then no more: File too large" in ran.stdout


def test_a_dump_of_a_model_that_never_ran_says_so(tmp_path: Path, capsys: Capsys) -> None:
    dumper = HookerAndDumper(tmp_path)
    dumper.register_hooks(nn.Sequential(nn.ReLU()), 0, 0)
    dumper.remove_hooks()
    assert "0 groups written (no hooked module ran before remove_hooks), file closed" in capsys.readouterr().out


@pytest.mark.parametrize("numbers", [("best", 0), ("a/b", 0), (0, None), (0, 1.5), (-1, 0), (0, "3")])
def test_epoch_and_step_are_numbers(tmp_path: Path, numbers: tuple[Any, Any]) -> None:
    dumper = HookerAndDumper(tmp_path)
    with pytest.raises(UsageError, match=r"(epoch|step) takes an integer of 0 or more"):
        dumper.register_hooks(nn.ReLU(), *numbers)
    assert not list(tmp_path.iterdir())
    handle = dumper.register_hooks(nn.ReLU(), np.int64(2), torch.tensor(3))
    assert handle.path.name == "2-epoch_3-step_dump.hdf5"
    handle.remove()


def test_datasets_are_shown_in_order_and_with_keywords(tmp_path: Path, capsys: Capsys) -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return x * 2, {"kept": x * mask, "none": x + 1}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, rest = self.pair(x, mask=torch.ones(2))
            return first.sum() + (rest["kept"] * 3).exp().sum()

    path = dump(Net(), tmp_path, torch.ones(2, requires_grad=True))
    capsys.readouterr()
    HookerAndDumper().read_h5py_data(path)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "0000_Pair  pair · forward",
        "    feat_input0  float32 [2]",
        "    feat_input1  float32 [2]  mask",
        "    feat_output0  float32 [2]",
        "    feat_output1  float32 [2]  1.kept",
        "    feat_output2  float32 [2]  1.none",
        "0001_Pair  pair · backward",
        "    grad_output0  float32 [2]",
        "    grad_output1  float32 [2]  1.kept",
        "    grad_output2  None  1.none",
        "    grad_input0  float32 [2]",
        "    grad_input1  None  mask",
    ]


def test_plain_hooks(tmp_path: Path) -> None:
    layer, dumper = nn.Linear(2, 3), HookerAndDumper(f"{tmp_path}/")
    handles = [
        layer.register_forward_hook(dumper.forward_hook_fn),
        layer.register_full_backward_hook(dumper.backward_hook_fn),
    ]
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    dumper.backward_hook_fn(layer, (None,), (torch.ones(1, 3),))
    for handle in handles:
        handle.remove()
    dumper.remove_hooks()
    with h5py.File(tmp_path / "0-epoch_0-step_dump.hdf5", "r") as file:
        assert list(file) == ["0000_Linear", "0001_Linear", "0002_Linear"]
        assert list(file["0000_Linear"]) == ["feat_input0", "feat_output"]
        assert list(file["0001_Linear"]) == ["grad_output0", "grad_input0"]
        assert np.allclose(file["0001_Linear/grad_input0"], layer.weight.detach().sum(0), rtol=1e-5)
        assert file["0002_Linear/grad_input0"].shape == (0,)


# --- hooks placed by hand after the dump is finished -----------------------------------------------------------------
def placed_by_hand(framework: str, dumper: HookerAndDumper) -> tuple[Any, Any]:
    """A layer with the dumper's forward hook, and an input for it."""
    if framework == "torch":
        layer: Any = nn.Linear(2, 3)
        layer.register_forward_hook(dumper.forward_hook_fn)
        return layer, torch.ones(1, 2)
    paddle = pytest.importorskip("paddle")
    layer = paddle.nn.Linear(2, 3)
    layer.register_forward_post_hook(dumper.forward_hook_fn)
    return layer, paddle.ones([1, 2])


both = pytest.mark.parametrize("framework", ["torch", "paddle"])


@both
def test_user_placed_hooks_do_not_change_a_finished_dump(framework: str, tmp_path: Path) -> None:
    dumper = HookerAndDumper(f"{tmp_path}/")
    layer, x = placed_by_hand(framework, dumper)
    layer(x)
    dumper.remove_hooks()
    path = tmp_path / "0-epoch_0-step_dump.hdf5"
    before = path.read_bytes()
    with pytest.warns(RuntimeWarning, match="dump nothing more: remove_hooks has finished the dump") as told:
        for _ in range(3):
            layer(x)
    assert len(told) == 1
    assert path.read_bytes() == before
    assert list(dumper.read_h5py_data()) == ["0000_Linear"]
    dumper.remove_hooks()
    assert path.read_bytes() == before


@both
def test_user_placed_hooks_write_to_the_next_dump_of_register_hooks(
    framework: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    dumper = HookerAndDumper(f"{tmp_path}/")
    layer, x = placed_by_hand(framework, dumper)
    model = nn.Sequential(layer) if framework == "torch" else pytest.importorskip("paddle").nn.Sequential(layer)
    with dumper.register_hooks(model, 0, 0) as handle:
        model(x)
    before = handle.path.read_bytes()
    with pytest.warns(RuntimeWarning, match="dump nothing more"):
        model(x)
    assert handle.path.read_bytes() == before
    with dumper.register_hooks(model, 0, 1) as handle:
        model(x)
    with h5py.File(handle.path, "r") as file:
        assert len(file) == 2  # by the hook that was placed by hand, and by that of register_hooks
    assert (tmp_path / "0-epoch_0-step_dump.hdf5").read_bytes() == before


@both
def test_user_placed_hooks_never_replace_a_finished_dump_of_an_earlier_process(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "0-epoch_0-step_dump.hdf5"
    with h5py.File(path, "w") as file:  # as another tool leaves it
        file["018_Linear/feat_output"] = np.ones(3, np.float32)
    before = path.read_bytes()
    layer, x = placed_by_hand(framework, HookerAndDumper(f"{tmp_path}/"))
    with pytest.warns(RuntimeWarning, match=r"0-epoch_0-step_dump.hdf5 is a finished dump"):
        layer(x)
    assert path.read_bytes() == before


def test_the_dump_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "0-epoch_0-step_dump.hdf5"
    path.write_bytes(b"\x89HDF\r\n and no more")
    dumper = HookerAndDumper(f"{tmp_path}/")
    layer, x = placed_by_hand("torch", dumper)
    layer(x)
    dumper.remove_hooks()
    assert list(dumper.read_h5py_data()) == ["0000_Linear"]


def test_register_hooks_finishes_the_dump_of_user_placed_hooks(tmp_path: Path, capsys: Capsys) -> None:
    dumper = HookerAndDumper(f"{tmp_path}/")
    layer, x = placed_by_hand("torch", dumper)
    layer(x)
    with pytest.raises(UsageError, match="another epoch or step"):
        dumper.register_hooks(layer, 0, 0)
    dumper.register_hooks(layer, 0, 1)
    assert "finishing" in capsys.readouterr().out
    dumper.remove_hooks()
    with h5py.File(tmp_path / "0-epoch_0-step_dump.hdf5", "r") as file:
        assert file.attrs["complete"] and list(file) == ["0000_Linear"]


# --- names of groups -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("digits", [3, 4])
def test_groups_are_found_with_three_digits_and_with_four(tmp_path: Path, digits: int) -> None:
    path = tmp_path / "0-epoch_3-step_dump.hdf5"
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with h5py.File(path, "w") as file:
        file[f"{18:0{digits}d}_BatchNorm2d/grad_input0"] = values
        file[f"{19:0{digits}d}_BatchNorm2d/grad_input0"] = values + 1
    contents = HookerAndDumper().read_h5py_data(path)
    for name in ("018_BatchNorm2d", "0018_BatchNorm2d", "18_BatchNorm2d"):
        with open_dump(path) as f:
            data = f[f"{name}/grad_input0"]
            assert (data.shape, data.dtype) == ((2, 3), np.float32)
            assert np.array_equal(data[:], values) and np.array_equal(data.value, values)
            assert np.array_equal(f[name]["grad_input0"].value, values)
            assert name in f and f"{name}/grad_input0" in f and f.get(name) is not None
            assert f"/{name}/grad_input0" in f
        assert contents[name]["grad_input0"] == contents[f"{name}/grad_input0"] == ("float32", (2, 3))
        assert name in contents and contents.get(f"{name}/grad_input0") is not None
        (record,) = tt.open(path).records(module=name)
        assert np.array_equal(tt.open(path).load(record), values)
    assert len(contents) == 2
    for name in ("020_BatchNorm2d", "018_Conv2d", "018_BatchNorm2d/feat_output", "nothing", "9" * 30 + "_x"):
        assert name not in contents and contents.get(name) is None
        with pytest.raises(KeyError):
            contents[name]
        with open_dump(path) as f:
            assert name not in f and f.get(name) is None
            with pytest.raises(KeyError):
                f[name]


def test_an_open_dump_works_as_the_original_dumpers_documentation_shows(tmp_path: Path) -> None:
    path = dump(resnet(), tmp_path)
    with open_dump(path) as f:
        for key in f:
            assert f[key].name == f"/{key}"
        seen: list[str] = []

        def look(name: str) -> None:
            dataset = f[name]
            if isinstance(dataset, h5py.Dataset):
                seen.append(f"{dataset.dtype} {dataset.shape} {dataset[:].size} {dataset.value.size}")

        f.visit(look)
        assert len(seen) > 100
        assert isinstance(f, h5py.File) and all(isinstance(group, h5py.Group) for group in f.values())
    with pytest.raises(RunNotFound):
        open_dump(tmp_path / "nothing.hdf5")


def test_hostile_class_names(tmp_path: Path) -> None:
    odd = type("a/../\x1b[2J%", (nn.ReLU,), {})
    path = dump(nn.Sequential(odd()), tmp_path, torch.ones(2), backward=False)
    with h5py.File(path, "r") as file:
        assert list(file) == ["0000_a%2F..%2F\x1b[2J%25"]
    assert next(iter(tt.open(path))).cls == "a/../\x1b[2J%"


def test_a_leaf_is_its_own_module(tmp_path: Path) -> None:
    assert list(groups(dump(nn.Linear(2, 2), tmp_path, torch.ones(1, 2)), "forward")) == [""]


def test_paddle(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")
    layers = paddle.nn
    model = layers.Sequential(
        layers.Conv2D(3, 4, 3), layers.ReLU(), layers.Sequential(layers.Flatten(), layers.Linear(144, 5))
    )
    dumper = HookerAndDumper(f"{tmp_path}/")
    dumper.register_hooks(model, 0, 3)
    x = paddle.randn([2, 3, 8, 8])
    model(x).sum().backward()
    dumper.remove_hooks()
    path = tmp_path / "0-epoch_3-step_dump.hdf5"
    forward, backward = groups(path, "forward"), groups(path, "backward")
    assert set(forward) == set(backward) == {"0", "1", "2", "2.0", "2.1"}
    assert np.array_equal(forward["0"]["feat_input0"], x.numpy())
    weight = model[2][1].weight.numpy()
    assert np.allclose(backward["2.1"]["grad_input0"], np.ones((2, 5)) @ weight.T, rtol=1e-5)
    assert backward["0"]["grad_input0"].shape == (0,)


def test_paddle_distinguishes_the_parts_of_a_split(tmp_path: Path) -> None:
    paddle = pytest.importorskip("paddle")

    class Mix(paddle.nn.Layer):
        def forward(self, a: Any, b: Any) -> Any:
            return a * 2 + b * 3

    class Model(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.mix = paddle.nn.Linear(4, 4), Mix()

        def forward(self, x: Any) -> Any:
            return self.mix(*paddle.split(self.fc(x), 2, axis=1))

    model = Model()
    dumper = HookerAndDumper(f"{tmp_path}/")
    handle = dumper.register_hooks(model, 0, 3)
    model(paddle.ones([2, 4])).sum().backward()
    dumper.remove_hooks()
    found = groups(handle.path, "backward")["mix"]
    assert np.all(found["grad_input0"] == 2) and np.all(found["grad_input1"] == 3)


def test_the_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    page = (Path(tt.__file__).parents[2] / "docs" / "hdf5-dump.md").read_text()
    monkeypatch.chdir(tmp_path)
    for script in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(script, "hdf5-dump.md", "exec"), {})
    assert "(4, 8, 6, 6) float32" in capsys.readouterr().out
