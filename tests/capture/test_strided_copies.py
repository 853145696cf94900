"""Small tensors whose elements are not neighbours are recorded as any other small tensor, from a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.fake_gpu import choose_language
from tensortap.capture.recording.recorder import Recorder
from tensortap.frameworks.torch.framework import Torch


class Taker(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Both(nn.Module):
    """Shows one tensor to two modules, and its transpose to a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Taker(), Taker(), Taker()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) + self.third(x.mT).mT


KINDS = ("every second column", "transposed", "repeated", "negated", "bfloat16", "integers", "bytes", "heads", "one")


def strided(kind: str) -> torch.Tensor:
    whole = torch.arange(32.0).reshape(4, 8)
    return {
        "every second column": whole[:, ::2],
        "transposed": whole[:, :4].t(),
        "repeated": torch.arange(4.0).expand(4, 4),
        "negated": torch._neg_view(whole[:, :4].contiguous()),
        "bfloat16": whole[:, 1:5].to(torch.bfloat16).t(),
        "integers": torch.arange(32).reshape(4, 8)[:, :4],
        "bytes": torch.arange(64, dtype=torch.uint8).reshape(4, 16)[:, 3:11:2],
        "heads": torch.arange(2.0 * 3 * 5 * 4).reshape(2, 3, 5, 4)[:, 1:].permute(3, 0, 2, 1),
        "one": torch.arange(12.0).reshape(3, 1, 4)[:, :, :3].transpose(0, 2),
    }[kind]


def digest_of(x: torch.Tensor) -> int:
    """Return the digest of the same elements, one after the other."""
    model = Taker()
    with tt.capture(model, None, kinds="input") as tap:
        model(x.resolve_neg().clone(memory_format=torch.contiguous_format))
    return int(next(iter(tap.run)).summary.digest)


@pytest.mark.parametrize("language", ["C++", "C", "Python"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_have_the_summaries_of_their_values(kind: str, language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_language(monkeypatch, language)
    carefully: list[Any] = []
    in_python: list[Any] = []
    record, gathered = Recorder.record, Torch.gathered
    monkeypatch.setattr(Recorder, "record", lambda self, *given: (carefully.append(given), record(self, *given)))
    model, x = Both(), strided(kind)
    with tt.capture(model, None, kinds="input") as tap:
        for step in range(3):
            if step == 2:
                monkeypatch.setattr(Torch, "gathered", lambda *given: (in_python.append(given), gathered(*given))[1])
            model(x)
            tap.step()
    assert not carefully
    assert bool(in_python) == (language == "Python" or kind == "negated"), "a lazy sign is left to Python"
    for step in range(3):
        rows = {row.key.module: row for row in tap.run if row.key.step == step}
        assert rows["first"].summary.digest == digest_of(x)
        assert rows["third"].summary.digest == digest_of(x.mT)
        assert rows[""].tensor == rows["first"].tensor == rows["second"].tensor != rows["third"].tensor


def test_a_change_between_two_sightings_is_seen() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Taker(), Taker()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first(x)
            x.data.mul_(3)  # no version counts it
            return self.second(x)

    model = Changing()
    with tt.capture(model, None, kinds="input") as tap:
        for _ in range(3):
            model(torch.arange(1.0, 33).reshape(4, 8)[:, ::2])
            tap.step()
    rows = {row.key.module: row for row in tap.run if row.key.step == 2}
    assert rows["first"].tensor != rows["second"].tensor
    assert rows["second"].summary["mean"] == 3 * rows["first"].summary["mean"]
