"""Differences between two training loops: settings of optimizers, random states, what the optimizer got."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.compare.align.loop import LoopDifferences
from tensortap.core.causes import Cause
from tensortap.core.records import Comparison
from tensortap.store.loop import LoopFact, LoopFacts

Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Return a function that records a training of three steps with AdamW, with the given changes."""

    def record(
        steps: int = 3,
        lr: Callable[[int], float] = lambda step: 0.1,
        decayed: tuple[str, ...] = ("weight", "bias"),
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        seed: int = 0,
        drop: float = 0.0,
        clip: float = 0.0,
        cleared: bool = True,
        kinds: tuple[str, ...] | None = None,
        keep: str = "summary",
        nudged: float = 0.0,
        **settings: Any,
    ) -> Path:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(drop), nn.Tanh(), nn.Linear(8, 3))
            data = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(steps)]
            torch.manual_seed(seed)
            decay = settings.pop("weight_decay", 0.1)
            groups = [
                {"params": parameter, "weight_decay": decay * name.endswith(decayed)}
                for name, parameter in model.named_parameters()
            ]
            stepper = optimizer(groups, **settings)  # type: ignore[arg-type]
            with tt.capture(model, path, optimizer=stepper, kinds=kinds, keep=keep):
                for step, (x, target) in enumerate(data):
                    for group in stepper.param_groups:
                        group["lr"] = lr(step)
                    if cleared:
                        stepper.zero_grad()
                    (nn.functional.mse_loss(model(x), target) * (1 + nudged)).backward()
                    if clip:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    stepper.step()
        return path

    return record


def loop_end(result: Comparison) -> str:
    return result.sentence.rpartition(" The loops differ: ")[2]


def test_the_sentence_on_a_wrong_update_ends_with_the_setting(train: Train) -> None:
    reference = train()
    result = tt.compare(reference, train(lr=lambda step: 0.1 if step < 1 else 0.099))
    assert result.first is not None and result.first.cause is Cause.OPTIMIZER and result.first.key.step == 1
    assert loop_end(result) == "lr is 0.1 in the reference and 0.099 in the candidate from step 1."
    result = tt.compare(reference, train(betas=(0.9, 0.99)))
    assert loop_end(result) == "beta2 is 0.999 in the reference and 0.99 in the candidate from step 0."
    result = tt.compare(reference, train(optimizer=torch.optim.SGD))
    assert loop_end(result) == "the optimizer is AdamW in the reference and SGD in the candidate."
    assert not [note for note in result.notes if "optimizer" in note]  # the sentence has it


def test_settings_are_said_where_parameters_were_not_recorded(train: Train) -> None:
    kinds = ("input", "output", "grad_output", "param_grad")
    setting = "lr is 0.1 in the reference and 0.09 in the candidate from step 0."
    result = tt.compare(train(kinds=kinds), train(kinds=kinds, lr=lambda step: 0.09))
    assert result.first is not None and result.first.key.step == 1
    assert f" The loops differ: {setting} Its parameters were not recorded" in result.sentence
    assert not [note for note in result.notes if note in setting]


def test_weight_decay_of_other_parameters(train: Train) -> None:
    some, every = train(decayed=("weight",)), train()
    of = "2 parameters that it"
    end = loop_end(tt.compare(some, every))
    assert end == f"weight decay applies to {of} does not apply to in the reference (0.bias, 3.bias)."
    end = loop_end(tt.compare(every, some))
    assert end == f"weight decay does not apply to {of} applies to in the reference (0.bias, 3.bias)."
    end = loop_end(tt.compare(every, train(weight_decay=0.05)))
    assert end == "weight decay is 0.1 in the reference and 0.05 in the candidate from step 0."


def test_settings_below_rounding_are_notes(train: Train) -> None:
    reference = train(weight_decay=0.0)
    result = tt.compare(reference, train(weight_decay=1e-10))
    assert result.verdict == "match"
    assert result.notes == ["weight decay is 0.0 in the reference and 1e-10 in the candidate from step 0"]
    same = train(weight_decay=0.0, lr=lambda step: 0.3 / 3, fused=True)  # the last bit, and another kernel
    assert not tt.compare(reference, same).notes


def test_random_states_that_differ(train: Train) -> None:
    result = tt.compare(train(), train(seed=1))
    assert result.verdict == "match" and result.notes == ["random state differs before step 0 (torch.cpu)"]
    reference, candidate = train(drop=0.3), train(drop=0.3, seed=1)
    result = tt.compare(reference, candidate)
    assert result.first is not None and result.first.cls == "Dropout"
    assert result.sentence.endswith(" The random state differs before step 0 (torch.cpu).")
    assert not [note for note in result.notes if "random" in note]
    assert not tt.compare(reference, train(drop=0.3)).notes


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_clipping_on_one_side_is_between_backward_and_optimizer(train: Train, keep: str) -> None:
    free, clipped = train(keep=keep), train(clip=0.1, keep=keep)
    for reference, candidate in ((free, clipped), (clipped, free)):
        result = tt.compare(reference, candidate)
        assert result.first is not None and result.first.cause is Cause.STEP_GRADIENT
        assert result.first.key.kind == "step_grad" and result.first.key.step == 0
        assert "while the gradient from backward matches: check accumulation, clipping" in result.sentence
        assert "not cleared" not in result.sentence
    alike = tt.compare(clipped, train(clip=0.1, keep=keep))
    assert alike.verdict == "match" and alike.counts == {"equal": len(alike)}
    assert tt.compare(free, train(clip=1e6, keep=keep)).verdict == "match"  # it never clips


