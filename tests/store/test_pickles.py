"""Pickles of whole models and of anything else are refused with the reason, whatever their ending, and never run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.errors import MissingDependency, RunNotFound, RunUnreadable
from tensortap.store.formats import checkpoint

ENDINGS = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".model", "")
OF_OTHERS = (".npz", ".npy", ".hdf5", ".h5", ".json", ".safetensors")
"""Endings of other formats that are read."""


class Net(nn.Sequential):
    """A class of the user's own."""


class Evil:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def dumped(value: Any, path: Path, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def saved(value: Any, path: Path, legacy: bool = False) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.mark.parametrize("ending", [*ENDINGS, *OF_OTHERS, ".pdparams", ".pdopt"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_whole_model_is_refused(tmp_path: Path, ending: str, legacy: bool) -> None:
    path = saved(Net(nn.Linear(2, 2)), tmp_path / f"model{ending}", legacy)
    with pytest.raises(RunUnreadable, match=r"Net.*Save model\.state_dict\(\), not the model") as raised:
        tt.open(path)
    assert str(path) in str(raised.value) and "can run any code" in str(raised.value)


@pytest.mark.parametrize("ending", [*ENDINGS, *OF_OTHERS[:-1], ".pdparams"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_opens_whatever_its_ending(tmp_path: Path, ending: str, legacy: bool) -> None:
    path = saved(Net(nn.Linear(2, 2)).state_dict(), tmp_path / f"weights{ending}", legacy)
    assert [str(record.key.path) for record in tt.open(path)] == ["weight", "bias"]


@pytest.mark.parametrize("ending", [*ENDINGS, *OF_OTHERS])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_no_pickle_is_run(tmp_path: Path, ending: str, protocol: int) -> None:
    mark = tmp_path / "mark"
    path = dumped({"weights": [Evil(mark)]}, tmp_path / f"evil{ending}", protocol)
    with pytest.raises(RunUnreadable, match=r"evil.* is a pickle: it would load pathlib"):
        tt.open(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())  # noqa: S301  # what was avoided
    assert mark.exists()


@pytest.mark.parametrize("protocol", [0, 1])
def test_old_pickles_are_recognised_by_their_ending(tmp_path: Path, protocol: int) -> None:
    with pytest.raises(RunUnreadable, match="is a pickle"):
        tt.open(dumped({"a": Net()}, tmp_path / "a.pkl", protocol))


def test_arrays_are_better_saved_by_numpy(tmp_path: Path) -> None:
    with pytest.raises(RunUnreadable, match=r"a pickle of NumPy arrays.*numpy\.savez"):
        tt.open(dumped({"w": np.ones(3)}, tmp_path / "a.pkl"))


def test_plain_values_and_damaged_pickles(tmp_path: Path) -> None:
    with pytest.raises(RunUnreadable, match="is a pickle"):
        tt.open(dumped([1, "two"], tmp_path / "a.pkl"))
    whole = pickle.dumps({"a": Net(nn.Linear(2, 2))})
    for size in range(2, len(whole), 37):
        (tmp_path / "b.pkl").write_bytes(whole[:size])
        with pytest.raises(RunUnreadable, match="is a pickle"):
            tt.open(tmp_path / "b.pkl")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_of_torch_that_is_called_safetensors(tmp_path: Path, legacy: bool) -> None:
    """torch reads a file by its ending here."""
    path = saved(nn.Linear(2, 2).state_dict(), tmp_path / "weights.safetensors", legacy)
    with pytest.raises(RunUnreadable, match=r"is a file of torch\.save.* rename it to weights\.pt"):
        tt.open(path)


@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 66_176])
def test_a_safetensors_file_may_begin_as_a_pickle_does(tmp_path: Path, length: int) -> None:
    """Its first bytes are the length of its header, which may be 80 02 in hexadecimal."""
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'.ljust(length)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header + np.float32([1, 2]).tobytes())
    assert path.read_bytes()[0] == 0x80
    run = tt.open(path)
    assert run.load(next(run.records())).tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "a.pt")
    with pytest.raises(RunUnreadable, match=r"TorchScript.*torch\.jit\.load\(path\)\.state_dict"):
        tt.open(tmp_path / "a.pt")


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(checkpoint, "import_module", missing)
    with pytest.raises(RunUnreadable, match="Net"):
        tt.open(saved(Net(nn.Linear(2, 2)), tmp_path / "model.pt"))
    with pytest.raises(RunUnreadable, match="Net"):
        tt.open(dumped(Net(), tmp_path / "model.pkl"))
    with pytest.raises(MissingDependency, match="pip install torch"):
        tt.open(saved(Net(nn.Linear(2, 2)).state_dict(), tmp_path / "weights.pkl"))


def test_missing_and_unknown_paths(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        tt.open(tmp_path / "none.pkl")
    (tmp_path / "notes.txt").write_text("Dear diary")
    with pytest.raises(RunUnreadable, match="of no known format"):
        tt.open(tmp_path / "notes.txt")
