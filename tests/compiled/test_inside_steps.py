"""Later steps, in which points of compiled code are recorded in the slots of earlier ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import zoo
from support.compiling import NONE, checkpoint_layers, compile_layers, compile_whole, differences, train
from tensortap.capture.watching.inside import InsideCalls

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")


def built(checkpointed: bool) -> Any:
    torch.manual_seed(0)
    return checkpoint_layers(zoo.Checkpointed(None)) if checkpointed else zoo.Checkpointed(None)


def step(model: Any) -> torch.Tensor:
    return zoo.loss_of(model(zoo.batch()))


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the modules at whose points the slots were known."""
    original, names = InsideCalls._repeat, []

    def repeat(self: Any, site: Any, *args: Any) -> bool:
        if found := original(self, site, *args):
            names.append(site.name)
        return found

    monkeypatch.setattr(InsideCalls, "_repeat", repeat)
    return names


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("how", [compile_whole, compile_layers])
def test_later_steps_have_the_records_of_the_eager_run(how: Any, checkpointed: bool, repeated: list[str]) -> None:
    eager = train(built(checkpointed), step, steps=5, micros=2, kinds=KINDS)
    inside = train(
        how(built(checkpointed), backend="aot_eager"), step, steps=5, micros=2, kinds=KINDS, compiled="inside"
    )
    assert differences(eager, inside) == NONE
    assert inside.coverage == eager.coverage
    assert repeated
