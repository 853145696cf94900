"""Capture changes nothing: losses, gradients, parameters and random state are the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, hooks_on
from tensortap.core.records import MODULE_KINDS


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in-place module": zoo.InPlaceModule,
    "in-place after": zoo.InPlaceAfter,
    "views": zoo.Views,
    "structured": zoo.Structured,
    "shared": zoo.Shared,
    "pass-through": zoo.PassThrough,
    "statistics": zoo.Statistics,
    "residual": zoo.Residual,
    "dropout": WithDropout,
    "checkpointed, reentrant": lambda: zoo.Checkpointed("reentrant"),
    "checkpointed, non-reentrant": lambda: zoo.Checkpointed("non-reentrant"),
}


def train(build: Callable[[], nn.Module], path: Path | None, **options: Any) -> dict[str, Any]:
    """Three AdamW steps of two micro batches; everything that a tap could have disturbed."""
    torch.manual_seed(7)
    np.random.seed(7)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tap = None if path is None else tt.capture(model, path, optimizer=optimizer, **options)
    losses, gradients = [], []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            x = zoo.batch(seed=10 * step + micro).requires_grad_()
            loss = zoo.loss_of(model(x))
            loss.backward()
            losses.append(loss.detach())
            gradients.append(x.grad)
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    if tap is not None:
        tap.close()
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": list(model.state_dict().values()),
        "optimizer": [v for state in optimizer.state.values() for v in state.values()],
        "random": [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))],
        "hooks": [torch.tensor(hooks_on(model))],
    }


def assert_identical(plain: dict[str, Any], tapped: dict[str, Any]) -> None:
    for what, expected in plain.items():
        assert len(expected) == len(tapped[what]), what
        for left, right in zip(expected, tapped[what], strict=True):
            assert torch.equal(left, right), what


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_every_model_with_all_kinds(tmp_path: Path, name: str, keep: str) -> None:
    plain = train(MODELS[name], None)
    assert_identical(plain, train(MODELS[name], tmp_path / "run", keep=keep, kinds=ALL_KINDS))


@pytest.mark.parametrize("kind", MODULE_KINDS)
@pytest.mark.parametrize("keep", ["summary", "tensors", {"gated": "tensors", "*": "summary"}])
def test_every_kind_alone(tmp_path: Path, kind: str, keep: Any) -> None:
    plain = train(zoo.Residual, None)
    assert_identical(plain, train(zoo.Residual, tmp_path / "run", keep=keep, kinds=(kind,)))


def test_the_residual_model_would_notice_a_private_edge() -> None:
    """Control: an identity before the gated block does change the last bits of this model's gradients."""

    class Edged(zoo.Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.last(y + self.gated(y.view_as(y)))

    plain, edged = train(zoo.Residual, None), train(Edged, None)
    assert not all(map(torch.equal, plain["gradients"], edged["gradients"]))


def test_nothing_outlives_the_step(run_path: Path) -> None:
    """No activation is kept alive by the tap once training has dropped it."""
    import gc

    from torch.multiprocessing.reductions import StorageWeakRef

    model = zoo.Residual()
    seen: list[StorageWeakRef] = []
    handle = model.gated.up.register_forward_hook(lambda m, a, out: seen.append(StorageWeakRef(out.untyped_storage())))
    with tt.capture(model, run_path, keep="tensors", kinds=ALL_KINDS) as tap:
        loss = zoo.loss_of(model(zoo.batch()))
        assert not seen[0].expired()  # the graph needs it
        del loss
        gc.collect()
        assert seen[0].expired()  # before the step ends, and before the tap is closed
        tap.step()
    handle.remove()


class Marked(torch.Tensor):
    """A tensor subclass, as some libraries define."""


@pytest.mark.parametrize(
    "kind_of", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool, torch.complex64, Marked]
)
@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_a_seen_tensor_can_still_be_resized(run_path: Path, kind_of: Any, keep: str) -> None:
    """As programs do that free parameters and activations between uses."""
    model = nn.Identity()
    x = torch.ones(4, 6).as_subclass(Marked) if kind_of is Marked else torch.ones(4, 6).to(kind_of)
    views = x, x.t(), x[:0], x[0].expand(3, 6), x[:, ::2], x[1, 1]
    shapes = [tuple(view.shape) for view in views]
    with tt.capture(model, run_path, keep=keep, kinds=("input",)):
        for view in views:
            model(view)
    x.untyped_storage().resize_(0)
    x.resize_(8, 6)
    run = tt.open(run_path)
    assert [record.shape for record in run] == shapes
    assert keep == "summary" or all((run.load(record) == 1).all() for record in run)


def test_parameters_may_still_be_resized(run_path: Path) -> None:
    model = zoo.Residual()
    with tt.capture(model, run_path, kinds=ALL_KINDS) as tap:
        zoo.loss_of(model(zoo.batch())).backward()
        tap.step()
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad):
            tensor.untyped_storage().resize_(0)
            tensor.untyped_storage().resize_(tensor.nbytes)
