"""One small valid sample of every file type that tensortap reads, made through public interfaces."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from torch import nn

import tensortap as tt
from tensortap.compat.dump import HookerAndDumper
from tensortap.compat.saving_hook import register_saving_hook


@dataclass(frozen=True)
class Sample:
    """A path that opens, and the files next to it or below it that are mutated."""

    name: str
    folder: str
    """Copied for each case."""
    opens: str
    """The opened path, relative to the folder."""
    mutates: str
    """Glob of the mutated files, relative to the folder."""
    reader: str = "run"


SAMPLES = (
    Sample("run.json", "runs", "run", "run/run.json"),
    Sample("rank.json", "runs", "run", "run/rank_0/rank.json"),
    Sample("coverage.json", "runs", "run", "run/rank_0/coverage.json"),
    Sample("calls.jsonl", "runs", "run", "run/rank_0/calls.jsonl"),
    Sample("loop.jsonl", "runs", "run", "run/rank_0/loop.jsonl"),
    Sample("index.arrows", "runs", "run", "run/rank_0/index.arrows"),
    Sample("shard", "runs", "run", "run/rank_0/*.safetensors"),
    Sample("noise", "noise", "noise", "noise*", "noise"),
    Sample("safetensors", "checkpoints", "model.safetensors", "model.safetensors"),
    Sample("torch zip", "checkpoints", "model.pt", "model.pt"),
    Sample("torch legacy", "checkpoints", "legacy.pt", "legacy.pt"),
    Sample("pdparams", "checkpoints", "model.pdparams", "model.pdparams"),
    Sample("pdopt", "checkpoints", "model.pdopt", "model.pdopt"),
    Sample("sharded index", "sharded", ".", "*.json"),
    Sample("sharded part", "sharded", ".", "*.safetensors"),
    Sample("npz of a call", "call", "call.npz", "call.npz"),
    Sample("npz export", "npz", "export.npz", "export.npz"),
    Sample("npz manifest", "npz", "export.npz", "*.csv"),
    Sample("npy export", "npy", "export", "export/**/*.npy"),
    Sample("npy manifest", "npy", "export", "export/manifest.csv"),
    Sample("export.json", "npy", "export", "export/export.json"),
    Sample("safetensors export", "safetensors", "export", "export/**/*.safetensors"),
    Sample("hdf5 export", "hdf5", "export.hdf5", "export.hdf5"),
    Sample("hdf5 dump", "dump", "0-epoch_0-step_dump.hdf5", "*.hdf5"),
    Sample("hdf5 folder", "dumps", ".", "*.hdf5"),
    Sample("npy tree", "tree", ".", "**/*.npy"),
    Sample("npy sidecar", "tree", ".", "tensortap/*.jsonl"),
    Sample("rules", "rules", "rules.toml", "rules.toml", "rules"),
    Sample("trace", "trace", "trace.json", "trace.json", "trace"),
)

REFERENCE = "reference"
"""A run next to the samples that is never mutated."""
_RULES = """
version = 1

[[module]]
reference = "inner.*"
candidate = "inner.*"

[[class]]
reference = ["Linear"]
candidate = ["Linear"]
tensor = [{ reference = "weight", candidate = "weight", permute = [1, 0] }]
"""


def write_corpus(root: Path) -> None:
    """Write all samples below `root`."""
    torch.manual_seed(0)
    for folder in {sample.folder for sample in SAMPLES}:
        (root / folder).mkdir()
    with redirect_stdout(StringIO()):
        for write in (_runs, _checkpoints, _exports, _scripts, _others):
            write(root)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


class _Scaled(nn.Module):
    """Passes a plain argument to a module, so that calls.jsonl has lines."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.add = _model(), _Add()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(self.inner(x), x, scale=2.0)