def test_gradients_that_were_not_cleared(train: Train) -> None:
    result = tt.compare(train(), train(cleared=False))
    assert result.first is not None and result.first.cause is Cause.STEP_GRADIENT and result.first.key.step == 1
    end = "The candidate's gradients were not cleared: what its optimizer got sums those of steps 0 to 1."
    assert result.sentence.endswith(end)
    result = tt.compare(train(cleared=False), train())
    assert result.sentence.endswith(end.replace("candidate", "reference"))
    assert tt.compare(train(cleared=False), train(cleared=False)).verdict == "match"


def test_the_tolerance_of_an_update_follows_the_gradients_elements(train: Train) -> None:
    """Gradients that differ by rounding do not excuse biases without weight decay."""
    settings: dict[str, Any] = {"keep": "tensors", "steps": 1, "lr": lambda step: 1e-3, "weight_decay": 0.05}
    reference = train(**settings)
    assert tt.compare(reference, train(**settings, nudged=1e-6)).verdict == "match"
    result = tt.compare(reference, train(**settings, nudged=1e-6, decayed=("weight",)))
    assert result.first is not None and result.first.cause is Cause.OPTIMIZER
    assert result.first.key.path == "bias" and 1e-5 < result.first.rel_l2 < 1e-4
    assert result.first.tolerance < result.first.rel_l2


def facts(*values: tuple[int, str, str, dict[str, Any]]) -> LoopFacts:
    found = LoopFacts()
    for step, fact, of, value in values:
        found.add(LoopFact(step, fact, of, value))
    return found


def test_scalers_skipped_steps_and_later_random_states() -> None:
    random = (0, "random", "torch.cpu", {"digest": "a"})
    common = ((0, "optimizer", "0", {"class": "Adam"}), random)
    ours = facts(*common, (0, "skipped", "0", {"skipped": False}))
    theirs = facts(
        *common,
        (0, "scaler", "0", {"scale": 1024.0}),
        (0, "skipped", "0", {"skipped": False}),
        (2, "skipped", "0", {"skipped": True}),
        (2, "random", "torch.cpu", {"digest": "b"}),
    )
    loop = LoopDifferences(ours, theirs, {step: step for step in range(4)})
    assert [each.words for each in loop.optimizer] == [
        "the gradient scaler's scale is 1, without a scaler, in the reference and 1024.0 in the candidate from step 0",
        "the candidate alone skipped the update of step 2 and 1 more",
    ]
    assert loop.random == {"torch.cpu": 2}


def test_groups_are_joined_by_their_parameters() -> None:
    def group(of: str, names: list[str], **settings: Any) -> list[tuple[int, str, str, dict[str, Any]]]:
        return [(0, "group", of, settings), (0, "parameters", of, {"names": names, "others": 0})]

    ours = facts(*group("0.0", ["a", "b"], lr=1.0), *group("0.1", ["c", "d"], lr=2.0))
    theirs = facts(*group("x.0", ["c"], lr=2.0), *group("x.1", ["b", "a"], lr=1.0), *group("y.0", ["e"], lr=3.0))
    loop = LoopDifferences(ours, theirs, {0: 0})
    assert [each.words for each in loop.optimizer] == [
        "the optimizer of the candidate does not hold 1 parameter that the reference's holds (d)",
        "the optimizer of the reference does not hold 1 parameter that the candidate's holds (e)",
    ]
    theirs = facts(*group("0.0", ["a", "b", "c", "d"], lr=1.0))
    (difference,) = LoopDifferences(ours, theirs, {3: 4}).optimizer
    assert difference.words == "lr is 2.0 in the reference and 1.0 in the candidate in step 3, for c, d"
    assert difference.concerns("c") and not difference.concerns("a")


def test_noise_of_gradients_does_not_excuse_another_setting(train: Train) -> None:
    # With such noise, an update may be off by as much as another beta makes it.
    reference = train()
    assert tt.compare(reference, train(nudged=1e-6)).verdict == "match"
    result = tt.compare(reference, train(nudged=1e-6, betas=(0.9, 0.9985)))
    assert result.first is not None and result.first.cause is Cause.OPTIMIZER
    assert loop_end(result).startswith("beta2 is 0.999 in the reference and 0.9985 in the candidate")


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.body = nn.Embedding(9, 4), nn.Embedding(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens) + self.place(torch.arange(5))))


