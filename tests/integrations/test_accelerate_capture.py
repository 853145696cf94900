"""`capture` with the real Accelerator."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import tensortap
from tensortap.errors import UsageError

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate")


def train(path: Path | None) -> Any:
    from tensortap.integrations.accelerate import capture

    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 2)
    data = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    tap = capture(accelerator, path) if path is not None else None
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    if tap is not None:
        tap.close()
    return model


def test_accumulation_counts_micro_steps(tmp_path: Path) -> None:
    plain, recorded = train(None), train(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), recorded.parameters(), strict=True))
    run = tensortap.open(tmp_path / "run")
    assert run.finished and run.info["model"] == "Linear"
    assert run.steps == [0, 1, 2] and {record.key.micro for record in run.records()} == {0, 1}


def test_nothing_prepared() -> None:
    from tensortap.integrations.accelerate import capture

    with pytest.raises(UsageError, match=r"call accelerator\.prepare"):
        capture(accelerate.Accelerator(cpu=True), "run")
