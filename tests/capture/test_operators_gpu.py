"""Operators on a GPU: Triton kernels, gradients from the engine's threads, and training that stays as it is."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import triton.language as tl  # noqa: E402
from torch import nn  # noqa: E402

import tensortap as tt  # noqa: E402


@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(x, out, size, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + places, mask=places < size)
    tl.store(out + places, values * factor, mask=places < size)


def scaled(x: Any, factor: float) -> Any:
    x = x.contiguous()
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), factor, BLOCK=128)
    return out


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return scaled(x, 2.0)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return scaled(gradient, 2.0)


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Any) -> Any:
        x = self.norm(Scaled.apply(self.linear(x)))
        constant = scaled(x.detach(), 0.5)
        heads = x[:, None]
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        return mixed * constant + x.softmax(-1)


def train(tapped: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Kernels(), Kernels()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options: dict[str, Any] = {"operators": "*", "optimizer": optimizer, "on_error": "raise", "keep": "tensors"}
    with tt.capture(model, **options) if tapped else contextlib.nullcontext() as tap:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 32, 64, device="cuda")).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], tap


def test_training_is_the_same_bit_for_bit() -> None:
    plain, tapped = train(False)[0], train(True)[0]
    assert all(torch.equal(one, two) for one, two in zip(plain, tapped, strict=True))


def test_kernels_are_one_operator_each() -> None:
    _, tap = train(True)
    records = tap.run.records(step=0, kind="operator", module="0", phase="forward")
    names = [each.key.path.partition("@")[0] for each in records]
    assert names.count("Scaled") == 1 and names.count("scale_kernel") == 2  # its input and its output
    kernel = [tap.run.load(each) for each in records if each.key.path.startswith("scale_kernel")]
    assert (kernel[1] == kernel[0] * 0.5).all()
    backward = tap.run.records(step=0, kind="operator", module="0", phase="backward")
    assert any(each.key.path.startswith("grad Scaled@") for each in backward)
