"""Evaluation between training steps: the saving hook neither counts nor saves it, unless there is no training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap
from support.saving import CLASSES, SavingKit, kit_of, micro_steps, saved
from tensortap.compat import saving_hook
from tensortap.compat.saving_hook import register_saving_hook, remove_saving_hook


@pytest.fixture(params=["torch", "paddle"])
def kit(request: pytest.FixtureRequest) -> SavingKit:
    return kit_of(request.param)


def registered(kit: SavingKit, path: Path, *limits: int) -> Any:
    return register_saving_hook(kit.net(), path, CLASSES, *(limits or (-1, -1)))


def contents(path: Path) -> dict[tuple[str, str], bytes]:
    """All tensors, under names that do not depend on how many layers a paddle process has made before."""
    found = {}
    for record in tensortap.open(path):
        found[str(record.key), record.cls] = tensortap.open(path).load(record).tobytes()
    return found


def test_evaluation_between_steps_changes_nothing_of_what_is_saved(kit: SavingKit, tmp_path: Path) -> None:
    plain, mixed = registered(kit, tmp_path / "plain"), registered(kit, tmp_path / "mixed")
    for step in range(3):
        kit.train(plain, first=step)
        kit.train(mixed, first=step)
        kit.evaluate(mixed, 4)
    assert micro_steps(tmp_path / "mixed") == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [name.number for name in saved(tmp_path / "mixed")] == list(range(9))
    assert contents(tmp_path / "mixed") == contents(tmp_path / "plain")
    assert not (tmp_path / "mixed" / "evaluation").exists()


def test_evaluation_does_not_count_towards_limits(kit: SavingKit, tmp_path: Path) -> None:
    model = registered(kit, tmp_path / "t", 6, 4)
    kit.train(model)
    kit.evaluate(model, 20)
    kit.train(model)
    assert micro_steps(tmp_path / "t") == [0, 0, 0, 1, 1, 1]
    assert micro_steps(tmp_path / "t", "grads") == [0, 0, 1, 1]


@pytest.mark.parametrize("how", ["no gradients", "evaluation mode"])
def test_no_grad_and_eval_mode_each_make_a_forward_evaluation(kit: SavingKit, tmp_path: Path, how: str) -> None:
    model = registered(kit, tmp_path / "t")
    kit.train(model)
    if how == "no gradients":
        with kit.no_grad():
            model(kit.batch(7))
    else:
        model.eval()
        model(kit.batch(7))
    kit.train(model, first=1)
    assert micro_steps(tmp_path / "t") == [0, 0, 0, 1, 1, 1]


def test_inference_mode_is_evaluation(tmp_path: Path) -> None:
    import torch

    kit = kit_of("torch")
    model = registered(kit, tmp_path / "t")
    kit.train(model)
    with torch.inference_mode():
        model(kit.batch(7))
    kit.train(model, first=1)
    assert micro_steps(tmp_path / "t") == [0, 0, 0, 1, 1, 1]


def test_gradients_that_come_after_an_evaluation_belong_to_the_training_forward(kit: SavingKit, tmp_path: Path) -> None:
    """As where a second, detached forward makes the target of the loss."""
    model = registered(kit, tmp_path / "t")
    out = model(kit.batch())
    with kit.no_grad():
        target = model(kit.batch(1))
    (out - target).square().mean().backward()
    assert micro_steps(tmp_path / "t") == [0, 0, 0]
    assert micro_steps(tmp_path / "t", "grads") == [0, 0]


def test_submodules_called_directly_in_evaluation_are_not_saved(kit: SavingKit, tmp_path: Path) -> None:
    model = registered(kit, tmp_path / "t")
    kit.train(model)
    with kit.no_grad():
        model.fc1(kit.batch(3))
    model.fc1(kit.batch(4))  # and this is training
    assert [name.number for name in saved(tmp_path / "t")] == [0, 1, 2, 3]


def test_a_process_that_never_trains_saves_its_forwards(kit: SavingKit, tmp_path: Path) -> None:
    model = registered(kit, tmp_path / "t", 5, 5)
    kit.evaluate(model, 3)
    assert micro_steps(tmp_path / "t") == [0, 0, 0, 1, 1]
    assert not (tmp_path / "t" / "evaluation").exists()


def test_training_in_evaluation_mode_is_training_if_there_is_no_other(kit: SavingKit, tmp_path: Path) -> None:
    """Without dropout, as people compare two frameworks. Then a forward without gradients is the evaluation."""
    model = registered(kit, tmp_path / "t")
    model.eval()
    for step in range(2):
        kit.float32(model(kit.batch(step))).square().mean().backward()
        with kit.no_grad():
            model(kit.batch(9))
    assert micro_steps(tmp_path / "t") == [0, 0, 0, 1, 1, 1]
    assert micro_steps(tmp_path / "t", "grads") == [0, 0, 1, 1]


def test_evaluation_before_training_is_set_aside(
    kit: SavingKit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some trainers run a few batches of validation first, to see whether it works."""
    plain, checked = registered(kit, tmp_path / "plain", 6, 4), registered(kit, tmp_path / "checked", 6, 4)
    with caplog.at_level(logging.WARNING):
        kit.evaluate(checked, 5)  # more than the limits allow
        kit.train(checked, 3)
    kit.train(plain, 3)
    assert "the 6 files that evaluation has saved are now in" in caplog.text
    assert contents(tmp_path / "checked") == contents(tmp_path / "plain")
    aside = tensortap.open(tmp_path / "checked" / "evaluation")
    assert [record.key.module for record in aside] == ["fc1", "norm", "fc2"] * 2
    before = kit.net()
    np.testing.assert_array_equal(aside.load(next(iter(aside))), before.fc1(kit.batch(100)).detach().numpy())


