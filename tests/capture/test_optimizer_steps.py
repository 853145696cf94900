"""Steps that scalers skip, closures, and several optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop_facts import Loop, kinds_of, loop  # noqa: F401  # a fixture
from torch import nn

import tensortap as tt
from tensortap.capture.loop.optimizers import StepCounter
from tensortap.errors import UsageError


def scaled_step(of: Loop, factor: float) -> None:
    """One step through the scaler. An infinite factor makes it skip."""
    loss = (of.model(of.lib.ones([2, 3])).square() * of.lib.arange(3.0)).sum() * factor
    of.scaler.scale(loss).backward()
    of.scaler.step(of.optimizer)
    of.scaler.update()
    of.clear()


def test_a_step_that_the_scaler_skips_is_a_step(loop: Loop) -> None:  # noqa: F811
    before = type(loop.scaler).step
    if loop.name == "paddle":
        loop.scaler.turn_on()
    with tt.capture(loop.model, optimizer=loop.optimizer, on_error="raise") as tap:
        for factor in (1.0, float("inf"), 1.0):
            scaled_step(loop, factor)
    facts = tap.run.loop()
    assert tap.run.steps == [0, 1, 2]
    assert [(each.step, each.value["skipped"]) for each in facts.changes("skipped", "0")] == [
        (0, False),
        (1, True),
        (2, False),
    ]
    assert [(each.step, each.value["scale"]) for each in facts.changes("scaler", "0")] == [(0, 4.0), (2, 2.0)]
    assert type(loop.scaler).step is before, "nothing remains on the class"
    after = {record.key.step: record.summary.digest for record in tap.run.records(kind="param", call=1, path="bias")}
    assert after[1] == after[0] != after[2]
    assert set(kinds_of(tap.run, 0)) == {"step_grad", "param"}, "param_grad is scaled, what the optimizer uses is not"


def test_a_scaler_that_is_off_and_taps_that_overlap(loop: Loop) -> None:  # noqa: F811
    if loop.name == "torch":
        loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    original = type(loop.scaler).step
    first = tt.capture(loop.model, optimizer=loop.optimizer, on_error="raise")
    second = tt.capture(loop.model, optimizer=loop.optimizer, on_error="raise")
    scaled_step(loop, 1.0)
    first.close()
    scaled_step(loop, 1.0)
    second.close()
    assert type(loop.scaler).step is original
    assert first.run.steps == [0] and second.run.steps == [0, 1]
    assert second.run.loop().subjects("scaler") == []


def test_a_fused_optimizer_that_skips_by_itself() -> None:
    of = Loop("torch")
    of.optimizer = torch.optim.SGD(of.model.parameters(), lr=0.1, fused=True)
    with tt.capture(of.model, optimizer=of.optimizer, on_error="raise") as tap:
        for factor in (1.0, float("inf")):
            scaled_step(of, factor)
    facts = tap.run.loop()
    assert [each.value["skipped"] for each in facts.changes("skipped", "0")] == [False, True]
    assert facts.value("scaler", 1, "0") == {"scale": 4.0}


def test_a_closure_makes_the_gradients_inside_the_step() -> None:
    of = Loop("torch")

    def closure() -> Any:
        of.clear()
        return of.backward()

    with tt.capture(of.model, optimizer=of.optimizer, on_error="raise") as tap:
        losses = [of.optimizer.step(closure) for _ in range(2)]
    assert all(isinstance(loss, torch.Tensor) for loss in losses), "the closure's result is returned"
    assert tap.run.steps == [0, 1]
    assert not list(tap.run.records(kind="step_grad")), "what the step used is what the closure made"
    assert (tap.run.loop().value("step_grad", 1, "0") or {})["no_gradient"] == []


def gan() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
    return model, [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values()]


def played(model: nn.ModuleDict, optimizers: list[torch.optim.Optimizer], order: str) -> None:
    for letter in order:
        model["critic"](model["generator"](torch.ones(1, 2))).sum().backward()
        optimizers["gc".index(letter)].step()
        model.zero_grad()


@pytest.mark.parametrize(
    ("order", "counts"),
    [
        ("gcgc", [(0, 1, 1)]),
        ("ccgccg", [(0, 1, 2)]),
        ("gccgccg", [(0, 1, 1), (1, 1, 1), (2, 1, 2)]),
    ],
)
def test_a_step_ends_when_each_optimizer_has_stepped(order: str, counts: list[tuple[int, int, int]]) -> None:
    model, (generator, critic) = gan()
    with tt.capture(model, optimizer={"g": generator, "c": critic}, on_error="raise") as tap:
        played(model, [generator, critic], order)
    facts = tap.run.loop()
    changes = {each.step for of in ("g", "c") for each in facts.changes("steps", of)}
    found = [
        (step, *((facts.value("steps", step, of) or {})["steps"] for of in ("g", "c"))) for step in sorted(changes)
    ]
    if order == "gccgccg":  # after the first step each has one step of the generator, and its critic's before it
        assert found[0] == (0, 1, 1) and (facts.value("steps", 2, "c") or {}) == {"steps": 2}
    else:
        assert found == counts
    assert sorted(facts.subjects("group")) == ["c.0", "g.0"]
    assert facts.value("parameters", 0, "g.0") == {"names": ["generator.weight", "generator.bias"], "others": 0}


def test_a_list_of_optimizers_and_steps_by_hand() -> None:
    model, optimizers = gan()
    with tt.capture(model, optimizer=optimizers, on_error="raise") as tap:
        for _ in range(3):
            played(model, optimizers, "gcc")
            tap.step()
    facts = tap.run.loop()
    assert facts.subjects("optimizer") == ["0", "1"]
    assert facts.value("steps", 3, "1") == {"steps": 2}, "from the second round on, tap.step() alone ends steps"
    assert tap.stats()["steps"] == 4


def test_tap_step_after_a_step_that_has_just_ended() -> None:
    of = Loop("torch")
    with tt.capture(of.model, optimizer=of.optimizer) as tap:
        for _ in range(3):
            of.step()
            tap.step()
    assert tap.run.steps == [0, 1, 2] and tap.stats()["steps"] == 3


def test_optimizers_that_cannot_be_counted(run_path: Path) -> None:
    of = Loop("torch")
    for wrong, message in (([], "is empty"), ([of.optimizer, of.optimizer], "one optimizer twice"), ([3], "not a int")):
        with pytest.raises(UsageError, match=message):
            tt.capture(of.model, run_path, optimizer=wrong)
        assert not run_path.exists()
    with tt.capture(of.model, run_path, optimizer=of.optimizer):  # the corrected call finds its path free
        of.step()
    assert tt.open(run_path).finished


def test_the_counter() -> None:
    steps = StepCounter(["a", "b"])
    assert [steps.stepped(name) for name in "aab"] == [False, False, True]
    steps.clear()
    assert [steps.stepped(name) for name in "ab"] == [False, True]
    assert not steps.called(), "the optimizers have just ended it"
    steps.clear()
    assert [steps.stepped(name) for name in "ab"] == [False, False] and steps.called()


def test_an_optimizer_that_was_there_before_another_is_waited_for_once_it_steps_again() -> None:
    steps = StepCounter(["a"])
    steps.watch(["a", "b"], newest="b")
    ended = []
    for name in "bbaba":
        ended.append(steps.stepped(name))
        if ended[-1]:
            steps.clear()
    assert ended == [True, True, False, True, False]


def test_every_framework_restores_the_optimizer(loop: Loop, run_path: Path) -> None:  # noqa: F811
    before = dict(vars(loop.optimizer))
    with tt.capture(loop.model, run_path, optimizer=loop.optimizer):
        loop.step()
    assert vars(loop.optimizer).keys() == before.keys()
    if loop.name == "torch":
        assert not loop.optimizer._optimizer_step_pre_hooks and not loop.optimizer._optimizer_step_post_hooks
