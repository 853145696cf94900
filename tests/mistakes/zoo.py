"""The mistakes, each with the module that a comparison must name: the one to fix.

A fault in what a container computes between its children is the container's; a wrong parameter or buffer is its
owner's; a wrong input of the model, or a fault in the outermost forward, is the root's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from . import wrong
from .models import WIDTH, Rotary
from .patches import Apply, does, has, holds, optimizes, reads, trains
from .running import KINDS, Training, training_of

Kind = Literal["forward", "backward", "state", "update"]


@dataclass(frozen=True)
class Mistake:
    name: str
    model: str
    where: str | tuple[str, ...]
    """The module that must be named, or all that are equally wrong at once."""
    kind: Kind
    """Where it shows first: in activations, gradients, the model's state, or the state after a step."""
    apply: Apply
    note: str = ""

    @property
    def places(self) -> tuple[str, ...]:
        return (self.where,) if isinstance(self.where, str) else self.where

    @property
    def kinds(self) -> tuple[str, ...]:
        """A wrong backward shows first in the gradients that a module sends on."""
        return (*KINDS, "grad_input") if self.kind == "backward" else KINDS


def _with_parameters(model: str) -> tuple[str, ...]:
    return tuple(name for name, module in training_of(model).model.named_modules() if module._parameters)


def _base_of_rotary(base: float) -> Apply:
    def apply(training: Training) -> None:
        rotary = training.model.get_submodule("rotary")
        assert isinstance(rotary, Rotary)
        rotary.cos, rotary.sin = rotary.tables(base)

    return apply


def _untie(training: Training) -> None:
    head = training.model.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())


def _told(module: str, method: str, *arguments: Any) -> Apply:
    """Call a method of the module beforehand: train(), eval(), requires_grad_(False)."""

    def apply(training: Training) -> None:
        getattr(training.model.get_submodule(module), method)(*arguments)

    return apply


def _clear_each_micro_batch(training: Training) -> None:
    training.after_backward = wrong.ClearedBetween()


def _swap(first: str, second: str) -> Apply:
    def apply(training: Training) -> None:
        one, other = (training.model.get_submodule(name) for name in (first, second))
        values = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        one.load_state_dict(other.state_dict())
        other.load_state_dict(values)

    return apply


def _element(at: tuple[int, ...], value: float) -> Any:
    def change(tensor: Tensor) -> Tensor:
        tensor[at] = value
        return tensor

    return change


def _forget_gate_closed(bias: Tensor) -> Tensor:
    return bias.index_fill(0, torch.arange(WIDTH, 2 * WIDTH), 0.0)


def _gates_of_another_framework(weight: Tensor) -> Tensor:
    i, f, g, o = weight.chunk(4)
    return torch.cat((i, g, f, o))


