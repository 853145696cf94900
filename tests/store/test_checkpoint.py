"""Checkpoints open as runs with parameters only; damaged files, and files that would run code, are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tensortap as tt
from tensortap.core import dtypes
from tensortap.errors import RunNotFound, RunUnreadable

INDEX = "model.safetensors.index.json"


def state(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(5, 4, generator=random),
        "layers.0.fc.weight": torch.randn(4, 4, generator=random),
        "layers.0.fc.bias": torch.randn(4, generator=random),
        "scale": torch.tensor(0.5),
    }


def save(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def save_torch(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def raw(path: Path, header: Any, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def sharded(path: Path, shards: Mapping[str, Mapping[str, Tensor]], **more: Any) -> Path:
    path.mkdir()
    for file, tensors in shards.items():
        save(path / file, tensors)
    places = {name: file for file, tensors in shards.items() for name in tensors} | more.get("places", {})
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return path


def in_two(path: Path, tensors: Mapping[str, Tensor], **more: Any) -> Path:
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    return sharded(path, {file: {n: tensors[n] for n in some} for file, some in parts.items()}, **more)


# --- read ---------------------------------------------------------------------------------------------------------
WRITERS = {
    "file.safetensors": save,
    "state.pt": save_torch,
    "state.pth": save_torch,
    "state.pkl": save_torch,
    "pytorch_model.bin": save_torch,
    "old.pt": lambda path, tensors: save_torch(path, tensors, _use_new_zipfile_serialization=False),
    "nested.ckpt": lambda path, tensors: save_torch(
        path, {"epoch": 3, "state_dict": tensors, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}}
    ),
    "model.pt": lambda path, tensors: save_torch(path, {"model": tensors, "step": 4}),
    "parameters.pt": lambda path, tensors: save_torch(path, {n: nn.Parameter(t) for n, t in tensors.items()}),
    "folder": in_two,
    "single": lambda path, tensors: (path.mkdir(), save(path / "model.safetensors", tensors), path)[-1],
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_holds_the_same(tmp_path: Path, name: str) -> None:
    run = tt.open(WRITERS[name](tmp_path / name, state()))
    found = {f"{r.key.module}.{r.key.path}".lstrip("."): run.load(r) for r in run}
    assert found.keys() == state().keys()
    assert all(np.array_equal(found[key], tensor.numpy()) for key, tensor in state().items())
    assert {(r.key.kind, r.key.phase, r.key.step, r.rank) for r in run} == {("param", "state", 0, 0)}
    assert (run.finished, run.notices, run.ranks, run.steps) == (True, [], [0], [0])


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_compares_with_every_other(tmp_path: Path, name: str) -> None:
    ours = save(tmp_path / "reference.safetensors", state())
    result = tt.compare(ours, WRITERS[name](tmp_path / name, state()))
    assert (result.verdict, result.counts) == ("match", {"equal": 4})
    other = tt.compare(ours, WRITERS[name](tmp_path / f"other {name}", state() | {"scale": torch.tensor(0.75)}))
    assert other.first is not None
    assert (other.verdict, other.first.key.path, len(other.births)) == ("diverged", "scale", 1)
    assert str(other) == "The checkpoints differ in scale; it is off by 0.5 (relative L2)."
    assert (other.first.max_abs, other.first.difference.exact) == (0.25, True)  # type: ignore[union-attr]


def test_several_that_differ(tmp_path: Path) -> None:
    ours, theirs = save(tmp_path / "a.safetensors", state()), save(tmp_path / "b.safetensors", state(1))
    assert "The checkpoints differ in embed.weight and 2 more; the first is off by" in str(tt.compare(ours, theirs))


def test_names_and_shapes_that_differ(tmp_path: Path) -> None:
    theirs = state() | {"embed.weight": torch.zeros(6, 4), "extra.weight": torch.zeros(2)}
    del theirs["scale"]
    result = tt.compare(save(tmp_path / "a.safetensors", state()), save(tmp_path / "b.safetensors", theirs))
    assert "embed.weight; it has the shape 6×4 instead of 5×4" in str(result)
    assert {(u.side, u.key.module, u.key.path) for u in result.unmatched} == {
        ("reference", "", "scale"),
        ("candidate", "extra", "weight"),
    }


def test_every_dtype(tmp_path: Path) -> None:
    names = [name for name in dtypes.NAMES if name != "complex128"]  # safetensors has none
    tensors = {name: torch.arange(4).to(getattr(torch, name)) for name in names}
    ours = save(tmp_path / "a.safetensors", tensors)
    theirs = save_torch(tmp_path / "b.pt", tensors)
    assert tt.compare(ours, theirs).counts == {"equal": len(names)}
    assert {r.dtype for r in tt.open(theirs)} == set(names)


def test_bf16_against_fp32(tmp_path: Path) -> None:
    ours = save(tmp_path / "a.safetensors", state())
    theirs = save(tmp_path / "b.safetensors", {name: tensor.bfloat16() for name, tensor in state().items()})
    result = tt.compare(ours, theirs)
    assert (result.verdict, result.counts) == ("match", {"close": 3, "equal": 1})
    assert {(row["dtype_reference"], row["dtype_candidate"]) for row in result.rows} == {("float32", "bfloat16")}
    wrong = {name: tensor.bfloat16() * 1.05 for name, tensor in state().items()}
    assert tt.compare(ours, save(tmp_path / "c.safetensors", wrong)).verdict == "diverged"


def test_renames(tmp_path: Path) -> None:
    theirs = {f"model.{name}": tensor for name, tensor in state().items() if "." in name}
    runs = save(tmp_path / "a.safetensors", state()), save(tmp_path / "b.safetensors", theirs)
    result = tt.compare(*runs, rename=[r"^model\.="])
    assert result.counts == {"equal": 3, "unmatched": 1}
    assert any(r"--rename '^model\.='" in note for note in tt.compare(*runs).notes)


def test_all_that_a_run_can_do(tmp_path: Path) -> None:
    for path in (save(tmp_path / "a.safetensors", state()), save_torch(tmp_path / "a.pt", state())):
        run = tt.open(path)
        record = next(iter(run.records(module="embed")))
        assert torch.equal(run.torch(record), state()["embed.weight"])
        assert bytes(run.bytes_of(record)) == state()["embed.weight"].numpy().tobytes()
        assert [array.shape for _, array in run.stream()] == [r.shape for r in run]
        assert run.get(record.key) is not None
        assert run.to_arrow().num_rows == 4


def test_views_and_empty_tensors(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    turned = {"t": whole.T, "part": whole[:, 1:3], "none": torch.empty(0, 3), "conj": torch.tensor([1 + 2j]).conj()}
    run = tt.open(save_torch(tmp_path / "a.pt", turned))
    for record in run:
        assert np.array_equal(run.load(record), turned[record.key.path].resolve_conj().numpy())


# --- against a run -------------------------------------------------------------------------------------------------
def trained(path: Path, model: nn.Module, steps: int = 2) -> Path:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, path, keep="tensors", kinds=("output", "param", "buffer", "param_grad")) as tap:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            tap.step()
    return path


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_checkpoint_equals_the_start_of_a_run(tmp_path: Path) -> None:
    model = network()
    before = save(tmp_path / "before.safetensors", model.state_dict())
    run = trained(tmp_path / "run", model)
    after = save_torch(tmp_path / "after.pt", model.state_dict())
    for pair in ((run, before), (before, run)):
        result = tt.compare(*pair)
        assert (result.verdict, result.counts) == ("match", {"equal": len(model.state_dict())})
        assert {row["kind"] for row in result.rows} == {"param"}
    result = tt.compare(after, run)
    assert (result.verdict, result.unmatched) == ("diverged", [])


def test_a_checkpoint_between_two_steps(tmp_path: Path) -> None:
    model = network()
    trained(tmp_path / "first", model, steps=1)
    between = save(tmp_path / "between.safetensors", model.state_dict())
    run = trained(tmp_path / "whole", network(), steps=2)
    assert tt.compare(between, run).verdict == "diverged"
    for steps in ([1], {1: 1}, {1: 0}):
        assert tt.compare(run, between, steps=steps).verdict == "match"
    assert tt.compare(between, run, steps=[1]).verdict == "match"


def test_a_run_without_parameters_cannot_be_compared_with_a_checkpoint(tmp_path: Path) -> None:
    model = network()
    with tt.capture(model, tmp_path / "run", kinds=("output",)) as tap:
        model(torch.ones(3, 4))
        tap.step()
    result = tt.compare(tmp_path / "run", save(tmp_path / "a.safetensors", model.state_dict()))
    assert result.verdict == "incomparable"
    assert "the reference has no records" in str(result)


# --- refused -------------------------------------------------------------------------------------------------------
class Harm:
    """Leaves a file behind wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.ckpt", "a.pkl", "a.pdparams", "a.pdopt"])
