"""Vector quantization: a token takes the nearest code of a book, and rounding decides between two that are as near."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from tensortap.compare.judge.ties import TIE_UNKNOWN

_KEEP = pytest.mark.parametrize("keep", ["summary", "tensors"])


class Quantize(nn.Module):
    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(24, 8, generator=torch.Generator().manual_seed(3)))
        self.mistake = mistake

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        tokens = image.movedim(1, -1).flatten(0, -2).float()
        code = torch.cdist(tokens, self.book).argmin(-1)
        if self.mistake == "product":
            code = (tokens @ self.book.T).argmax(-1)
        if self.mistake == "one":
            code[5] = (code[5] + 1) % 24
        found = self.book[code].view(len(image), *image.shape[2:], -1).movedim(-1, 1)
        return image + (found - image).detach(), code


class Autoencoder(nn.Module):
    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.encode, self.quantize, self.decode = nn.Conv2d(3, 8, 3), Quantize(mistake), nn.Conv2d(8, 3, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.decode(self.quantize(self.encode(image))[0])


def trained(watch: Callable[[nn.Module], Any], short: bool = False, mistake: str = "") -> Any:
    torch.manual_seed(1)
    model, images = Autoencoder(mistake), 3 * torch.randn(6, 3, 22, 22)
    with watch(model) as watching, torch.autocast("cpu", torch.bfloat16) if short else nullcontext():
        model(images).float().square().mean().backward()
    return watching


def recorded(keep: str, short: bool = False, mistake: str = "") -> Any:
    return trained(lambda model: tt.capture(model, keep=keep), short, mistake).run


@_KEEP
def test_a_token_between_two_codes_is_not_judged(keep: str) -> None:
    found = tt.compare(recorded(keep), recorded(keep, short=True))
    assert found.verdict == "incomparable", found.sentence
    assert "another expert or code" in found.sentence
    assert any(row["rule"] == TIE_UNKNOWN for row in found.rows)
    assert any("of 2,400 tokens chose another code" in note for note in found.notes), found.notes


@_KEEP
@pytest.mark.parametrize("mistake", ["product", "one"])
def test_another_choice_among_equal_distances_is_wrong(keep: str, mistake: str) -> None:
    found = tt.compare(recorded(keep), recorded(keep, mistake=mistake))
    assert found.first is not None and found.first.module == "quantize", found.sentence


@_KEEP
def test_another_distance_is_wrong_beside_a_short_dtype(keep: str) -> None:
    found = tt.compare(recorded(keep), recorded(keep, short=True, mistake="product"))
    assert found.first is not None and found.first.module == "quantize", found.sentence


def test_a_check_casts_tokens_to_the_dtype_of_the_candidate() -> None:
    kinds = ("input", "output", "grad_output", "grad_input", "param_grad")
    run = trained(lambda model: tt.capture(model, keep="tensors", kinds=kinds)).run
    found = trained(lambda model: tt.check(model, run), short=True).result
    assert found.verdict != "diverged", found.sentence
    assert any("of 2,400 tokens chose another code" in note for note in found.notes), found.notes
    for mistake in ("product", "one"):
        wrong = trained(lambda model: tt.check(model, run), mistake=mistake).result
        assert wrong.first is not None and wrong.first.module == "quantize", wrong.sentence
    wrong = trained(lambda model: tt.check(model, run), short=True, mistake="product").result
    assert wrong.first is not None and wrong.first.module == "quantize", wrong.sentence
