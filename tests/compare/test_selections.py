"""Another token that is picked from states is a mistake, though positions among these differ that see nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt
from support.padded_attention import LENGTH, ROWS, WIDTH, PaddedAttention, causal_mask, padding_mask
from tensortap.compare.measure.selections import _are_the_same, selected_rows


class _Classifier(nn.Module):
    def __init__(self, boolean: bool, picked: int) -> None:
        super().__init__()
        self.boolean, self.picked = boolean, picked
        self.embed, self.norm, self.head = nn.Embedding(30, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.attention = nn.ModuleList(PaddedAttention() for _ in range(2))

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        mask = causal_mask(attention_mask, self.boolean)
        x = self.embed(tokens)
        for attention in self.attention:
            x = x + attention(x, attention_mask=mask)
        return self.head(self.norm(x)[:, self.picked])


def captured(path: Path, boolean: bool, picked: int = -1) -> Path:
    torch.manual_seed(0)
    model = _Classifier(boolean, picked)
    random = torch.Generator().manual_seed(1)
    mask = padding_mask()
    tokens = torch.randint(1, 30, (ROWS, LENGTH), generator=random) * mask
    with tt.capture(model, path, keep="tensors"):
        F.cross_entropy(model(tokens, mask), torch.arange(ROWS) % 3).backward()
    return path


@pytest.mark.parametrize(("picked", "module"), [(-1, None), (-2, "")])
def test_another_token_that_is_picked_is_a_mistake(tmp_path: Path, picked: int, module: str | None) -> None:
    reference, other = captured(tmp_path / "a", boolean=False), captured(tmp_path / "b", boolean=True, picked=picked)
    result = tt.compare(reference, other)
    assert (None if result.first is None else result.first.module) == module, result.sentence


def test_selections_are_the_same_in_another_order_and_beside_hidden_rows() -> None:
    """Tokens that see nothing may choose other experts, and tokens that are equal on one side alone are."""
    ours: list[set[int]] = [{0, 3}, {1}, {5}]
    assert _are_the_same(ours, [{1}, {3}, {6}], hidden={5, 6})
    assert not _are_the_same(ours, [{1}, {4}, {6}], hidden={5, 6})
    assert not _are_the_same(ours, [{1}, {3}, {6}], hidden=set())


def test_rows_that_are_equal_are_one() -> None:
    source = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    assert selected_rows(source[[2, 1]], source) == [{0, 2}, {1}]
    assert selected_rows(source + 1, source) is None
    assert selected_rows(source[:, :1], source) is None