def test_a_pickle_is_not_executed(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "executed"
    written = {
        "plain": lambda path: path.write_bytes(pickle.dumps({"a": Harm(mark)})),
        "torch": lambda path: torch.save({"a": torch.zeros(2), "b": Harm(mark)}, path),
        "old": lambda path: torch.save({"b": Harm(mark)}, path, _use_new_zipfile_serialization=False),
    }
    for way, write in written.items():
        path = tmp_path / way / name
        path.parent.mkdir()
        write(path)
        with pytest.raises(RunUnreadable, match=name):
            tt.open(path)
        assert not mark.exists(), way
    pickle.loads((tmp_path / "plain" / name).read_bytes())  # noqa: S301 - it does do harm where it is let
    assert mark.exists()


@pytest.mark.parametrize("name", ["model.pt", "model.pkl"])
def test_a_whole_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunUnreadable, match=r"Save model\.state_dict\(\), not the model"):
        tt.open(save_torch(tmp_path / name, nn.Linear(2, 2)))


@pytest.mark.parametrize("content", [b"", b"x", b"hello, world", bytes(100), b"PK\x03\x04" + bytes(60)])
def test_files_that_torch_did_not_write(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(RunUnreadable, match=r"a\.pt cannot be read"):
        tt.open(path)


@pytest.mark.parametrize("value", [{}, {"epoch": 3}, [1, 2], "text", {"state_dict": {}}])
def test_a_file_without_tensors(tmp_path: Path, value: Any) -> None:
    with pytest.raises(RunUnreadable, match="holds no tensors"):
        tt.open(save_torch(tmp_path / "a.pt", value))


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.zeros(2).to(torch.float8_e4m3fnuz)]
)
def test_tensors_that_cannot_be_compared(tmp_path: Path, tensor: Tensor) -> None:
    with pytest.raises(RunUnreadable, match=r"fc\.weight cannot be compared"):
        tt.open(save_torch(tmp_path / "a.pt", {"fc.weight": tensor}))