@pytest.fixture
def train_tied(tmp_path: Path) -> Train:
    """Return a function that records a step of a model with tied weights, after the given change."""

    def record(change: Callable[[_Tied], Any] = lambda model: None, early: bool = False) -> Path:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        torch.manual_seed(0)
        model = _Tied()
        change(model)
        adam = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        with tt.capture(model, path, optimizer=adam):
            model(torch.arange(10).view(2, 5) % 9).square().sum().backward()
            if early:
                adam.zero_grad()
            adam.step()
        return path

    return record


def test_the_sentence_says_that_a_parameter_is_frozen(train_tied: Train) -> None:
    reference = train_tied()
    result = tt.compare(reference, train_tied(lambda model: model.body.bias.requires_grad_(False)))
    assert loop_end(result) == "the candidate freezes 1 parameter that the reference trains (body.bias)."
    assert not [note for note in result.notes if "does not hold" in note]
    # Nothing that made its output requires a gradient: the code around it cuts nothing off.
    result = tt.compare(reference, train_tied(lambda model: model.place.weight.requires_grad_(False)))
    assert result.first is not None and result.first.module == "place" and "cuts it off" not in result.sentence
    assert loop_end(result) == "the candidate freezes 1 parameter that the reference trains (place.weight)."


def test_a_container_of_frozen_parts_cuts_nothing_off(tmp_path: Path) -> None:
    for name in ("trained", "frozen"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3), nn.Linear(3, 2))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with tt.capture(model, tmp_path / name, optimizer=sgd):
            for step in range(2):
                model[0].requires_grad_(name == "trained" or step == 0)
                sgd.zero_grad()
                model(torch.ones(4, 3)).square().sum().backward()
                sgd.step()
    result = tt.compare(tmp_path / "trained", tmp_path / "frozen")
    assert result.first is not None and result.first.key.step == 1 and "cuts it off" not in result.sentence
    assert loop_end(result) == "the candidate freezes 2 parameters that the reference trains (0.0.weight, 0.0.bias)."


def test_the_sentence_says_that_a_parameter_is_tied_on_one_side(train_tied: Train) -> None:
    def untie(model: _Tied) -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    result = tt.compare(train_tied(), train_tied(untie))
    assert result.sentence.endswith("head.weight is tied to embed.weight in the reference alone.")
    assert not [note for note in result.notes if "tied" in note]


def test_the_sentence_says_that_the_optimizer_got_no_gradients(train_tied: Train) -> None:
    result = tt.compare(train_tied(), train_tied(early=True))
    assert result.first is not None and result.first.cause is Cause.OPTIMIZER
    assert "the candidate's optimizer got no gradient for 4 parameters in step 0, and the reference's did" in loop_end(
        result
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({"clip": 0.5}, {}, "The reference's is 0.5 times the gradient from backward, with a norm of 0.5"),
        (
            {"clip": 0.5},
            {"clip": 0.25},
            "the candidate's is 0.25 times the gradient from backward, with a norm of 0.25",
        ),
        ({"micros": 2}, {"micros": 2, "last_alone": True}, "got is the gradient of its last micro batch alone."),
        (
            {},
            {"zeroed": True},
            "What the candidate's optimizer got is zero: its gradients were cleared before its step.",
        ),
        (
            {"clip": 0.5},
            {"clip": 0.5, "cleared": False},
            "were not cleared: what its optimizer got sums those of steps 0 to 1.",
        ),
        ({"micros": 2}, {"micros": 2, "scale": 2.0}, "It is 2 times the reference's, and the step has 2 micro batches"),
        ({}, {"scale": 3.0}, "check the loss and its scaling. It is 3 times the reference's."),
        ({}, {"scale": 1.0005}, "check the loss and its scaling. It is 1.0005 times the reference's."),
    ],
)
def test_the_sentence_says_by_what_gradients_are_scaled(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], words: str
) -> None:
    result = tt.compare(_scaled(tmp_path / "a", **ours), _scaled(tmp_path / "b", **theirs))
    assert words in result.sentence


def _scaled(
    path: Path,
    clip: float = 0.0,
    micros: int = 1,
    last_alone: bool = False,
    zeroed: bool = False,
    cleared: bool = True,
    scale: float = 1.0,
) -> Path:
    """Record two steps; the gradient of each micro batch has the norm 1 over their number if nothing changes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, path, optimizer=sgd):
        for x in torch.randn(2, micros, 5, 3):
            for part in x:
                if last_alone:
                    sgd.zero_grad()
                (model(part).sum() * scale / part.sum(0).norm() / micros).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if zeroed:
                sgd.zero_grad(set_to_none=False)
            sgd.step()
            if cleared:
                sgd.zero_grad()
    return path
