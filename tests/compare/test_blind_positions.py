"""Positions from which a mask hides everything: each kind of attention makes something else of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt
from tensortap.compare.measure.masks import equal_mask

_WORDS, _WIDTH, _LENGTH, _STEPS = 40, 16, 8, 2
_KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "step_grad")
_LOW = {"lowest": torch.finfo(torch.float32).min, "infinite": -float("inf"), "boolean": 0.0}


class _Attention(nn.Module):
    """Returns the mean of all values where a position sees nothing, or zero. Its backward may leave these out."""

    def __init__(self, zero: bool, cut: bool, scale: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.zero, self.cut, self.scale = zero, cut, scale

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        shown = mask if mask.dtype == torch.bool else mask == 0
        weights = (q @ k.transpose(1, 2) * self.scale).masked_fill(~shown, torch.finfo(x.dtype).min).softmax(-1)
        sees = shown.any(-1, keepdim=True)
        made = weights @ v * sees if self.zero else weights @ v
        return self.out(torch.where(sees, made, made.detach()) if self.cut else made)


class _Model(nn.Module):
    def __init__(self, zero: bool, cut: bool, convention: str, scale: float) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(_WORDS, _WIDTH), _Attention(zero, cut, scale)
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WORDS)
        self.convention = convention

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        shown = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).tril() & (attention_mask[:, None] > 0)
        mask = torch.zeros(shown.shape).masked_fill(~shown, _LOW[self.convention])
        x = self.embed(tokens)
        x = x + self.attention(x, shown if self.convention == "boolean" else mask)
        return self.head(self.norm(x)), x.square().mean()


class Training:
    """reads: whether the loss reads positions that see nothing. balance: how much of their size it adds."""

    def __init__(
        self,
        zero: bool = False,
        cut: bool = False,
        convention: str = "lowest",
        scale: float = 0.25,
        reads: bool = False,
        balance: float = 0.0,
    ) -> None:
        torch.manual_seed(0)
        self.model = _Model(zero, cut, convention, scale)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.begin = torch.tensor([0, 3, 2, 4])[:, None]
        self.reads, self.balance = reads, balance

    def run(self) -> None:
        places = torch.arange(_LENGTH)
        for step in range(_STEPS):
            tokens = torch.randint(1, _WORDS, (4, _LENGTH), generator=torch.Generator().manual_seed(step))
            labels = tokens.masked_fill(places <= self.begin - int(self.reads), -100)[:, 1:]
            logits, size = self.model(tokens, (places >= self.begin).long())  # the mask has no name
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
            (loss + self.balance * size if self.balance else loss).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def recorded(self, path: Path, keep: str) -> Path:
        with tt.capture(self.model, path, keep=keep, kinds=_KINDS, optimizer=self.optimizer):
            self.run()
        return path


def compared(tmp_path: Path, way: str, ours: dict[str, Any], theirs: dict[str, Any]) -> Any:
    keep = "summary" if way == "summary" else "tensors"
    reference, candidate = Training(**ours).recorded(tmp_path / "reference", keep), Training(**theirs)
    if way != "isolated":
        return tt.compare(reference, candidate.recorded(tmp_path / "candidate", keep))
    with tt.check(candidate.model, reference, optimizer=candidate.optimizer) as check:
        candidate.run()
    return check.result


@pytest.mark.parametrize("way", ["tensors", "summary", "isolated"])
@pytest.mark.parametrize("conventions", [("lowest", "lowest"), ("boolean", "boolean"), ("lowest", "infinite")])
def test_what_attention_makes_of_blind_positions_is_no_divergence(
    conventions: tuple[str, str], way: str, tmp_path: Path
) -> None:
    ours, theirs = ({"convention": each} for each in conventions)
    found = compared(tmp_path, way, ours, {**theirs, "zero": True})
    assert found.verdict == "match", found.sentence


@pytest.mark.parametrize("way", ["tensors", "summary", "isolated"])
def test_a_mistake_beside_blind_positions_is_named(way: str, tmp_path: Path) -> None:
    found = compared(tmp_path, way, {}, {"zero": True, "scale": 0.26})
    assert found.first is not None and found.first.module == "attention", found.sentence


@pytest.mark.parametrize("way", ["tensors", "summary", "isolated"])
@pytest.mark.parametrize("loss", [{"reads": True}, {"balance": 0.1}])
def test_a_loss_that_reads_blind_positions_leaves_the_answer_open(
    loss: dict[str, Any], way: str, tmp_path: Path
) -> None:
    found = compared(tmp_path, way, loss, {**loss, "zero": True})
    assert found.verdict == "incomparable" and "reads positions that a mask hides" in found.sentence, found.sentence


@pytest.mark.parametrize("way", ["tensors", "isolated"])
def test_a_backward_that_differs_at_blind_positions_leaves_the_answer_open(way: str, tmp_path: Path) -> None:
    found = compared(tmp_path, way, {"reads": True}, {"reads": True, "cut": True})
    assert found.verdict == "incomparable" and "reads positions that a mask hides" in found.sentence, found.sentence


def _causal(hides_with_true: bool) -> Any:
    """A causal mask beside two texts, one of which has padding before it."""
    places = np.arange(6)
    shown = (places[:, None] >= places) & (places >= np.array([0, 2])[:, None, None])
    return (~shown if hides_with_true else shown)[:, None]


def test_a_boolean_mask_frees_positions_only_if_true_lets_through() -> None:
    found = equal_mask(_causal(False))
    assert found is not None and found.positions is not None
    assert found.positions.tolist() == [[False] * 6, [True, True] + [False] * 4]
    assert equal_mask(_causal(True)) is None  # its last query hides nothing, and sees everything
    keys = np.zeros((2, 1, 3, 6), bool)  # padding of another text, hidden by True: the first has none
    keys[1, ..., 4:] = True
    assert equal_mask(keys) is None and equal_mask(~keys) is None


def test_flags_of_tokens_are_no_mask_of_keys() -> None:
    padding = np.zeros((2, 6, 1), bool)
    padding[1, 4:] = True
    assert equal_mask(padding) is None and equal_mask(~padding) is None


class _Told(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(4, 8), _Hides(), factor

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.first(x).masked_fill(padding[..., None], 0.0)
        return self.second(self.factor * x, padding[..., None])


class _Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.fc(x).masked_fill(padding, 0.0)


@pytest.mark.parametrize("way", ["tensors", "isolated"])
def test_flags_that_say_what_is_padding_hide_no_mistake_elsewhere(way: str, tmp_path: Path) -> None:
    x, padding = torch.randn(3, 6, 4), torch.arange(6) >= torch.tensor([6, 4, 3])[:, None]
    models = []
    for factor in (1.0, 2.0):
        torch.manual_seed(0)
        models.append(_Told(factor))
    with tt.capture(models[0], tmp_path / "a", keep="tensors"):
        models[0](x, padding).square().mean().backward()
    if way == "isolated":
        with tt.check(models[1], tmp_path / "a") as check:
            models[1](x, padding).square().mean().backward()
        found = check.result
    else:
        with tt.capture(models[1], tmp_path / "b", keep="tensors"):
            models[1](x, padding).square().mean().backward()
        found = tt.compare(tmp_path / "a", tmp_path / "b")
    assert found.first is not None and found.first.module == "", found.sentence
