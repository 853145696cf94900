"""Facts beside the numbers: dtypes, attributes and ties that differ, and what a match could not have seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.core.records import Comparison


class Net(nn.Module):
    def __init__(self, kept: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.fc(x).to(self.kept)).float())


def run(path: Path, facts: list[dict[str, Any]] | None = None, kinds: tuple[str, ...] = (), **changes: Any) -> Path:
    """Record a step, then replace the loop facts of the run; by none, if there are none."""
    torch.manual_seed(0)
    model = Net(changes.get("kept", torch.float32))
    model.norm.eps = changes.get("eps", 1e-5)
    if changes.get("tied"):
        model.head.weight = model.fc.weight
    if model.kept is not torch.float32:
        model.norm.to(model.kept)
    with tt.capture(model, path, keep="tensors", kinds=(*("input", "output", "grad_output", "param_grad"), *kinds)):
        model(torch.linspace(-1, 1, 32).view(4, 8)).pow(2).sum().backward()
    if not changes.get("as_recorded"):
        lines = [json.dumps({"step": 0, **fact}) for fact in facts or ()]
        (path / "rank_0" / "loop.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path


def checked(reference: Path, tied: bool) -> Comparison:
    torch.manual_seed(0)
    model = Net()
    model.norm.eps = 0.1
    if tied:
        model.head.weight = model.fc.weight
    with tt.check(model, reference) as check:
        model(torch.linspace(-1, 1, 32).view(4, 8)).pow(2).sum().backward()
    return check.result


def attributes(module: str, **values: Any) -> dict[str, Any]:
    return {"fact": "attributes", "of": module, "value": values}


def ties(**names: str) -> dict[str, Any]:
    return {"fact": "ties", "of": "", "value": {name.replace("_", "."): other for name, other in names.items()}}


def notes(result: Comparison, word: str) -> list[str]:
    return [note for note in result.notes if word in note]


def test_the_sentence_ends_with_the_attribute_of_the_module_it_names(tmp_path: Path) -> None:
    ours = run(tmp_path / "a", [attributes("norm", eps=1e-5), attributes("fc", scale=1.0)])
    theirs = run(tmp_path / "b", [attributes("norm", eps=0.1), attributes("fc", scale=2.0)], eps=0.1)
    result = tt.compare(ours, theirs)
    assert result.first is not None and result.first.module == "norm"
    assert result.sentence.endswith(" Its eps is 0.1 instead of 1e-05.")
    assert notes(result, "attributes") == [
        "other attributes: fc has scale=1.0 in the reference and 2.0 in the candidate"
    ]


def test_other_attributes_are_noted_where_all_numbers_match(tmp_path: Path) -> None:
    ours = run(tmp_path / "a", [attributes(name, eps=1e-5, training=True) for name in ("fc", "norm")])
    theirs = run(tmp_path / "b", [attributes(name, eps=1e-6, training=False) for name in ("fc", "norm")])
    result = tt.compare(ours, theirs)
    assert result.verdict == "match"
    assert notes(result, "attributes") == [
        "other attributes: fc, norm have eps=1e-05 in the reference and 1e-06 in the candidate "
        "(no compared record shows it; buffers were not compared)"
    ]
    assert not notes(tt.compare(ours, ours), "attributes")
    assert not notes(tt.compare(ours, run(tmp_path / "c")), "attributes")  # nothing is known of it


def test_a_tie_of_one_side_alone(tmp_path: Path) -> None:
    tied = run(tmp_path / "a", [ties(head_weight="fc.weight")])
    other_way = run(tmp_path / "b", [ties(fc_weight="head.weight")])
    free = run(tmp_path / "c", [ties()])
    assert notes(tt.compare(tied, free), "tied") == ["head.weight is tied to fc.weight in the reference alone"]
    assert notes(tt.compare(free, tied), "tied") == ["head.weight is tied to fc.weight in the candidate alone"]
    assert not notes(tt.compare(tied, other_way), "tied")
    assert not notes(tt.compare(tied, run(tmp_path / "d")), "tied")


def test_the_sentence_ends_with_the_tie_of_the_module_it_names(tmp_path: Path) -> None:
    free, tied = run(tmp_path / "a", as_recorded=True), run(tmp_path / "b", as_recorded=True, tied=True)
    result = tt.compare(free, tied)
    assert result.first is not None and (result.first.module, result.first.key.kind) == ("head", "output")
    assert " head.weight is tied to fc.weight in the candidate alone." in result.sentence
    assert not notes(result, "tied"), "it is said once"


def test_what_capture_records_is_found(tmp_path: Path) -> None:
    ours = run(tmp_path / "a", as_recorded=True, tied=True)
    result = tt.compare(ours, run(tmp_path / "b", as_recorded=True, eps=0.1))
    assert notes(result, "tied") == ["head.weight is tied to fc.weight in the reference alone"]
    result = tt.compare(ours, run(tmp_path / "c", as_recorded=True, tied=True, eps=0.1))
    assert result.sentence.endswith(" Its eps is 0.1 instead of 1e-05.") and not notes(result, "tied")
    assert notes(checked(ours, tied=False), "tied") == ["head.weight is tied to fc.weight in the reference alone"]
    assert " Its eps is 0.1 instead of 1e-05." in checked(ours, tied=True).sentence


def test_another_dtype_is_noted_where_it_first_is(tmp_path: Path) -> None:
    ours, theirs = run(tmp_path / "a"), run(tmp_path / "b", kept=torch.bfloat16)
    result = tt.compare(ours, theirs)
    (note,) = notes(result, "dtypes")
    first = "norm · input 0 · forward · step 0: float32 in the reference and bfloat16 in the candidate"
    assert note.endswith(f"of {len(result)} pairs have other dtypes, the first is {first}")
    assert not notes(tt.compare(ours, ours), "dtypes")


def test_the_first_wrong_record_says_that_its_dtype_is_another(tmp_path: Path) -> None:
    ours, theirs = run(tmp_path / "a"), run(tmp_path / "b", kept=torch.bfloat16)
    result = tt.compare(ours, theirs, rtol=1e-6)
    assert result.first is not None and result.first.key.kind == "input"
    assert " It is bfloat16 instead of float32." in result.sentence


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((), "Parameters after the step and buffers were not compared: a wrong optimizer or buffer would not show."),
        (("param",), "Buffers were not compared: a wrong buffer would not show."),
        (("buffer",), "Parameters after the step were not compared: a wrong optimizer would not show."),
        (("param", "buffer"), "equal bit for bit."),
    ],
)
def test_a_match_says_what_it_could_not_have_seen(kinds: tuple[str, ...], words: str, tmp_path: Path) -> None:
    path = run(tmp_path / "a", kinds=kinds)
    result = tt.compare(path, path)
    assert result.verdict == "match" and result.sentence.endswith(words)
    forward = tt.compare(path, path, kinds=("input", "output"))
    assert "would not show" not in forward.sentence  # no training is judged


def test_a_match_of_several_steps_says_what_it_could_not_have_seen(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with tt.capture(model, tmp_path / "a") as tap:
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            tap.step()
    result = tt.compare(tmp_path / "a", tmp_path / "a")
    words = " Parameters after the last step were not compared: a wrong last step would not show."
    assert result.verdict == "match" and result.sentence.endswith(words), result.sentence


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (1, "Gradients and parameters after the step were not compared: a wrong backward or optimizer would not show."),
        (2, "Parameters after the last step were not compared: a wrong last step would not show."),
    ],
)
def test_a_match_of_outputs_alone_says_so(steps: int, words: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, tmp_path / "a", kinds=("output",), optimizer=optimizer):
        for _ in range(steps):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    result = tt.compare(tmp_path / "a", tmp_path / "a")
    assert result.verdict == "match" and result.sentence.endswith(words), result.sentence


def test_a_match_of_an_inference_says_nothing_of_training(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with tt.capture(model, tmp_path / "a", kinds=("output",)), torch.no_grad():
        model(torch.ones(3, 4))
    assert tt.compare(tmp_path / "a", tmp_path / "a").sentence.endswith("equal bit for bit.")


def test_the_sentence_says_that_the_module_is_in_another_mode(tmp_path: Path) -> None:
    def trained(path: Path, training: bool) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        model[1].train(training)
        with tt.capture(model, path, keep="tensors"):
            model(torch.linspace(-1, 2, 128).view(16, 8)).square().sum().backward()
        return path

    result = tt.compare(trained(tmp_path / "a", True), trained(tmp_path / "b", False))
    assert result.first is not None and result.first.module == "1"
    assert "It is in evaluation mode, and the reference's in training mode." in result.sentence


class Pooled(nn.Module):
    """A model with a mask, random numbers and, if asked for, a buffer."""

    def __init__(self, pool: nn.Module, buffer: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        self.pool, self.shift, self.head, self.noise = pool, Shift(buffer), nn.Linear(4, 2), noise

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        pooled = self.shift(self.pool(x), mask)
        return self.head(pooled + self.noise * torch.randn(pooled.shape))


class Shift(nn.Module):
    def __init__(self, buffer: float) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("by", torch.tensor(buffer))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return (x if mask is None else x * mask) + getattr(self, "by", 0.0)


def train(path: Path, model: nn.Module | None = None, seed: int = 0, masked: bool = True, evaluated: int = 9) -> Path:
    torch.manual_seed(0)
    model = model or Pooled(nn.MaxPool1d(2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    x, mask = torch.linspace(-1, 1, 48).view(6, 8).sin(), torch.tensor([1.0, 1.0, 0.0, 1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    with tt.capture(model, path, optimizer=optimizer):
        for step in range(3):
            model.train(step < evaluated)
            (model(x, mask) if masked else model(x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_buffers_are_spoken_of_where_there_are_some(tmp_path: Path) -> None:
    result = tt.compare(train(tmp_path / "a"), train(tmp_path / "b"))
    assert result.verdict == "match" and "not compared" not in result.sentence
    result = tt.compare(*(train(tmp_path / f"with {by}", Pooled(nn.MaxPool1d(2), by)) for by in (0.5, 0.6)))
    assert result.first is not None and result.first.module == "shift"
    assert result.sentence.endswith(
        'Its buffers were not recorded, and may differ already: capture kinds=(..., "buffer").'
    )


def test_the_sentence_names_another_class(tmp_path: Path) -> None:
    result = tt.compare(train(tmp_path / "a"), train(tmp_path / "b", Pooled(nn.AvgPool1d(2))))
    assert "Its class is AvgPool1d instead of MaxPool1d." in result.sentence


def test_the_sentence_says_that_the_model_itself_was_not_given_a_mask(tmp_path: Path) -> None:
    result = tt.compare(train(tmp_path / "a"), train(tmp_path / "b", masked=False))
    assert result.first is not None and result.first.module == "shift"
    assert "The model itself was given 1 in the reference alone." in result.sentence


def test_random_numbers_of_a_models_own_code(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(seed), Pooled(nn.MaxPool1d(2), noise=0.1), seed) for seed in (1, 2)]
    result = tt.compare(*runs)
    assert result.first is not None and result.first.cause == "container_code"
    assert result.sentence.endswith("The random state differs before step 0 (torch.cpu).")


def test_a_mode_that_changes_later(tmp_path: Path) -> None:
    runs = []
    for evaluated in (9, 1):
        model = Pooled(nn.Dropout(0.5))
        model.head = nn.Linear(8, 2)
        runs.append(train(tmp_path / str(evaluated), model, masked=False, evaluated=evaluated))
    assert "in evaluation mode, and the reference's in training mode" in tt.compare(*runs).sentence