def test_a_torch_file_cut_off(tmp_path: Path) -> None:
    path = save_torch(tmp_path / "a.pt", state())
    whole = path.read_bytes()
    for size in (len(whole) // 4, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:size])
        with pytest.raises(RunUnreadable):
            tt.open(path)


def test_a_safetensors_file_cut_off_anywhere(tmp_path: Path) -> None:
    path = save(tmp_path / "a.safetensors", state())
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(RunUnreadable, match=r"a\.safetensors"):
            tt.open(path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"fc.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


def test_a_safetensors_file_by_hand(tmp_path: Path) -> None:
    """The intact counterparts of the damaged files below."""
    assert len(tt.open(raw(tmp_path / "a.safetensors", {"__metadata__": {"by": "hand"}, **entry()}))) == 1


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"{", b"\xff\xfe\x00", b"[" * 5000, [], None, 3, "text", [["fc"]]),
        *({"fc.weight": value} for value in (None, 3, [], {}, {"dtype": "F32"})),
        *(entry(dtype=value) for value in ("F4", None, [], "float32")),
        *(entry(shape=value) for value in ([5], [-4], [4.0], ["4"], "4", None, [True, 4], [1 << 62, 4], [[4]])),
        *(entry(data_offsets=value) for value in ([0], [0, 8, 16], [16, 0], [-16, 0], [0.0, 16.0], ["0", "16"], None)),
        *(entry(data_offsets=[64, 80]), entry(data_offsets=[1 << 62, (1 << 62) + 16])),
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any) -> None:
    path = raw(tmp_path / "a.safetensors", header)
    with pytest.raises(RunUnreadable, match=r"a\.safetensors"):
        tt.open(path)


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for length in (100, 1 << 40, (1 << 64) - 1):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(RunUnreadable, match="only the beginning of one"):
            tt.open(path)


# --- folders -------------------------------------------------------------------------------------------------------
def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    folder = in_two(tmp_path / "model", state())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(RunUnreadable, match=r"model-00002-of-00002\.safetensors is missing, though"):
        tt.open(folder)


def test_a_shard_that_is_cut_off(tmp_path: Path) -> None:
    folder = in_two(tmp_path / "model", state())
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(RunUnreadable, match="cut off"):
        tt.open(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "..", ".", "", "a/b.safetensors", "a\0b", 3])
def test_an_index_that_names_files_elsewhere(tmp_path: Path, name: Any) -> None:
    save(tmp_path / "x.safetensors", state())
    folder = in_two(tmp_path / "model", state(), places={"stolen": name})
    with pytest.raises(RunUnreadable, match=r"is not a file of the folder|is damaged"):
        tt.open(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"weight_map": []}', '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}']
)
def test_damaged_indexes(tmp_path: Path, text: str) -> None:
    folder = in_two(tmp_path / "model", state())
    (folder / INDEX).write_text(text)
    with pytest.raises(RunUnreadable, match=r"index\.json is damaged"):
        tt.open(folder)


def test_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    """As from a copy that mixes two saves: a notice reports it, and existing tensors can be compared."""
    folder = in_two(tmp_path / "model", state(), places={"head.weight": "model-00001-of-00002.safetensors"})
    result = tt.compare(save(tmp_path / "a.safetensors", state()), folder)
    assert result.verdict == "match"
    assert any("no file holds: head.weight" in note for note in result.notes)


# --- paths ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gone.safetensors", "gone.pt", "gone.pdparams", "gone"])
def test_a_missing_checkpoint(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunNotFound, match="does not exist"):
        tt.open(tmp_path / name)


def test_an_impossible_name(tmp_path: Path) -> None:
    with pytest.raises((RunNotFound, RunUnreadable)):
        tt.open(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_files_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (save if name.endswith("safetensors") else save_torch)(tmp_path / name, state())

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path / name))

    monkeypatch.setattr("tensortap.store.source.os.open", refused)
    monkeypatch.setattr(torch, "load", refused)
    with pytest.raises(RunUnreadable, match="Permission denied"):
        tt.open(tmp_path / name)
