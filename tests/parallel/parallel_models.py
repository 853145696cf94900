"""A small language model, and the layouts in which several processes train it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import tensortap as tt

KINDS = ("input", "output", "grad_output", "param", "param_grad", "step_grad")
OPTIONS: dict[str, Any] = {"kinds": KINDS, "keep": "tensors", "on_error": "raise"}
ROWS, TOKENS, HIDDEN, WORDS = 4, 8, 16, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.w1 = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.w2 = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w2(functional.gelu(self.w1(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """Half of the model, with layers that are numbered from 0."""

    def __init__(self, whole: Model, index: int) -> None:
        super().__init__()
        self.embed = whole.embed if index == 0 else None
        self.layers = nn.ModuleList([whole.layers[index]])
        self.norm, self.head = (whole.norm, whole.head) if index == 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.head is not None else x


class ColumnParallelLinear(nn.Module):
    """A hand-written layer with Megatron's attributes. `mistake`: its backward lacks a reduction."""

    def __init__(self, whole: nn.Linear, rank: int, size: int, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        self.tp_rank, self.tp_size, self.gather_output = rank, size, False
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 0)[rank].clone())
        self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = True, 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x if self.mistake else _Copied.apply(x), self.weight)


class RowParallelLinear(nn.Module):
    """`mistake` is made in the reduction of its output, or in the part that a rank takes."""

    def __init__(self, whole: nn.Linear, rank: int, size: int, mistake: str = "") -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.input_is_parallel = rank, size, True
        taken = size - 1 - rank if mistake == "swapped" else rank
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 1)[taken].clone())
        self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = True, 1, 1
        self.mistake = mistake

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(x, self.weight)
        if self.mistake == "missing":
            return x
        x = _Reduced.apply(x)
        if self.mistake == "doubled":
            x = _Reduced.apply(x)
        return x / self.tp_size if self.mistake == "averaged" else x


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
    return words, words.roll(-1, 1)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    output = output.full_tensor() if hasattr(output, "full_tensor") else output
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train(
    net: nn.Module, path: Path | None, steps: int = 2, part: Any = (), average: bool = False, **options: Any
) -> list[float]:
    """Train, with a tap if there is a path, and return losses and a sum of all parameters.

    `average`: gradients are averaged by hand.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tap = nullcontext() if path is None else tt.capture(net, path, optimizer=optimizer, **{**OPTIONS, **options})
    found = []
    with tap:
        for step in range(steps):
            words, target = batch(step)
            loss = loss_of(net(words[part]), target[part])
            loss.backward()
            for parameter in net.parameters() if average else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found + [float(_local(each.detach()).double().sum()) for each in net.parameters()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --- layouts -----------------------------------------------------------------------------------------------------
Trained = Callable[[Path | None], list[float]]


def ddp(rank: int) -> Trained:
    half = slice(2 * rank, 2 * rank + 2)
    return lambda path: train(nn.parallel.DistributedDataParallel(model()), path, part=half)


def fsdp1(rank: int, hybrid: bool = False) -> Trained:
    """hybrid: two groups of two processes; each group has all parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def run(path: Path | None) -> list[float]:
        options: dict[str, Any] = {}
        if hybrid:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
            options = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        wrapped = FullyShardedDataParallel(
            model(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            **options,
        )
        rows = ROWS // dist.get_world_size()
        return train(wrapped, path, part=slice(rows * rank, rows * (rank + 1)))

    return run


def fsdp2(rank: int) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def run(path: Path | None) -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        net = model()
        for part in (*net.layers, net):
            fully_shard(part, mesh=mesh)
        return train(net, path, part=slice(2 * rank, 2 * rank + 2))

    return run


def tp(rank: int, sequence: bool = False, sharded: bool = False, **options: Any) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def run(path: Path | None) -> list[float]:
        sizes, names = ((2, 2), ("dp", "tp")) if sharded else ((2,), ("tp",))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        net = model()
        plan: dict[str, Any] = {"w1": ColwiseParallel(), "w2": RowwiseParallel()}
        if sequence:
            plan["norm"] = SequenceParallel()
            plan["w1"] = ColwiseParallel(input_layouts=Shard(1))
            plan["w2"] = RowwiseParallel(output_layouts=Shard(1))
            plan[""] = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
            )
        for layer in net.layers:
            parallelize_module(layer, mesh["tp"], {key: each for key, each in plan.items() if key})
        if sequence:
            parallelize_module(
                net,
                mesh["tp"],
                {
                    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                    "norm": SequenceParallel(),
                    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
                },
            )
        part: Any = ()
        if sharded:
            for each in (*net.layers, net):
                fully_shard(each, mesh=mesh["dp"])
            part = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        return train(net, path, part=part, **options)

    return run


def megatron(rank: int, mistake: str = "") -> Trained:
    """`mistake` is made in the second layer."""

    def run(path: Path | None) -> list[float]:
        net = model()
        for number, layer in enumerate(net.layers):
            layer.w1 = ColumnParallelLinear(layer.w1, rank, 2, "unreduced" if mistake == "backward" and number else "")
            layer.w2 = RowParallelLinear(layer.w2, rank, 2, mistake if number else "")
        return train(net, path)

    return run


