"""Backward passes written by hand: in bfloat16, which a truth must name, and in float32, which is right.

Each changes how one module computes gradients, and nothing of its forward. Both sides are in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit.patches import Apply
from field.kit.running import Training, training_of

PARTS = 8


class _Linear(torch.autograd.Function):
    """A matrix product whose gradients are sums of parts, which are kept in `dtypes` of input, weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtypes, ctx.has_bias = dtypes, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, given = gradient.flatten(0, -2), x.flatten(0, -2)
        of_input = _summed(ctx.dtypes[0], zip(rows.chunk(PARTS, 1), weight.chunk(PARTS, 0), strict=True), torch.mm)
        tokens = zip(rows.chunk(PARTS), given.chunk(PARTS), strict=True)
        of_weight = _summed(ctx.dtypes[1], tokens, lambda part, inputs: part.T @ inputs)
        of_bias = _rows_summed(ctx.dtypes[2], rows).to(x.dtype) if ctx.has_bias else None
        return of_input.view_as(x).to(x.dtype), of_weight.to(x.dtype), of_bias, None


def _summed(dtype: torch.dtype, parts: Any, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total: Any = 0
    for one, other in parts:
        total = total + product(one.to(dtype), other.to(dtype))
    return total


def _rows_summed(dtype: torch.dtype, rows: Tensor) -> Tensor:
    total = torch.zeros_like(rows[0], dtype=dtype)
    for row in rows:
        total = total + row.to(dtype)
    return total


class _ByFormula(torch.autograd.Function):
    """The forward of a module, and the backward of a formula in some dtype."""

    @staticmethod
    def forward(ctx: Any, inner: Any, formula: Any, dtype: torch.dtype, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.formula, ctx.dtype = formula, dtype
        result: Tensor = inner(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = [each.detach().to(ctx.dtype).requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            made = ctx.formula(*given)
        found = torch.autograd.grad(made, given, gradient.to(ctx.dtype))
        return None, None, None, *(each.to(own.dtype) for each, own in zip(found, ctx.saved_tensors, strict=True))


class _NormWeight(torch.autograd.Function):
    """The product with a norm's weight, whose gradient is summed row by row in some dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_weight = _rows_summed(ctx.dtype, (gradient * x).flatten(0, -2))
        return gradient * weight, of_weight.to(weight.dtype), None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
        shares = torch.softmax(scores, dim, dtype=wide)
        ctx.save_for_backward(shares)
        ctx.dim, ctx.dtype, ctx.given = dim, dtype, scores.dtype
        return shares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shares, gradient = ctx.saved_tensors[0].to(ctx.dtype), gradient.to(ctx.dtype)
        mean = (gradient * shares).sum(ctx.dim, keepdim=True)
        return ((gradient - mean) * shares).to(ctx.given), None, None, None


class _MatMul(torch.autograd.Function):
    """A batched product whose gradients are sums of parts in some dtype."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.dtype = dtype
        return left @ right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        columns = zip(gradient.chunk(4, -1), right.chunk(4, -1), strict=True)
        rows = zip(left.chunk(4, -2), gradient.chunk(4, -2), strict=True)
        of_left = _summed(ctx.dtype, columns, lambda part, other: part @ other.mT)
        of_right = _summed(ctx.dtype, rows, lambda other, part: other.mT @ part)
        return of_left.to(left.dtype), of_right.to(right.dtype), None


class _Loss(torch.autograd.Function):
    """Cross entropy whose gradient is computed in some dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.ignored, ctx.dtype = ignored, dtype
        return torch._C._nn.cross_entropy_loss(logits, labels, None, 1, ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        kept = labels != ctx.ignored
        found = logits.to(ctx.dtype).softmax(-1)
        found = found - F.one_hot(labels.clamp(min=0), logits.shape[-1]).to(ctx.dtype)
        found = found * (gradient.to(ctx.dtype) / kept.sum().to(ctx.dtype)) * kept.unsqueeze(-1)
        return found.to(logits.dtype), None, None, None


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * weight + bias


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))


# --- kinds of modules, and what is changed in them -----------------------------------------------------------------
Change = Callable[[nn.Module, torch.dtype], Any]
"""Changes a module's backward, which then computes in the given dtype."""

ACTIVATIONS = {"SiLUActivation": _silu, "SiLU": _silu, "GELUActivation": _gelu}


def _linear(input: bool = False, weight: bool = False, bias: bool = False) -> Change:
    def change(module: nn.Module, dtype: torch.dtype) -> None:
        dtypes = tuple(dtype if each else torch.float32 for each in (input, weight, bias))
        transposed = type(module).__name__ == "Conv1D"

        def forward(self: Any, x: Tensor) -> Tensor:
            matrix = self.weight.T if transposed else self.weight
            return _Linear.apply(x, matrix, self.bias, dtypes)

        module.forward = MethodType(forward, module)

    return change


def _by_formula(module: nn.Module, dtype: torch.dtype) -> None:
    parameters = [module.weight] if getattr(module, "weight", None) is not None else []
    if getattr(module, "bias", None) is not None:
        parameters.append(module.bias)
    formula = ACTIVATIONS.get(type(module).__name__) or (_layer_norm if len(parameters) > 1 else _rms)
    inner = module.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return _ByFormula.apply(inner, formula, dtype, x, *parameters)

    module.forward = MethodType(forward, module)


def _norm_weight(module: nn.Module, dtype: torch.dtype) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", None) or self.eps
        wide = x.float()
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return _NormWeight.apply(scaled, self.weight, dtype)

    module.forward = MethodType(forward, module)


def _during(target: Any, name: str, replacement: Callable[[torch.dtype], Any]) -> Change:
    """While the module's forward runs, it finds another function under a name."""

    def change(module: nn.Module, dtype: torch.dtype) -> None:
        inner = module.forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(target, name, replacement(dtype)):
                return inner(*args, **kwargs)

        module.forward = MethodType(forward, module)

    return change


def _softmax(dtype: torch.dtype) -> Callable[..., Tensor]:
    def softmax(scores: Tensor, dim: int = -1, dtype_: Any = None, **options: Any) -> Tensor:
        return _Softmax.apply(scores, dim, dtype, options.get("dtype") or dtype_ or scores.dtype)

    return softmax


def _matmul(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda left, right: _MatMul.apply(left, right, dtype)


def _cross_entropy(dtype: torch.dtype) -> Callable[..., Tensor]:
    def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100, **_: Any) -> Tensor:
        return _Loss.apply(logits, labels, ignore_index, dtype)

    return cross_entropy


def is_rms_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    return name.endswith("RMSNorm") and "Gemma" not in name and hasattr(module, "weight") and module.weight.ndim == 1


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    return name.endswith(("Attention", "SelfAttention")) and any(
        isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D" for each in module.children()
    )


def _is_product(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def short_floats(training: Training) -> None:
    """Convert the model to bfloat16."""
    training.model.to(torch.bfloat16)


def use_attention(implementation: str) -> Apply:
    """Let a model of transformers use another implementation of attention."""
    return lambda training: training.model.set_attn_implementation(implementation)


def fused_attention_in_short(training: Training) -> None:
    """Convert the model to bfloat16, and fuse its attention."""
    short_floats(training)
    use_attention("sdpa")(training)


def fused_rms_norm(self: Any, x: Tensor) -> Tensor:
    """The norm by torch's own function."""
    return F.rms_norm(x, self.weight.shape, self.weight, getattr(self, "variance_epsilon", None) or self.eps)


def _rounds_before_weight(module: nn.Module) -> bool:
    return is_rms_norm(module) and "Olmo" not in type(module).__name__


@dataclass(frozen=True)
class BackwardChange:
    """A way to compute gradients, in a dtype."""

    name: str
    suits: Callable[[nn.Module], bool]
    change: Change
    at_root: bool = False

    def place(self, family: str) -> str | None:
        """Return the module that is changed: the last that is suited, but for the outermost."""
        if self.at_root:
            return "" if self.suits(training_of(family).model) else None
        found = [name for name, each in training_of(family).model.named_modules() if name and self.suits(each)]
        return found[len(found) * 2 // 3] if found else None

    def apply(self, place: str, dtype: torch.dtype) -> Apply:
        def apply(training: Training) -> None:
            self.change(training.model.get_submodule(place), dtype)

        return apply


def _has_bias(module: nn.Module) -> bool:
    return _is_product(module) and module.bias is not None


def _is_layer_norm(module: nn.Module) -> bool:
    return type(module) is nn.LayerNorm


def _is_language_model(module: nn.Module) -> bool:
    return "ForCausalLM" in type(module).__name__ or "LMHead" in type(module).__name__


CHANGES = (
    BackwardChange("weight gradient summed over parts", _is_product, _linear(weight=True)),
    BackwardChange("bias gradient summed over rows", _has_bias, _linear(bias=True)),
    BackwardChange("input gradient summed over parts", _is_product, _linear(input=True)),
    BackwardChange("backward of RMSNorm by hand", is_rms_norm, _by_formula),
    BackwardChange("backward of LayerNorm by hand", _is_layer_norm, _by_formula),
    BackwardChange("weight gradient of RMSNorm summed over rows", _rounds_before_weight, _norm_weight),
    BackwardChange("backward of the activation by hand", lambda m: type(m).__name__ in ACTIVATIONS, _by_formula),
    BackwardChange("backward of softmax", _is_attention, _during(F, "softmax", _softmax)),
    BackwardChange("products of attention in parts", _is_attention, _during(torch, "matmul", _matmul)),
    BackwardChange("gradient of the loss", _is_language_model, _during(F, "cross_entropy", _cross_entropy), True),
)


def changes_of(family: str) -> Iterator[tuple[BackwardChange, str]]:
    """Yield the changes that suit a family, each with the module that it changes."""
    for change in CHANGES:
        if (place := change.place(family)) is not None:
            yield change, place