DECODER = [
    Mistake("norm-epsilon", "decoder", "layers.1.norm1", "forward", has("layers.1.norm1", eps=1e-5)),
    Mistake(
        "attention-scale-missing",
        "decoder",
        "layers.1.attention.core",
        "forward",
        has("layers.1.attention.core", scale=1.0),
    ),
    Mistake(
        "attention-scale-of-whole-width",
        "decoder",
        "layers.2.attention.core",
        "forward",
        has("layers.2.attention.core", scale=WIDTH**-0.5),
    ),
    Mistake(
        "causal-mask-one-ahead",
        "decoder",
        "layers.0.attention.core",
        "forward",
        has("layers.0.attention.core", ahead=2),
    ),
    Mistake(
        "softmax-in-bf16",
        "decoder",
        "layers.1.attention.core",
        "forward",
        does("layers.1.attention.core", wrong.softmax_in_bf16, "softmax"),
    ),
    Mistake("rotary-base", "decoder", "rotary", "state", _base_of_rotary(500_000.0)),
    Mistake(
        "rotary-table-stale",
        "decoder",
        "rotary",
        "state",
        holds("rotary", "sin", _element((7,), 0.0)),
        "one row of the table was never written",
    ),
    Mistake(
        "rotary-interleaved",
        "decoder",
        "layers.1.attention",
        "forward",
        does("layers.1.attention", wrong.rotate_interleaved, "rotate"),
    ),
    Mistake(
        "heads-split-wrongly",
        "decoder",
        "layers.2.attention",
        "forward",
        does("layers.2.attention", wrong.split_without_transpose, "split"),
    ),
    Mistake("position-off-by-one", "decoder", "", "forward", does("", wrong.positions_from_one, "positions")),
    Mistake("layers-in-wrong-order", "decoder", "", "forward", does("", wrong.stack_swapped, "stack")),
    Mistake("residual-added-twice", "decoder", "layers.1", "forward", does("layers.1", wrong.residual_twice)),
    Mistake("residual-missing", "decoder", "layers.0", "forward", does("layers.0", wrong.residual_missing)),
    Mistake("residual-of-normed", "decoder", "layers.2", "forward", does("layers.2", wrong.residual_of_normed)),
    Mistake(
        "gate-and-up-swapped", "decoder", "layers.1.mlp", "forward", does("layers.1.mlp", wrong.gate_and_up_swapped)
    ),
    Mistake(
        "weight-used-transposed",
        "decoder",
        "layers.0.attention.out",
        "forward",
        does("layers.0.attention.out", wrong.linear_transposed),
    ),
    Mistake(
        "weight-loaded-transposed",
        "decoder",
        "layers.1.attention.q",
        "state",
        holds("layers.1.attention.q", "weight", lambda weight: weight.T),
    ),
    Mistake(
        "checkpoint-one-element",
        "decoder",
        "layers.1.mlp.down",
        "state",
        holds("layers.1.mlp.down", "weight", _element((5, 17), 0.5)),
    ),
    Mistake(
        "checkpoint-one-row",
        "decoder",
        "layers.0.attention.v",
        "state",
        holds("layers.0.attention.v", "weight", _element((11,), 0.0)),
    ),
    Mistake(
        "checkpoint-scaled-by-one-percent",
        "decoder",
        "layers.2.attention.out",
        "state",
        holds("layers.2.attention.out", "weight", lambda weight: weight * 1.01),
    ),
    Mistake(
        "checkpoint-rounded-to-bf16",
        "decoder",
        "layers.1.mlp.gate",
        "state",
        holds("layers.1.mlp.gate", "weight", lambda weight: weight.bfloat16().float()),
    ),
    Mistake(
        "embedding-untied",
        "decoder",
        ("embed", "head"),
        "backward",
        _untie,
        "the embedding lacks the head's share of its gradient; the head has a parameter that was not there",
    ),
    Mistake("branch-detached", "decoder", "layers.1", "backward", does("layers.1", wrong.branch_detached)),
    Mistake("gate-detached", "decoder", "layers.1.mlp", "backward", does("layers.1.mlp", wrong.gate_detached)),
    Mistake(
        "gradient-doubled", "decoder", "layers.1.mlp.act", "backward", does("layers.1.mlp.act", wrong.silu_doubled)
    ),
    Mistake(
        "norm-backward-incomplete",
        "decoder",
        "layers.2.norm2",
        "backward",
        does("layers.2.norm2", wrong.rms_norm_half_backward),
    ),
    Mistake(
        "weight-gradient-in-bf16",
        "decoder",
        "layers.0.attention.out",
        "backward",
        does("layers.0.attention.out", wrong.linear_bf16_weight_gradient),
    ),
    Mistake("micro-batches-summed", "decoder", "", "backward", trains(share=1.0), "the loss is outside the model"),
    Mistake("labels-not-shifted", "decoder", "", "backward", reads(lambda b: b._replace(target=b.inputs))),
    Mistake(
        "batch-reversed",
        "decoder",
        "",
        "forward",
        reads(lambda b: b._replace(inputs=b.inputs.flip(0), target=b.target.flip(0))),
        "what enters the model is already another thing",
    ),
    Mistake(
        "final-norm-decays",
        "decoder",
        "norm",
        "update",
        optimizes(lambda name: name == "norm.weight", {"weight_decay": 0.1}),
        "the list of undecayed names has norm1 and norm2 only",
    ),
    Mistake(
        "all-norms-decay",
        "decoder",
        ("norm", *(f"layers.{layer}.norm{half}" for layer in range(3) for half in (1, 2))),
        "update",
        optimizes(lambda name: "norm" in name, {"weight_decay": 0.1}),
    ),
    Mistake(
        "embedding-learns-slowly", "decoder", "embed", "update", optimizes(lambda name: "embed" in name, {"lr": 3e-4})
    ),
    Mistake("optimizer-epsilon", "decoder", _with_parameters("decoder"), "update", trains(adam={"eps": 1e-6})),
    Mistake(
        "optimizer-momentum", "decoder", _with_parameters("decoder"), "update", trains(adam={"betas": (0.9, 0.95)})
    ),
    Mistake(
        "gradient-cleared-each-micro-batch",
        "decoder",
        _with_parameters("decoder"),
        "update",
        _clear_each_micro_batch,
        "the gradients of each micro batch are right, their sum is not",
    ),
    Mistake(
        "parameter-frozen", "decoder", "layers.1.mlp.up", "update", _told("layers.1.mlp.up", "requires_grad_", False)
    ),
    Mistake(
        "parameter-forgotten-by-optimizer",
        "decoder",
        "layers.2.attention.k",
        "update",
        optimizes(lambda name: name == "layers.2.attention.k.weight", None),
    ),
]

