"""Padding after an optimizer's step: its embedding is noise, which a norm enlarges, and no code is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt

_WORDS, _WIDTH, _LENGTH = 40, 16, 8


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(_WORDS, _WIDTH, padding_idx=0), nn.LayerNorm(_WIDTH)
        self.up, self.down, self.head = nn.Linear(_WIDTH, 32), nn.Linear(32, _WIDTH), nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def record(path: Path, noise: float = 1e-7, scale: float = 1.0) -> Path:
    """Train over padded batches. `noise`: what rounding leaves of gradients that are zero; `scale`: of the norm."""
    torch.manual_seed(0)
    model = _Model()
    mask = (torch.arange(_LENGTH) < torch.tensor([8, 5, 3, 6])[:, None]).long()
    first = torch.randint(1, _WORDS // 2, (4, _LENGTH)) * mask
    batches = [first, torch.where(first > 0, first + _WORDS // 2, 0)]  # other words, which had no gradient before
    rounded = torch.zeros(_WORDS, _WIDTH)
    rounded[0] = torch.linspace(-1e-7, 1e-7, _WIDTH)
    rounded[0, :4], rounded[_WORDS // 2 :, 0] = noise, noise
    model.norm.register_forward_hook(lambda module, args, output: output * scale)
    model.embed.weight.register_hook(lambda grad: grad + rounded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tt.capture(model, path, keep="tensors", optimizer=optimizer):
        for tokens in batches:
            labels = tokens.masked_fill(mask == 0, -100).flatten()
            F.cross_entropy(model(tokens, attention_mask=mask).flatten(0, 1), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_noise_of_padding_is_no_divergence(tmp_path: Path) -> None:
    found = tt.compare(record(tmp_path / "a"), record(tmp_path / "b", noise=-1e-7))
    assert found.verdict == "match", found.sentence


@pytest.mark.parametrize("until_first", [False, True])
def test_a_mistake_beside_padding_is_named(tmp_path: Path, until_first: bool) -> None:
    reference, candidate = record(tmp_path / "a"), record(tmp_path / "b", noise=-1e-7, scale=1.05)
    found = tt.compare(reference, candidate, until_first=until_first)
    assert found.first is not None and found.first.module == "norm", found.sentence


class _Window(nn.Module):
    """Attention through a window, which hides everything from padding that is far behind a text."""

    def __init__(self, fused: bool, scale: float) -> None:
        super().__init__()
        self.qkv, self.out, self.fused, self.scale = (
            nn.Linear(_WIDTH, 3 * _WIDTH),
            nn.Linear(_WIDTH, _WIDTH),
            fused,
            scale,
        )

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        place = torch.arange(x.shape[1])
        seen = (place[:, None] >= place) & (place[:, None] < place + 3) & keep[:, None]
        if self.fused:
            return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale))
        scores = q @ k.transpose(1, 2) * self.scale
        return self.out(scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) @ v)


class _Windows(nn.Module):
    def __init__(self, fused: bool, scale: float, lost: bool) -> None:
        super().__init__()
        self.embed, self.head, self.lost = nn.Embedding(_WORDS, _WIDTH), nn.Linear(_WIDTH, _WORDS), lost
        self.layers = nn.ModuleList([_Window(fused, 0.25), _Window(fused, scale)])

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, torch.ones_like(keep) if self.lost else keep)
        return self.head(x)


def windowed(
    model: _Windows, path: Path, keep: str, reference: Path | None = None, factor: float = 1.0
) -> tuple[Path, Any]:
    """Capture a step over texts with padding behind them; or check it against a reference, and return the result."""
    seen = torch.arange(_LENGTH) < torch.tensor([8, 2, 3, 6])[:, None]
    tokens = torch.randint(1, _WORDS, (4, _LENGTH), generator=torch.Generator().manual_seed(1)) * seen
    labels = tokens.masked_fill(~seen, -100).flatten()
    kinds = ("input", "output", "grad_output", "param_grad")
    watched: Any = tt.capture(model, path, keep=keep, kinds=kinds) if reference is None else tt.check(model, reference)
    with watched:
        (factor * F.cross_entropy(model(tokens, seen).flatten(0, 1), labels)).backward()
    return path, None if reference is None else watched.result


def build(fused: bool, scale: float = 0.25, lost: bool = False) -> _Windows:
    torch.manual_seed(0)
    return _Windows(fused, scale, lost)


@pytest.mark.parametrize("keep", ["tensors", "summary"])
def test_padding_far_behind_a_text_sees_nothing_through_a_window(keep: str, tmp_path: Path) -> None:
    reference, _ = windowed(build(False), tmp_path / "a", keep)
    right = tt.compare(reference, windowed(build(True), tmp_path / "b", keep)[0])
    assert right.verdict == "match", right.sentence
    wrong = tt.compare(reference, windowed(build(True, 0.5), tmp_path / "c", keep)[0])
    assert wrong.first is not None and wrong.first.module == "layers.1", wrong.sentence


@pytest.mark.parametrize("keep", ["tensors", "summary"])
@pytest.mark.parametrize("fused", [False, True])
def test_padding_does_not_excuse_the_mask_that_hides_it(fused: bool, keep: str, tmp_path: Path) -> None:
    reference, _ = windowed(build(False), tmp_path / "a", keep)
    found = [tt.compare(reference, windowed(build(fused, lost=True), tmp_path / "b", keep)[0])]
    if keep == "tensors":
        found.append(windowed(build(fused, lost=True), tmp_path, keep, reference)[1])
    for result in found:
        assert result.first is not None and result.first.module == "", result.sentence


def test_a_loss_is_judged_beside_attention_that_agrees(tmp_path: Path) -> None:
    reference, _ = windowed(build(False), tmp_path / "a", "summary")
    model = build(False)
    for layer in model.layers:
        layer.qkv.forward = (
            lambda x, own=layer.qkv: (  # type: ignore[method-assign, misc]
                x[..., :5] @ own.weight[:, :5].T + x[..., 5:] @ own.weight[:, 5:].T + own.bias
            )
        )
    found = tt.compare(reference, windowed(model, tmp_path / "b", "summary", factor=0.8)[0])
    assert found.first is not None and found.first.cause == "loss", found.sentence