def test_a_second_evaluation_is_not_set_aside_again(kit: SavingKit, tmp_path: Path) -> None:
    model = registered(kit, tmp_path / "t")
    kit.evaluate(model)
    kit.train(model)
    kit.evaluate(model)
    kit.train(model, first=1)
    assert micro_steps(tmp_path / "t") == [0, 0, 0, 1, 1, 1]
    assert len(saved(tmp_path / "t" / "evaluation")) == 3


def test_a_checkpointed_model_is_in_training_although_its_first_forward_has_no_gradients(
    kit: SavingKit, tmp_path: Path
) -> None:
    model = registered(kit, tmp_path / "t")
    for step in range(2):
        kit.float32(kit.checkpoint(model, kit.batch(step))).square().mean().backward()
        kit.evaluate(model)
        model.train()
    assert micro_steps(tmp_path / "t") == [0, 0, 0, 1, 1, 1]
    assert micro_steps(tmp_path / "t", "grads") == [0, 0, 1, 1]


def test_evaluation_of_a_model_that_is_never_called_itself(kit: SavingKit, tmp_path: Path) -> None:
    model = registered(kit, tmp_path / "t")
    for step in range(2):
        kit.float32(model.forward(kit.batch(step))).square().mean().backward()
        with kit.no_grad():
            model.forward(kit.batch(9))
            model.forward(kit.batch(9))
    assert micro_steps(tmp_path / "t") == [0, 0, 0, 1, 1, 1]
    assert micro_steps(tmp_path / "t", "grads") == [0, 0, 1, 1]


@pytest.mark.parametrize("by_parts", [False, True])
def test_a_long_evaluation_takes_no_memory(tmp_path: Path, by_parts: bool) -> None:
    kit = kit_of("torch")
    model = registered(kit, tmp_path / "t", 2, 2)
    (hook,) = [h for h in saving_hook._live_hooks if h.watches(model)]
    forward = model.forward if by_parts else model
    forward(kit.batch()).sum().backward()
    with kit.no_grad():
        for _ in range(10):
            forward(kit.batch())
    assert sum(map(len, hook._clock._past.values())) <= 4
    assert hook._files._written is None
    remove_saving_hook(model)