ENCODER = [
    Mistake("gelu-by-tanh", "encoder", "layers.1.act", "forward", has("layers.1.act", approximate="tanh")),
    Mistake("layer-norm-epsilon", "encoder", "layers.0.norm1", "forward", has("layers.0.norm1", eps=1e-3)),
    Mistake(
        "layer-norm-epsilon-small",
        "encoder",
        "layers.2.norm2",
        "forward",
        has("layers.2.norm2", eps=1e-12),
        "two libraries' defaults: a relative difference of some 5e-6",
    ),
    Mistake(
        "layer-norm-unbiased", "encoder", "layers.1.norm1", "forward", does("layers.1.norm1", wrong.layer_norm_unbiased)
    ),
    Mistake(
        "norm-over-wrong-axis", "encoder", "layers.0.norm2", "forward", does("layers.0.norm2", wrong.norm_over_time)
    ),
    Mistake("padding-mask-inverted", "encoder", "", "forward", does("", wrong.mask_inverted, "mask")),
    Mistake(
        "padding-mask-ignored",
        "encoder",
        "layers.1.attention.core",
        "forward",
        has("layers.1.attention.core", blocked=0.0),
    ),
    Mistake(
        "empty-row-softmax-nan",
        "encoder",
        "layers.1.attention.core",
        "forward",
        has("layers.1.attention.core", blocked=float("-inf")),
    ),
    Mistake("empty-mean-nan", "encoder", "", "forward", does("", wrong.pool_without_clamp, "pool")),
    Mistake(
        "where-gradient-nan",
        "encoder",
        "",
        "backward",
        does("", wrong.pool_by_where, "pool"),
        "the forward is right, the backward multiplies zero by infinity",
    ),
    Mistake("bias-dropped", "encoder", "layers.0.fc2", "forward", does("layers.0.fc2", wrong.linear_without_bias)),
    Mistake("one-layer-in-bf16", "encoder", "layers.1.fc1", "forward", does("layers.1.fc1", wrong.linear_in_bf16)),
    Mistake("dropout-left-on", "encoder", "layers.1.dropout", "forward", has("layers.1.dropout", p=0.1)),
    Mistake("norm-before-instead-of-after", "encoder", "layers.1", "forward", does("layers.1", wrong.pre_norm)),
    Mistake(
        "input-overwritten",
        "encoder",
        ("layers.1", "layers.1.attention"),
        "forward",
        does("layers.1.attention", wrong.clear_in_place, "clear"),
        "attention's own result is right; the residual, which reads the same tensor after it, is not",
    ),
    Mistake(
        "empty-token-embedded",
        "encoder",
        "words",
        "state",
        holds("words", "weight", _element((0,), 0.3)),
        "the padding row was filled in on loading",
    ),
]

VISION = [
    Mistake("patches-in-wrong-order", "vision", "", "forward", does("", wrong.tokens_column_first, "tokens")),
    Mistake("position-before-class-token", "vision", "", "forward", does("", wrong.positions_late, "tokens")),
    Mistake("pooled-by-mean", "vision", "", "forward", does("", wrong.pool_by_mean, "pool")),
    Mistake(
        "query-and-key-biases-lost",
        "vision",
        "layers.0.attention.qkv",
        "state",
        holds("layers.0.attention.qkv", "bias", torch.zeros_like),
    ),
    Mistake(
        "attention-causal", "vision", "layers.1.attention", "forward", does("layers.1.attention", wrong.sdpa_causal)
    ),
    Mistake(
        "positions-flipped",
        "vision",
        "",
        "state",
        holds("", "places", lambda places: places.flip(1)),
        "a parameter of the root itself",
    ),
    Mistake("relu-for-gelu", "vision", "layers.0.mlp.1", "forward", does("layers.0.mlp.1", lambda self, x: x.relu())),
    Mistake("patch-bias-twice", "vision", "patches", "forward", does("patches", wrong.conv_bias_twice)),
]

