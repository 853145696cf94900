"""A small transformer that runs on many ranks, which are threads, with mistakes on demand.

Ranks share tensors through `World`: collectives meet at a barrier, in forward and in backward. Every rank records its
own tensors with the placement that a correct run has, and writes them as one rank of a run. A world of one rank is the
reference. `MISTAKES` are names like "no_reduce:layers.1.mlp.down".
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from support.slicing import meshes, write_record
from tensortap.core.placement import Mesh, Placement
from tensortap.core.records import Key, Record, Summary
from tensortap.store import RunWriter

HIDDEN, HEADS, FFN, VOCABULARY, LAYERS, SEQUENCE, BATCH = 16, 4, 32, 21, 3, 8, 4


class World:
    """The ranks of a mesh, and the collectives among those that differ along one axis only."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.meshes = meshes(sizes)
        self._barriers: dict[tuple[Any, ...], threading.Barrier] = {}
        self._slots: dict[tuple[Any, ...], torch.Tensor] = {}
        self._lock = threading.Lock()

    def gathered(self, mesh: Mesh, axis: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks along an axis, in order."""
        if mesh.size(axis) == 1:
            return [tensor]
        others = tuple(at for name, at in zip(mesh.names, mesh.coordinates, strict=True) if name != axis)
        with self._lock:
            barrier = self._barriers.setdefault((axis, others), threading.Barrier(mesh.size(axis), timeout=60))
        self._slots[axis, others, mesh.coordinate(axis)] = tensor.detach().clone()
        barrier.wait()
        found = [self._slots[axis, others, at] for at in range(mesh.size(axis))]
        barrier.wait()
        return found


@dataclass(frozen=True)
class Rank:
    """One rank: its place in the world, and the mistakes that all ranks make."""

    world: World
    mesh: Mesh
    mistakes: Collection[str] = ()
    sequence_parallel: bool = False
    zigzag: bool = False

    def size(self, axis: str) -> int:
        return self.mesh.size(axis)

    def sum(self, tensor: torch.Tensor, axis: str) -> torch.Tensor:
        return torch.stack(self.world.gathered(self.mesh, axis, tensor)).sum(0)

    def part(self, tensor: torch.Tensor, axis: str, dimension: int) -> torch.Tensor:
        return tensor.chunk(self.size(axis), dimension)[self.mesh.coordinate(axis)]

    def positions(self) -> torch.Tensor:
        """The positions of the sequence that this rank of the cp axis holds."""
        count, at = self.size("cp"), self.mesh.coordinate("cp")
        if not self.zigzag or count == 1:
            return torch.arange(SEQUENCE).chunk(count)[at]
        chunks = torch.arange(SEQUENCE).chunk(2 * count)
        return torch.cat([chunks[at], chunks[2 * count - 1 - at]])


class _Copy(torch.autograd.Function):
    """Identity in forward, a sum over tp in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: Rank, name: str) -> torch.Tensor:
        ctx.rank, ctx.name = rank, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if f"no_reduce_backward:{ctx.name}" not in ctx.rank.mistakes:
            grad = ctx.rank.sum(grad, "tp")
        if f"twice_backward:{ctx.name}" in ctx.rank.mistakes:
            grad = ctx.rank.sum(grad, "tp")
        return grad, None, None


