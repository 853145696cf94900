"""Wrong implementations with which the zoo replaces functions and methods."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .building import WINDOW
from .running import Training


def linear_without_bias(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight)


def linear_with_two_biases(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias) + self.bias


def projection_without_bias(self: Any, x: Tensor) -> Tensor:
    """The same for the projection that GPT-2 calls Conv1D."""
    return x @ self.weight


def norm_without_bias(self: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, self.normalized_shape, self.weight, None, self.eps)


def gelu(self: Any, x: Tensor) -> Tensor:
    return F.gelu(x)


def gelu_by_tanh(self: Any, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def relu(self: Any, x: Tensor) -> Tensor:
    return x.relu()


def conv_flipped(self: Any, x: Tensor) -> Tensor:
    """True convolution instead of correlation."""
    return F.conv2d(x, self.weight.flip(2, 3), self.bias, self.stride, self.padding, self.dilation, self.groups)


def rotary_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Pairs neighbours, where the tables are for halves."""

    def turned(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def rotary_reversed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Turns in the other direction where only a part of each head is turned: the queries alone."""
    width = cos.shape[-1]
    turned, rest = q[..., :width], q[..., width:]
    half = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    keys = torch.cat((-k[..., width // 2 : width], k[..., : width // 2]), -1)
    return (
        torch.cat((turned * cos - half * sin, rest), -1),
        torch.cat((k[..., :width] * cos + keys * sin, k[..., width:]), -1),
    )


def sees_next(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A mask that lets a token see the next one."""
    return key == query + 1


def hides_itself(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A mask whose diagonal is off by one: a token sees itself only if it is the first."""
    return (key < query) | (key == 0)


def causal_mask(**options: Any) -> Any:
    """A causal mask where one in both directions is asked for."""
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(past_key_values=None, position_ids=None, **options)


def causal_window(**options: Any) -> Any:
    """A window into the past where one in both directions is asked for."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    return create_sliding_window_causal_mask(past_key_values=None, position_ids=None, **options)


def mask_that_sees_next(**options: Any) -> Any:
    """A causal mask that lets a token see the next one."""
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(or_mask_function=sees_next, **options)


def other_config(config: Any, **options: Any) -> Any:
    changed = copy.copy(config)
    for name, value in options.items():
        setattr(changed, name, value)
    return changed


def heads_tiled(call: dict[str, Any]) -> dict[str, Any]:
    """Heads of keys and values follow one another as blocks, where each must be repeated in place."""
    groups = call["query"].shape[1] // call["key"].shape[1]
    return {name: call[name].repeat(1, groups, 1, 1) for name in ("key", "value")}


def rounded(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """An argument of the attention function is rounded to bfloat16."""
    return lambda call: {name: call[name].bfloat16().to(call[name].dtype)}


def rounded_to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


class Doubled(torch.autograd.Function):
    """Returns its input, and twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def smoothed_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"], label_smoothing=0.1)


class ClearedBetween:
    """Gradients are cleared between the two micro batches of a step: only the last one counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, optimizer: Any) -> None:
        self.count += 1
        if self.count % 2:
            optimizer.zero_grad()


def cleared_between(training: Training) -> None:
    training.after_backward = ClearedBetween()


def checkpointed(module: str, **options: Any) -> Callable[[Training], None]:
    """The module's activations are computed again in backward instead of being kept."""

    def apply(training: Training) -> None:
        target = training.model.get_submodule(module)
        inner = type(target).forward.__get__(target)
        target.forward = functools.partial(checkpoint, inner, use_reentrant=False, **options)

    return apply


def element(at: tuple[int, ...], value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[at] = value
        return tensor

    return change


def transposed(tensor: Tensor) -> Tensor:
    return tensor.T


def base_of_rotary(base: float) -> Callable[[Tensor], Tensor]:
    def change(inverse: Tensor) -> Tensor:
        return base ** -(torch.arange(len(inverse)) / len(inverse))

    return change


def rotary_of_halves(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Pairs halves, where the tables are for neighbours, in GPT-J's layout."""
    sin, cos = (torch.cat((table, table), -1)[:, :, None, :] for table in (sin, cos))
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rotary_of_first_half(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Pairs halves, where the model pairs neighbours and turns a part of each head."""
    width = cos.shape[-1]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x: Tensor) -> Tensor:
        part, rest = x[..., :width], x[..., width:]
        half = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), -1)
        return torch.cat((part * cos + half * sin, rest), -1)

    return turned(q), turned(k)


def alternating(tensor: Tensor) -> Tensor:
    """1, -1, 1, ..."""
    return 1 - 2 * (torch.arange(tensor.numel()) % 2).to(tensor.dtype)


def narrower_window(bias: Tensor) -> Tensor:
    """A local mask that hides one more token of the past."""
    return bias & torch.ones_like(bias).triu(2 - WINDOW)