RESNET = [
    Mistake("padding-mode", "resnet", "blocks.0.conv1", "forward", has("blocks.0.conv1", padding_mode="reflect")),
    Mistake("convolution-flipped", "resnet", "blocks.1.conv2", "forward", does("blocks.1.conv2", wrong.conv_flipped)),
    Mistake("batch-norm-epsilon", "resnet", "stem.1", "forward", has("stem.1", eps=1e-3)),
    Mistake(
        "batch-norm-momentum",
        "resnet",
        "blocks.1.bn1",
        "update",
        has("blocks.1.bn1", momentum=0.01),
        "shows in the running statistics only",
    ),
    Mistake("batch-norm-biased", "resnet", "blocks.0.bn2", "update", does("blocks.0.bn2", wrong.batch_norm_biased)),
    Mistake(
        "batch-norm-in-eval",
        "resnet",
        "blocks.2.bn1",
        "forward",
        _told("blocks.2.bn1", "eval"),
    ),
    Mistake("leaky-relu", "resnet", "blocks.1.relu", "forward", does("blocks.1.relu", wrong.leaky_in_place)),
    Mistake("residual-after-activation", "resnet", "blocks.2", "forward", does("blocks.2", wrong.join_late, "join")),
    Mistake(
        "running-variance-stale",
        "frozen resnet",
        "blocks.1.bn2",
        "state",
        holds("blocks.1.bn2", "running_var", torch.ones_like),
    ),
    Mistake("batch-norm-not-frozen", "frozen resnet", "blocks.0.bn1", "forward", _told("blocks.0.bn1", "train")),
]

RECURRENT = [
    Mistake("gate-order", "recurrent", "cells.1", "forward", does("cells.1", wrong.gates_swapped, "gates")),
    Mistake(
        "gate-order-in-checkpoint",
        "recurrent",
        "cells.0",
        "state",
        holds("cells.0", "weight_x", _gates_of_another_framework),
    ),
    Mistake("forget-bias-missing", "recurrent", "cells.0", "state", holds("cells.0", "bias", _forget_gate_closed)),
    Mistake(
        "state-carried-over",
        "recurrent",
        "",
        "forward",
        does("", wrong.start_from_last, "start"),
        "the second micro batch starts from where the first ended",
    ),
    Mistake("output-without-tanh", "recurrent", "cells.1", "forward", does("cells.1", wrong.cell_without_tanh)),
    Mistake("truncated-too-early", "recurrent", "cells.0", "backward", does("cells.0", wrong.cell_truncated)),
    Mistake(
        "sigmoid-saturates-early",
        "recurrent",
        "cells.0",
        "forward",
        does("cells.0", wrong.cell_hard_sigmoid),
        "hard sigmoid, as another framework's default",
    ),
]

EXPERTS = [
    Mistake(
        "one-expert-other-activation",
        "experts",
        "layers.1.moe.experts.2.act",
        "forward",
        does("layers.1.moe.experts.2.act", lambda self, x: F.silu(x)),
    ),
    Mistake("not-renormalised", "experts", "layers.0.moe", "forward", does("layers.0.moe", wrong.route_as_is, "route")),
    Mistake("one-expert-for-two", "experts", "layers.1.moe", "forward", has("layers.1.moe", top=1)),
    Mistake(
        "router-in-bf16", "experts", "layers.1.moe.router", "forward", does("layers.1.moe.router", wrong.linear_in_bf16)
    ),
    Mistake(
        "experts-swapped-in-checkpoint",
        "experts",
        tuple(f"layers.1.moe.experts.{number}.{part}" for number in (1, 3) for part in ("up", "down")),
        "state",
        _swap("layers.1.moe.experts.1", "layers.1.moe.experts.3"),
    ),
    Mistake(
        "routers-learn-too-fast",
        "experts",
        ("layers.0.moe.router", "layers.1.moe.router"),
        "update",
        optimizes(lambda name: "router" in name, {"lr": 1e-3}),
    ),
    Mistake(
        "routing-weights-detached",
        "experts",
        "layers.1.moe",
        "backward",
        does("layers.1.moe", wrong.route_detached, "route"),
    ),
    Mistake("tokens-dropped", "experts", "layers.0.moe", "forward", does("layers.0.moe", wrong.moe_with_capacity)),
]

MISTAKES = [*DECODER, *ENCODER, *VISION, *RESNET, *RECURRENT, *EXPERTS]