class _Add(nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * other[:, :2]


def _step(model: nn.Module) -> None:
    model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean().backward()


def _runs(root: Path) -> None:
    model, path = _Scaled(), root / "runs/run"
    kinds = ("input", "output", "grad_output", "param", "param_grad")
    with tt.capture(model, path, keep={"inner.0": "tensors", "*": "summary"}, kinds=kinds) as tap:
        for _ in range(2):
            _step(model)
            tap.step()
    shutil.copytree(path, root / REFERENCE)
    tt.noise(model, _step, root / "noise/noise", seeds=1)


def _checkpoints(root: Path) -> None:
    folder, state = root / "checkpoints", _model().state_dict()
    arrays = {name: value.numpy() for name, value in state.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", {"format": "np"})
    torch.save({"model": state, "epoch": 3}, folder / "model.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    with (folder / "model.pdparams").open("wb") as file:
        pickle.dump({**arrays, "StructuredToParameterName@@": {name: name for name in arrays}}, file, protocol=4)
    moments = {f"{name}_moment1_0": (name, array) for name, array in arrays.items()}
    with (folder / "model.pdopt").open("wb") as file:
        pickle.dump({**moments, "LR_Scheduler": {"last_epoch": 2, "last_lr": 0.1}}, file, protocol=4)
    parts = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(arrays)}
    for part in set(parts.values()):
        held = {name: arrays[name] for name in arrays if parts[name] == part}
        safetensors.numpy.save_file(held, root / "sharded" / part)
    index = {"metadata": {"total_size": 1}, "weight_map": parts}
    (root / "sharded/model.safetensors.index.json").write_text(json.dumps(index))


def _exports(root: Path) -> None:
    outputs = {
        "npz": "npz/export.npz",
        "npy": "npy/export",
        "safetensors": "safetensors/export",
        "hdf5": "hdf5/export.hdf5",
    }
    for to, out in outputs.items():
        command = [sys.executable, "-m", "tensortap", "export", root / "runs/run", "--to", to, "--out", root / out]
        subprocess.run(command, check=True, capture_output=True)


def _scripts(root: Path) -> None:
    model = _model()
    with tt.peek(model, "0", times=1, save=str(root / "call/call.npz")):
        _step(model)
    register_saving_hook(model := _model(), path=str(root / "tree"), target_class_names=["Linear"])
    _step(model)
    for folder, steps in ((root / "dump", (0,)), (root / "dumps", (0, 1))):
        for step in steps:
            dumper = HookerAndDumper(f"{folder}/")
            dumper.register_hooks(model := _model(), 0, step)
            _step(model)
            dumper.remove_hooks()


def _others(root: Path) -> None:
    (root / "rules/rules.toml").write_text(_RULES)
    model = _model()
    with tt.annotate(model), torch.profiler.profile() as profile:
        _step(model)
    profile.export_chrome_trace(str(root / "trace/trace.json"))


def readers() -> dict[str, Callable[[Path, Path], None]]:
    """By name: read a path as far as a user could, given the folder of the corpus."""
    return {"run": _read_run, "noise": _read_noise, "rules": _read_rules, "trace": _read_trace}


def _read_run(path: Path, root: Path) -> None:
    with tt.open(path) as run:
        str((run, run.info, run.ranks, run.notices, run.finished, run.failure, run.coverage))
        for record in _few(run):
            str(record.key), run.arguments(record)
            if record.location is not None:
                np.array(run.load(record))
        run.to_arrow()
    for other in (path, root / REFERENCE):
        str(tt.compare(path, other, workers=1))


def _few(run: object, most: int = 200) -> Iterator:  # type: ignore[type-arg]
    for at, record in enumerate(run):  # type: ignore[call-overload]
        if at == most:
            return
        yield record


def _read_noise(path: Path, root: Path) -> None:
    str(tt.compare(root / REFERENCE, root / REFERENCE, noise=path, workers=1))


def _read_rules(path: Path, root: Path) -> None:
    str(tt.compare(root / REFERENCE, root / REFERENCE, mapping=path, workers=1))


def _read_trace(path: Path, root: Path) -> None:
    str(tt.module_times(path))
