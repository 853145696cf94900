"""Every kind of run passes the conformance suite of the Run contract."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import tensortap as tt
from support.run_conformance import Array, Example, RunConformance
from tensortap.core import dtypes
from tensortap.core.records import Key, Record
from tensortap.kernels import summarize
from tensortap.store import RunWriter, open_run
from tensortap.store.exports.export import export
from tensortap.store.formats.live import LiveRun
from tensortap.store.memory import MemoryWriter
from tensortap.store.run import Run

Values = dict[tuple[int, Key], Array]


def values(rank: int = 0, kinds: tuple[str, ...] = ("input", "output", "grad_output")) -> Values:
    """Tensors of several dtypes, shapes and steps; one has a NaN, one is empty, one is a scalar."""
    rng = np.random.default_rng(rank)
    found: Values = {}
    for step in range(2):
        for number, module in enumerate(("", "layers.0", "layers.1.fc")):
            for kind in kinds:
                phase = "backward" if kind.startswith("grad") else "forward"
                array: Any = rng.normal(size=(3, number + 2)).astype(np.float32)
                if kind == "output":
                    array = array.astype((np.float64, ml_dtypes.bfloat16, np.float16)[number])
                found[rank, Key(step, 0, phase, module, 0, kind, "0")] = array
    found[rank, Key(1, 0, "forward", "layers.1.fc", 1, "output", "a.b")] = np.float32([np.nan, 1, -np.inf])
    found[rank, Key(1, 0, "forward", "layers.1.fc", 2, "output", "0")] = np.empty((0, 4), np.float32)
    found[rank, Key(1, 0, "forward", "layers.1.fc", 3, "output", "0")] = np.array(7, np.int64)
    return found


LOOP = [
    (0, "world", "", {"size": 2}),
    (0, "group", "0.0", {"lr": 0.5, "betas": {"tuple": [0.9, 0.99]}}),
    (1, "group", "0.0", {"lr": {"float": "inf"}, "betas": {"tuple": [0.9, 0.99]}}),
]
"""Loop facts of every run that can have any."""


def fill(writer: Any, content: Values) -> None:
    for fact in LOOP:
        writer.loop_fact(*fact)
    for seq, ((rank, key), array) in enumerate(content.items()):
        where = writer.put(str(key), array, step=key.step)
        dtype = dtypes.name_of(array.dtype)
        writer.append(Record(key, rank, seq, "Linear", dtype, array.shape, seq, summarize(array), where))


def recorded(folder: Path, ranks: int = 2) -> tuple[Path, Values]:
    content: Values = {}
    for rank in range(ranks):
        content |= values(rank)
        with RunWriter(folder / "run", rank=rank, world=ranks, info={"framework": "torch"}, loop=True) as writer:
            fill(writer, values(rank))
    return folder / "run", content


def own_run(folder: Path) -> Example:
    path, content = recorded(folder)
    return Example(lambda: open_run(path), content, [0, 1], has_loop_facts=True)


def unfinished_run(folder: Path) -> Example:
    """A copy of a run whose writer is still open, and so its files are partial."""
    with RunWriter(folder / "open", info={"framework": "torch"}, loop=True) as writer:
        fill(writer, values())
        writer.flush()
        shutil.copytree(folder / "open", folder / "run")
    return Example(lambda: tt.open(folder / "run"), values(), has_loop_facts=True)


def memory_run(folder: Path) -> Example:
    with MemoryWriter(info={"framework": "torch"}) as writer:
        fill(writer, values())
    return Example(writer.run, values(), has_loop_facts=True)


def live_run(folder: Path) -> Example:
    def opened() -> Run:
        run = LiveRun("Net, as it runs", {"framework": "torch"}, rank=0)
        for seq, ((rank, key), array) in enumerate(values().items()):
            dtype = dtypes.name_of(array.dtype)
            run.append(Record(key, rank, seq, "Linear", dtype, array.shape, seq, summarize(array)))
        run.close_with("finished", "", [])
        return run

    return Example(opened, values(), keeps_tensors=False)


def exported(to: str, name: str) -> Callable[[Path], Example]:
    def make(folder: Path) -> Example:
        path, content = recorded(folder)
        with open_run(path) as run:
            export(run, to, folder / name)
        return Example(lambda: tt.open(folder / name), content, [0, 1])

    return make


def npy_tree(folder: Path) -> Example:
    content: Values = {}
    for rank in range(2):
        for kind, prefix in (("tensors", "tensor"), ("grads", "grad")):
            target = folder / "tree" / kind / f"rank_{rank}"
            target.mkdir(parents=True)
            for number in range(3):
                array = np.random.default_rng([rank, number]).normal(size=(number + 1, 3))
                if kind == "tensors":
                    name = f"{prefix}_idx_{number}_layer_class_Linear_layer_name_fc{number}_micro_step_0.npy"
                    key = Key(0, 0, "forward", f"fc{number}", 0, "output", "0")
                else:
                    name = f"{prefix}_idx_{number}_of_param_name_fc{number}.weight_micro_step_0.npy"
                    key = Key(0, 0, "backward", f"fc{number}", 0, "param_grad", "weight")
                np.save(target / name, array)
                content[rank, key] = array
    return Example(lambda: tt.open(folder / "tree"), content, [0, 1])


def npz_call(compressed: bool) -> Callable[[Path], Example]:
    def make(folder: Path) -> Example:
        rng = np.random.default_rng(0)
        arrays = {name: rng.normal(size=(3, 4)) for name in ("input", "output", "grad_output", "grad_input")}
        (np.savez_compressed if compressed else np.savez)(folder / "gradients_and_inputs_fc.npz", **arrays)
        phases = {name: "backward" if name.startswith("grad") else "forward" for name in arrays}
        content = {(0, Key(0, 0, phases[name], "fc", 0, name, "0")): array for name, array in arrays.items()}
        return Example(lambda: tt.open(folder / "gradients_and_inputs_fc.npz"), content)

    return make


def parameters() -> tuple[dict[str, Array], Values]:
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {f"layers.{n}.weight": rng.normal(size=(n + 1, 4)).astype(np.float32) for n in range(3)}
    arrays["bias"] = np.float64([1, 2])
    places = ((name.rpartition("."), array) for name, array in arrays.items())
    return arrays, {(0, Key(0, 0, "state", module, 0, "param", leaf)): array for (module, _, leaf), array in places}


def npz_parameters(folder: Path) -> Example:
    arrays, content = parameters()
    np.savez(folder / "weights.npz", **arrays)
    return Example(lambda: tt.open(folder / "weights.npz"), content)


def safetensors_file(folder: Path) -> Example:
    arrays, content = parameters()
    save_file(arrays, folder / "model.safetensors")
    return Example(lambda: tt.open(folder / "model.safetensors"), content)


def safetensors_folder(folder: Path) -> Example:
    safetensors_file(folder)
    return Example(lambda: tt.open(folder), parameters()[1])


def torch_file(folder: Path) -> Example:
    import torch

    arrays, content = parameters()
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / "weights.pt")
    return Example(lambda: tt.open(folder / "weights.pt"), content)


def hdf5_folder(folder: Path) -> Example:
    content: Values = {}
    for rank in range(2):
        for step in range(2):
            name = f"0-epoch_{step}-step_dump{f'.rank{rank}' if rank else ''}.hdf5"
            with h5py.File(folder / name, "w") as file:
                for kind, dataset in (("input", "feat_input0"), ("output", "feat_output")):
                    array = np.random.default_rng([rank, step]).normal(size=(2, 3)) + len(kind)
                    chunks = (1, 3) if kind == "input" else None  # one is not a plain range of the file
                    file.require_group("0000_Conv2d").create_dataset(dataset, data=array, chunks=chunks)
                    content[rank, Key(step, 0, "forward", "0000_Conv2d", 0, kind, "0")] = array
    return Example(lambda: tt.open(folder), content, [0, 1])


KINDS: dict[str, Callable[[Path], Example]] = {
    "own": own_run,
    "unfinished": unfinished_run,
    "memory": memory_run,
    "live": live_run,
    "npy export": exported("npy", "out"),
    "npz export": exported("npz", "out.npz"),
    "safetensors export": exported("safetensors", "out"),
    "hdf5 export": exported("hdf5", "out.hdf5"),
    "npy tree": npy_tree,
    "npz call": npz_call(compressed=False),
    "compressed npz": npz_call(compressed=True),
    "npz parameters": npz_parameters,
    "safetensors": safetensors_file,
    "safetensors folder": safetensors_folder,
    "torch": torch_file,
    "hdf5 folder": hdf5_folder,
}


class TestEveryRun(RunConformance):
    @pytest.fixture(params=KINDS)
    def example(self, request: pytest.FixtureRequest, tmp_path: Path) -> Example:
        return KINDS[request.param](tmp_path)
