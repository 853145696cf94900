"""The same capture on a CUDA device: the same bits, the same promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, everything, hooks_on
from tensortap.kernels import summarize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train(path: Path | None, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = zoo.Residual().to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tap = path and tt.capture(model, path, optimizer=optimizer, kinds=ALL_KINDS, **options)
    found = []
    for step in range(3):
        loss = zoo_loss(model(zoo.batch(seed=step).to("cuda", dtype)))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    if tap:
        tap.close()
    assert hooks_on(model) == 0
    return found + [p.detach().clone() for p in model.parameters()] + [torch.cuda.get_rng_state()]


def zoo_loss(output: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device).view_as(output)
    return (output.float() * weights).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_training_is_unchanged(tmp_path: Path, keep: str, dtype: torch.dtype) -> None:
    plain, tapped = train(None, dtype), train(tmp_path / "run", dtype, keep=keep)
    assert all(map(torch.equal, plain, tapped))


def test_summaries_are_those_of_the_bytes_that_were_kept(tmp_path: Path) -> None:
    train(tmp_path / "run", torch.bfloat16, keep="tensors")
    run = tt.open(tmp_path / "run")
    assert len(run) > 100
    assert all(summarize(run.load(record)).digest == record.summary.digest for record in run)


def test_two_runs_are_alike(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name, keep="summary")
    assert everything(tt.open(tmp_path / "a")) == everything(tt.open(tmp_path / "b"))
    assert tt.compare(tmp_path / "a", tmp_path / "b").verdict == "match"
