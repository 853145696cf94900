"""A gradient scaler on one side multiplies all gradients until the optimizer uses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import nn

import tensortap as tt

_KEEP = pytest.mark.parametrize("keep", ["summary", "tensors"])
KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "step_grad")


def recorded(keep: str, scale: float = 1.0, dtype: torch.dtype = torch.float32, mistake: str = "") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    with tt.capture(model, keep=keep, kinds=KINDS, optimizer=optimizer) as tap:
        for seed in range(2):
            x = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = F.cross_entropy(model(x).float(), torch.arange(24) % 4)
            scaled = scaler.scale(loss)
            (loss if mistake == "not scaled" else scaled).backward()
            if mistake != "not unscaled":
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return tap.run


@_KEEP
def test_gradients_between_scaling_and_unscaling_are_compared_at_one_scale(keep: str) -> None:
    plain, scaled = recorded(keep), recorded(keep, 1024.0)
    for sides in ((plain, scaled), (scaled, plain), (scaled, recorded(keep, 256.0))):
        found = tt.compare(*sides)
        assert found.verdict == "match", found.sentence
        assert any("the gradient scaler's scale is" in note for note in found.notes), found.notes


@_KEEP
def test_float16_with_a_scaler_matches_float32(keep: str) -> None:
    for sides in ((1.0, torch.float32), (4096.0, torch.float16)), ((4096.0, torch.float16), (1.0, torch.float32)):
        found = tt.compare(*(recorded(keep, *side) for side in sides))
        assert found.verdict == "match", found.sentence


@_KEEP
@pytest.mark.parametrize("mistake", ["not scaled", "not unscaled"])
def test_a_scaler_that_is_used_halfway_is_found(keep: str, mistake: str) -> None:
    found = tt.compare(recorded(keep), recorded(keep, 1024.0, mistake=mistake))
    assert found.first is not None, found.sentence
    assert found.first.key.kind == ("grad_output" if mistake == "not scaled" else "step_grad"), found.sentence