class _Reduce(torch.autograd.Function):
    """A sum over tp in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: Rank, name: str) -> torch.Tensor:
        if f"no_reduce:{name}" in rank.mistakes:
            return x.view_as(x)
        found = rank.sum(x, "tp")
        if f"twice:{name}" in rank.mistakes:
            found = rank.sum(found, "tp")
        return found / rank.size("tp") if f"mean:{name}" in rank.mistakes else found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None, None


class _Gather(torch.autograd.Function):
    """Join parts of all ranks along a dimension; backward returns the part, summed over the ranks if they differ."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: Rank, axis: str, dimension: int, summed: bool) -> torch.Tensor:
        ctx.rank, ctx.axis, ctx.dimension, ctx.summed = rank, axis, dimension, summed
        return torch.cat(rank.world.gathered(rank.mesh, axis, x), dimension)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.summed:
            grad = ctx.rank.sum(grad, ctx.axis)
        return ctx.rank.part(grad, ctx.axis, ctx.dimension).contiguous(), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    """A sum over tp of which each rank keeps a part of the sequence; backward joins the parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: Rank) -> torch.Tensor:
        ctx.rank = rank
        return rank.part(rank.sum(x, "tp"), "tp", 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.cat(ctx.rank.world.gathered(ctx.rank.mesh, "tp", grad), 1), None


class _Scatter(torch.autograd.Function):
    """The part of the sequence that a tp rank keeps; backward joins the parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: Rank) -> torch.Tensor:
        ctx.rank = rank
        return rank.part(x, "tp", 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.cat(ctx.rank.world.gathered(ctx.rank.mesh, "tp", grad), 1), None


class Column(nn.Linear):
    """A linear layer of which each tp rank has some outputs."""

    rank: Rank
    name: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank.sequence_parallel:
            x = _Gather.apply(x, self.rank, "tp", 1, True)
        elif self.rank.size("tp") > 1:
            x = _Copy.apply(x, self.rank, self.name)
        return functional.linear(x, self.weight)


class Row(nn.Linear):
    """A linear layer of which each tp rank has some inputs; it adds up the outputs."""

    rank: Rank
    name: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(x, self.weight)
        if self.rank.sequence_parallel:
            return _ReduceScatter.apply(x, self.rank)
        return _Reduce.apply(x, self.rank, self.name) if self.rank.size("tp") > 1 else x


class Attention(nn.Module):
    def __init__(self, rank: Rank, tp: int) -> None:
        super().__init__()
        self.rank, self.heads = rank, HEADS // tp
        self.qkv, self.o = Column(HIDDEN, 3 * HIDDEN // tp, False), Row(HIDDEN // tp, HIDDEN, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        positions = self.rank.positions()
        if self.rank.size("cp") > 1:
            k, v = (_Gather.apply(each, self.rank, "cp", 1, True) for each in (k, v))
        every = torch.cat(self.rank.world.gathered(self.rank.mesh, "cp", positions))
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        seen = positions[:, None] >= every[None]
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        mixed = scores.masked_fill(~seen, -1e9).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, tp: int) -> None:
        super().__init__()
        self.gate_up, self.down = Column(HIDDEN, 2 * FFN // tp, False), Row(FFN // tp, HIDDEN, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, rank: Rank, tp: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(HIDDEN), Attention(rank, tp)
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN), Mlp(tp)
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, rank: Rank, tp: int) -> None:
        super().__init__()
        self.rank = rank
        self.embed, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.ModuleList(Layer(rank, tp) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = Column(HIDDEN, padded(tp) // tp, False)
        for name, module in self.named_modules():
            if isinstance(module, (Column, Row)):
                module.rank, module.name = rank, name

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(self.rank.positions())
        if self.rank.sequence_parallel:
            x = _Scatter.apply(x, self.rank)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if self.rank.size("tp") > 1:
            logits = _Gather.apply(logits, self.rank, "tp", 2, False)
        return logits if "padding" in self.rank.mistakes else logits[..., :VOCABULARY]


def padded(tp: int) -> int:
    return -(-VOCABULARY // tp) * tp if tp > 1 else VOCABULARY


# --- layouts ----------------------------------------------------------------------------------------------------------
class Placer:
    """The placement of one tensor: for each dimension of the whole its size, and the spans that a rank holds."""

    def __init__(self, rank: Rank, shape: Sequence[int]) -> None:
        self.rank = rank
        self.whole = list(shape)
        self.spans = [[(0, 0, size)] for size in shape]
        self.roles = {axis: "replica" for axis in rank.mesh.names if rank.size(axis) > 1}

    def cut(self, dimension: int, axis: str, whole: int | None = None, parts: int = 1) -> None:
        """Cut a dimension that consists of several parts, each of which is cut over the ranks."""
        at, size = self.rank.mesh.coordinate(axis), self.rank.size(axis)
        if size == 1:
            return
        own = self.whole[dimension] // parts
        part = own * size if whole is None else whole // parts
        pieces = [(own * n, part * n + own * at, max(0, min(own, part - own * at))) for n in range(parts)]
        self.spans[dimension], self.whole[dimension] = [each for each in pieces if each[2]], part * parts
        self.roles[axis] = "shard"

    def cut_sequence(self, dimension: int) -> None:
        """Cut a dimension as the cp axis cuts the sequence, in order or in zigzag."""
        if self.rank.size("cp") == 1:
            return
        order = self.rank.positions().tolist()
        cuts = [0, *(n for n in range(1, len(order)) if order[n] != order[n - 1] + 1), len(order)]
        self.spans[dimension] = [(a, order[a], b - a) for a, b in pairwise(cuts)]
        self.whole[dimension] = SEQUENCE
        self.roles["cp"] = "shard"

    def placement(self) -> Placement:
        boxes: list[tuple[tuple[int, int, int], ...]] = [()]
        for each in self.spans:
            boxes = [(*box, span) for box in boxes for span in each]
        return Placement(tuple(self.whole), tuple(boxes), self.roles, "layout")


_COLUMN = {"qkv": (3 * HIDDEN, 3), "gate_up": (2 * FFN, 2), "head": (VOCABULARY, 1)}
_ROW = ("o", "down")


def placement_of(rank: Rank, key: Key, shape: Sequence[int]) -> Placement | None:
    """The placement that a correct run has."""
    if prod(rank.mesh.sizes) == 1:
        return None
    placer, leaf = Placer(rank, shape), key.module.rpartition(".")[2]
    if key.kind in ("param", "param_grad", "step_grad", "buffer"):
        if key.path == "weight" and leaf in _COLUMN:
            placer.cut(0, "tp", *_COLUMN[leaf])
        elif key.path == "weight" and leaf in _ROW:
            placer.cut(1, "tp")
        elif key.kind == "param_grad" and rank.sequence_parallel and "norm" in leaf:
            placer.roles["tp"] = "partial:sum"
        if key.kind == "param_grad":
            placer.roles |= {axis: "partial:mean" for axis in ("dp", "cp") if rank.size(axis) > 1}
        return placer.placement()
    made, last = key.kind in ("output", "grad_output"), len(shape) - 1
    if leaf in _COLUMN and made:
        placer.cut(last, "tp", *_COLUMN[leaf])
    elif leaf in _ROW and not made:
        placer.cut(last, "tp")
    elif rank.sequence_parallel and leaf not in ("", "embed", "position"):
        placer.cut(1, "tp")
    if leaf == "position":
        placer.cut_sequence(0)
        if key.kind == "grad_output" and rank.size("dp") > 1:
            placer.roles["dp"] = "partial:mean"
    else:
        placer.cut(0, "dp")
        placer.cut_sequence(1)
    return placer.placement()


# --- recording --------------------------------------------------------------------------------------------------------
class Recorder:
    """Records the tensors of one rank's model, as a tap does."""

    def __init__(self, model: nn.Module, rank: Rank, step: int, records: list[tuple[Key, str, torch.Tensor, int]]):
        self.records, self.step, self.micro = records, step, 0
        self._known: dict[tuple[int, int], int] = {}
        self._alive: list[torch.Tensor] = []
        self._hooks = [
            hook
            for name, module in model.named_modules()
            if not isinstance(module, nn.ModuleList)
            for hook in (
                module.register_forward_pre_hook(lambda m, args, name=name: self._add(name, m, "input", args[0])),
                module.register_forward_hook(lambda m, args, out, name=name: self._made(name, m, out)),
            )
        ]

    def _add(self, name: str, module: nn.Module, kind: str, x: torch.Tensor, path: str = "0", call: int = 0) -> None:
        phases = {"input": "forward", "output": "forward", "grad_output": "backward", "param_grad": "backward"}
        key = Key(self.step, self.micro, phases.get(kind, "state"), name, call, kind, path)
        self._alive.append(x)
        number = self._known.setdefault((id(x), x._version), len(self.records)) if phases.get(kind) == "forward" else -1
        number = len(self.records) if number < 0 else number
        self.records.append((key, type(module).__name__, x.detach().clone(), number))

    def _made(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        self._add(name, module, "output", x)
        if x.requires_grad:
            x.register_hook(lambda grad: self._add(name, module, "grad_output", grad))

    def state(self, model: nn.Module, call: int) -> None:
        for name, module in model.named_modules():
            for path, parameter in module.named_parameters(recurse=False):
                self._add(name, module, "param", parameter, path, call)
            for path, buffer in module.named_buffers(recurse=False):
                self._add(name, module, "buffer", buffer, path, call)

    def gradients(self, model: nn.Module, kind: str) -> None:
        for name, module in model.named_modules():
            for path, parameter in module.named_parameters(recurse=False):
                if parameter.grad is not None:
                    self._add(name, module, kind, parameter.grad, path)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


# --- training ---------------------------------------------------------------------------------------------------------
@cache
def whole_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Transformer(Rank(World({}), Mesh((), (), ())), 1).state_dict()


def local_state(rank: Rank) -> dict[str, torch.Tensor]:
    """What a rank loads of the checkpoint of the whole model; mistakes of loading are made here."""
    tp, at = rank.size("tp"), rank.mesh.coordinate("tp")
    found = {}
    for name, tensor in whole_state().items():
        leaf, source = name.split(".")[-2], at
        if f"rotate:{name}" in rank.mistakes:
            source = (at + 1) % tp
        parts = {"qkv": 3, "gate_up": 2}.get(leaf, 1)
        if f"interleave:{name}" in rank.mistakes:
            parts = 1
        if leaf in ("qkv", "gate_up") and tp > 1:
            tensor = torch.cat([each.chunk(tp)[source] for each in tensor.chunk(parts)])
        elif leaf == "head" and tp > 1:
            tensor = functional.pad(tensor, (0, 0, 0, padded(tp) - VOCABULARY)).chunk(tp)[source]
        elif leaf in ("o", "down") and tp > 1:
            tensor = tensor.chunk(tp, 1)[source]
        for mistake in rank.mistakes:
            kind, _, rest = mistake.partition(":")
            other, _, mine = rest.partition("=")
            if kind == "load" and name == mine:  # "load:other=mine"
                tensor = whole_state()[other].clone()
        found[name] = tensor.clone()
    if "flip" in {each.partition(":")[0] for each in rank.mistakes}:
        target = next(each.partition(":")[2] for each in rank.mistakes if each.startswith("flip:"))
        name, _, which = target.partition("@")
        if list(rank.mesh.coordinates) == [int(each) for each in which.split(",")]:
            found[name].view(torch.int32).view(-1)[3] ^= 1
    return found


def train(rank: Rank, steps: int, records: list[tuple[Key, str, torch.Tensor, int]], micros: int = 1) -> None:
    model = Transformer(rank, rank.size("tp"))
    model.load_state_dict(local_state(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        ids, targets = torch.randint(0, VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
        ids, targets = (rank.part(each, "dp", 0) for each in (ids, targets))
        where = rank.positions()
        if "cp_order" in rank.mistakes:
            where = torch.arange(SEQUENCE).chunk(rank.size("cp"))[rank.mesh.coordinate("cp")]
        ids, targets = (each[:, where].contiguous() for each in (ids, targets))
        recorder = Recorder(model, rank, step, records)
        recorder.state(model, 0)
        summed: dict[str, torch.Tensor] = {}
        for micro, (rows, wanted) in enumerate(zip(ids.chunk(micros), targets.chunk(micros), strict=True)):
            recorder.micro = micro
            optimizer.zero_grad()
            (functional.cross_entropy(model(rows).flatten(0, 1), wanted.flatten()) / micros).backward()
            recorder.gradients(model, "param_grad")
            for name, parameter in model.named_parameters():
                summed[name] = summed.get(name, torch.zeros(())) + parameter.grad
        recorder.micro = 0
        for name, parameter in model.named_parameters():
            parameter.grad = summed[name]
        reduce_gradients(model, rank)
        recorder.gradients(model, "step_grad")
        optimizer.step()
        update_buffers(model, rank, step)
        recorder.state(model, 1)
        recorder.remove()


def reduce_gradients(model: nn.Module, rank: Rank) -> None:
    for name, parameter in model.named_parameters():
        if f"no_gradient_reduce:{name}" in rank.mistakes:
            continue
        if rank.sequence_parallel and "norm" in name and f"no_sequence_reduce:{name}" not in rank.mistakes:
            parameter.grad = rank.sum(parameter.grad, "tp")
        for axis in ("dp", "cp"):
            if rank.size(axis) > 1:
                summed = rank.sum(parameter.grad, axis)
                parameter.grad = summed if f"{axis}_sum" in rank.mistakes else summed / rank.size(axis)


def update_buffers(model: Transformer, rank: Rank, step: int) -> None:
    """Buffers follow a parameter, as an average of weights does."""
    for number, layer in enumerate(model.layers):
        stale = any(each.startswith(f"stale:layers.{number}@") for each in rank.mistakes)
        which = next((each.partition("@")[2] for each in rank.mistakes if each.startswith("stale:")), "")
        if stale and step >= 1 and list(rank.mesh.coordinates) == [int(each) for each in which.split(",")]:
            continue
        layer.mean.mul_(0.5).add_(layer.norm1.weight.detach(), alpha=0.5)


def run_world(
    path: Path,
    sizes: Mapping[str, int] | None = None,
    mistakes: Collection[str] = (),
    *,
    steps: int = 2,
    keep: bool = True,
    kinds: Collection[str] | None = None,
    placed: bool = True,
    micros: int = 1,
    sequence_parallel: bool = False,
    zigzag: bool = False,
) -> Path:
    """Train on the ranks of a mesh, and write what each of them recorded."""
    whole_state()  # before there are threads, which share the random state
    world = World(sizes or {})
    ranks = [Rank(world, mesh, tuple(mistakes), sequence_parallel, zigzag) for mesh in world.meshes]
    records: list[list[tuple[Key, str, torch.Tensor, int]]] = [[] for _ in ranks]
    failures: list[BaseException] = []

    def run(rank: Rank, into: list[tuple[Key, str, torch.Tensor, int]]) -> None:
        try:
            train(rank, steps, into, micros)
        except BaseException as error:  # shown by the test, which waits for all threads
            failures.append(error)

    threads = [threading.Thread(target=run, args=each) for each in zip(ranks, records, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    for number, (rank, own) in enumerate(zip(ranks, records, strict=True)):
        with RunWriter(path, rank=number, world=len(ranks), info={"framework": "torch"}) as writer:
            if placed and len(ranks) > 1:
                writer.arrange(rank.mesh, {})
            for seq, (key, cls, tensor, same) in enumerate(own):
                if kinds is not None and key.kind not in kinds:
                    continue
                array = tensor.numpy()
                placement = placement_of(rank, key, array.shape) if placed else None
                record = Record(key, number, seq, cls, "", (), same, _NOTHING)
                write_record(writer, record, number, array, placement, keep)
    return path


_NOTHING = Summary(0, 0, 0, 0, 0, 0, *(float("nan"),) * 6, 0, sketch=np.empty(0, np.float32))
