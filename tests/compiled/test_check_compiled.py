"""A model against its compiled self: equal within rounding, or the module that the compiler gets wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from tensortap.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


class Forgetful(nn.Module):
    """Computes something else where it is compiled, as after an error of the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if torch.compiler.is_compiling() else torch.tanh(y)


def model_of(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), middle), nn.Linear(4, 4), nn.Dropout(0.5))


def step(model: Any) -> None:
    zoo.loss_of(model(zoo.batch())).backward()


def test_a_right_compiler_matches_and_the_model_stays_as_it_was() -> None:
    model = model_of(nn.Tanh())
    torch.manual_seed(3)
    random = torch.get_rng_state()
    result = tt.check_compiled(model, step, compile={"backend": "aot_eager"})
    assert result.verdict == "match", str(result)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("truth", [None, "float64"])
def test_the_module_that_is_compiled_wrongly_is_named(truth: str | None, tmp_path: Path) -> None:
    model = model_of(Forgetful())
    model[1].compile(backend="aot_eager")
    result = tt.check_compiled(model, step, truth=truth, path=tmp_path)
    assert result.verdict == "diverged"
    assert result.first is not None and result.first.module == "1.1"
    assert {each.name for each in tmp_path.iterdir()} == {"eager", "compiled"} | ({"truth"} if truth else set())


def test_wrong_usage() -> None:
    with pytest.raises(UsageError, match="leave it out"):
        tt.check_compiled(torch.compile(model_of(nn.Tanh())), step, compile={})
    with pytest.raises(UsageError, match="must call that one"):
        tt.check_compiled(model_of(nn.Tanh()), lambda _: None)
    with pytest.raises(UsageError, match="float64"):
        tt.check_compiled(model_of(nn.Tanh()), step, truth="float32")
    with pytest.raises(UsageError, match="not a function that takes the model"):
        tt.check_compiled(model_of(nn.Tanh()), torch.ones(2))  # type: ignore[arg-type]  # a batch, as `check` takes one