class Experts(nn.Module):
    """Four experts, of which a process has some. Each token goes to the expert of its first word's number."""

    def __init__(self, first: int = 0, count: int = 4) -> None:
        super().__init__()
        self.ep_size, self.first = 4 // count, first
        self.local_expert_indices = list(range(first, first + count))  # as Megatron's layers have it
        experts = [nn.Linear(HIDDEN, HIDDEN) for _ in range(4)]
        self.experts = nn.ModuleList(experts[first : first + count])

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        x = _Copied.apply(x) if self.ep_size > 1 else x
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == self.first + number).unsqueeze(-1)
            out = out + expert(x) * mine
        return _Reduced.apply(out) if self.ep_size > 1 else out


class MixtureModel(nn.Module):
    def __init__(self, first: int = 0, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.moe = Experts(first, count)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        return self.head(hidden + self.moe(hidden, x % 4))


def mixture(first: int = 0, count: int = 4) -> MixtureModel:
    torch.manual_seed(0)
    return MixtureModel(first, count)


def ep(rank: int, swapped: bool = False, named: bool = False) -> Trained:
    """Two experts on each process, under local names.

    swapped: each has the parameters of the other's experts. named: the layout gives their global names.
    """
    names = {
        "mesh": {"ep": 2},
        **({"names": {"moe.experts.{i}": "moe.experts.{i+ep*2}"}} if named else {}),
        "layout": {"*": ["a", "a b"], "*:output": "b s h", "*:input": ["b s", "b s h"]},
    }

    def run(path: Path | None) -> list[float]:
        net = mixture(2 * rank, 2)
        if swapped:
            other = mixture(2 - 2 * rank, 2)
            net.moe.experts.load_state_dict(other.moe.experts.state_dict())
        return train(net, path, **({"layout": names} if path else {}))

    return run


def cp(rank: int, average: bool = True) -> Trained:
    """Each process has half of the tokens; this model mixes none of them."""
    layout = {
        "mesh": {"cp": 2},
        "layout": {"*:input": ["b s[cp]", "b s[cp] h"], "*:output": "b s[cp] h", "*": ["a", "a b"]},
    }
    part = (slice(None), slice(4 * rank, 4 * rank + 4))
    return lambda path: train(model(), path, part=part, average=average, **({"layout": layout} if path else {}))


def pp(rank: int) -> Trained:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def run(path: Path | None) -> list[float]:
        part = Stage(model(), rank)
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        names = {"names": {"layers.{i}": "layers.{i+stage}"}}
        tap = nullcontext() if path is None else tt.capture(part, path, optimizer=optimizer, layout=names, **OPTIONS)
        losses: list[torch.Tensor] = []
        with tap:
            for step in range(2):
                words, target = batch(step)
                _ = schedule.step(words) if rank == 0 else schedule.step(target=target, losses=losses)
                optimizer.step()
                optimizer.zero_grad()
        return [float(each) for each in losses] + [float(each.detach().double().sum()) for each in part.parameters()]

    return run


def llama() -> nn.Module:
    """A model of the transformers library, with logits as its only output."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    return Logits(LlamaForCausalLM(config))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(words).logits
        return found


def hf_tp(rank: int, scaled: bool = False) -> Trained:
    """Tensor parallelism by the plan that a model of transformers brings along.

    scaled: the second process scales the scores of attention in the second layer differently.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    def run(path: Path | None) -> list[float]:
        net = llama()
        apply_tensor_parallelism(net.model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        if scaled and rank == 1:
            net.model.model.layers[1].self_attn.scaling *= 1.5
        return train(net, path)

    return run


MISTAKES = ("missing", "averaged", "doubled", "swapped", "backward")
"""Planted mistakes of tensor parallelism."""
LAYOUTS: dict[int, dict[str, Callable[[int], Trained]]] = {
    2: {
        "ddp": ddp,
        "fsdp1": fsdp1,
        "fsdp2": fsdp2,
        "tp": tp,
        "tp_sp": partial(tp, sequence=True),
        "tp_sp_summaries": partial(tp, sequence=True, keep="summary"),
        "megatron": megatron,
        "cp": cp,
        "cp_unreduced": partial(cp, average=False),
        "pp": pp,
        "hf_tp": hf_tp,
        "hf_tp_scaled": partial(hf_tp, scaled=True),
        "ep": ep,
        "ep_named": partial(ep, named=True),
        "ep_swapped": partial(ep, swapped=True),
        **{f"megatron_{mistake}": partial(megatron, mistake=mistake) for mistake in MISTAKES},
    },
    4: {"fsdp2_tp": partial(tp, sharded=True), "fsdp1_hybrid": partial(fsdp1, hybrid=True)},
}


WRONG = ("cp_unreduced", "ep_swapped", "hf_tp_scaled", *(f"megatron_{mistake}" for mistake in MISTAKES))


def reference(name: str, summaries: bool = False) -> str:
    """Return the run of one process that a layout is compared with."""
    whole = "mixture" if name.startswith("ep") else "llama" if name.startswith("hf") else "one"
    return f"{whole}_summaries" if summaries else whole


def work(rank: int, world: int, folder: str, port: int) -> None:
    """Train in each layout without a tap and with one, and write whether both are the same."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for name, layout in LAYOUTS[world].items():
        if (Path(folder) / f"{name}.{rank}").exists():
            continue
        run = layout(rank)
        same = run(None) == run(Path(folder) / name)
        dist.barrier()
        (Path(folder) / f"{name}.{rank}").write_text("same" if same else "different")
    dist.barrier()
    dist.destroy_process_group()
