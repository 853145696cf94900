"""Padding after an optimizer's step: its embedding is noise, which a norm enlarges, and no code is wrong."""

from __future__ import annotations

from pathlib import Path

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
    def __init__(self, fused: bool, scale: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(_WORDS, _WIDTH), nn.Linear(_WIDTH, _WORDS)
        self.layers = nn.ModuleList([_Window(fused, 0.25), _Window(fused, scale)])

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, keep)
        return self.head(x)


@pytest.mark.parametrize("keep", ["tensors", "summary"])
def test_padding_far_behind_a_text_sees_nothing_through_a_window(keep: str, tmp_path: Path) -> None:
    def windowed(path: Path, fused: bool, scale: float = 0.25) -> Path:
        torch.manual_seed(0)
        model, seen = _Windows(fused, scale), torch.arange(_LENGTH) < torch.tensor([8, 2, 3, 6])[:, None]
        tokens = torch.randint(1, _WORDS, (4, _LENGTH)) * seen
        with tt.capture(model, path, keep=keep):
            labels = tokens.masked_fill(~seen, -100).flatten()
            F.cross_entropy(model(tokens, seen).flatten(0, 1), labels).backward()
        return path

    reference = windowed(tmp_path / "a", False)
    right = tt.compare(reference, windowed(tmp_path / "b", True))
    assert right.verdict == "match", right.sentence
    wrong = tt.compare(reference, windowed(tmp_path / "c", True, 0.5))
    assert wrong.first is not None and wrong.first.module == "layers.1", wrong.sentence
