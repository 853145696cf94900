"""Experts that rounding chose: close or not judged, while a router that is wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import tensortap as tt
from tensortap.core.records import Comparison

EXPERTS, WIDTH, TOKENS, CHOSEN = 8, 16, 1024, 2


class Router(nn.Module):
    """Returns scores, weights and indices of the best experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.bias = torch.zeros(EXPERTS)
        self.best, self.normalises = True, True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = functional.linear(x, self.weight).float()
        chosen = torch.topk(scores + self.bias, CHOSEN, dim=-1, largest=self.best).indices
        weights = scores.softmax(-1).gather(-1, chosen)
        return scores, weights / weights.sum(-1, keepdim=True) if self.normalises else weights, chosen


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.act = nn.ReLU()
        self.factor = 1.0

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            value = self.act(functional.linear(x[token], self.weight[expert])) * weights[token, place, None]
            made = made.index_add(0, token, self.factor * value.to(made.dtype))
        return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate, self.experts, self.last = Router(), Experts(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.norm(x))
        _, weights, chosen = self.gate(x)
        return self.last(self.experts(x, weights, chosen))


def record(
    path: Path, short: bool, keep: str = "tensors", change: Callable[[Block], None] = lambda block: None
) -> Path:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(TOKENS, WIDTH)
    change(model)
    with tt.capture(model, path, keep=keep) as tap:
        with torch.autocast("cpu", torch.bfloat16, enabled=short):
            made = model(x)
        made.float().square().mean().backward()
        tap.step()
    return path


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("references")
    return {keep: record(folder / keep, False, keep) for keep in ("tensors", "summary")}


def statuses(found: Comparison, module: str, kind: str) -> set[str]:
    return {row["status"] for row in found.table.to_pylist() if (row["module"], row["kind"]) == (module, kind)}


def test_tied_experts_are_close(references: dict[str, Path], tmp_path: Path) -> None:
    found = tt.compare(references["tensors"], record(tmp_path / "candidate", True))
    assert found.births == []
    assert found.verdict == "incomparable"  # the gradients depend on the changed tokens
    assert found.sentence.startswith("Cannot tell whether the runs match: ")
    assert any(
        "of 1,024 tokens chose another expert (gate · output 2" in note and "less than rounding" in note
        for note in found.notes
    )
    assert statuses(found, "gate", "output") == {"close"}
    assert statuses(found, "experts", "output") == {"close"}  # without the changed tokens


def test_summaries_leave_tied_experts_open(references: dict[str, Path], tmp_path: Path) -> None:
    found = tt.compare(references["summary"], record(tmp_path / "candidate", True, "summary"))
    assert (found.verdict, found.births) == ("incomparable", [])
    assert any("whether their scores are tied is not known" in note for note in found.notes)
    assert statuses(found, "gate", "output") == {"close", "unjudged"}


def worst_experts(block: Block) -> None:
    block.gate.best = False


def no_normalisation(block: Block) -> None:
    block.gate.normalises = False


def other_bias(block: Block) -> None:
    block.gate.bias = torch.linspace(0, 3, EXPERTS)


@pytest.mark.parametrize("short", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("keep", ["tensors", "summary"])
@pytest.mark.parametrize("mistake", [worst_experts, no_normalisation, other_bias])
def test_a_wrong_router_is_found(
    mistake: Callable[[Block], None], keep: str, short: bool, references: dict[str, Path], tmp_path: Path
) -> None:
    found = tt.compare(references[keep], record(tmp_path / "candidate", short, keep, mistake))
    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.module == "gate"


@pytest.mark.parametrize("short", [False, True], ids=["float32", "bfloat16"])
def test_a_small_bias_is_no_tie(short: bool, references: dict[str, Path], tmp_path: Path) -> None:
    def change(block: Block) -> None:
        block.gate.bias = torch.full((EXPERTS,), 0.0).index_fill(0, torch.tensor([3]), 0.1)

    found = tt.compare(references["tensors"], record(tmp_path / "candidate", short, change=change))
    assert found.first is not None
    assert (found.verdict, found.first.module) == ("diverged", "gate")


def test_few_other_choices_by_equal_scores_are_wrong(tmp_path: Path) -> None:
    """Something else than the scores decides as well, but rounding has nothing to decide where these are equal."""

    def change(block: Block) -> None:
        other_bias(block)
        block.gate.bias[3] += 3e-2

    reference = record(tmp_path / "reference", False, change=other_bias)
    found = tt.compare(reference, record(tmp_path / "candidate", False, change=change))
    assert (found.verdict, found.first and found.first.module) == ("diverged", "gate")
    assert 0 < found.first.difference.mismatched < 1 / 64


@pytest.mark.parametrize("factor", [1.5, 0.8])
def test_wrong_experts_beside_ties_are_found(factor: float, references: dict[str, Path], tmp_path: Path) -> None:
    def change(block: Block) -> None:
        block.experts.factor = factor

    found = tt.compare(references["tensors"], record(tmp_path / "candidate", True, change=change))
    assert found.first is not None
    assert (found.verdict, found.first.module) == ("diverged", "experts")


def test_what_follows_a_tie_is_never_a_match(references: dict[str, Path], tmp_path: Path) -> None:
    def change(block: Block) -> None:
        block.last.weight.data.mul_(1.5)

    for keep in ("tensors", "summary"):
        found = tt.compare(references[keep], record(tmp_path / keep, True, keep, change))
        assert found.verdict in ("diverged", "incomparable")


class Retrieval(nn.Module):
    """Chooses vectors by their scores, and weighs them. The first two keys are the same, their values are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.keys, self.values = nn.Linear(8, 16), nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.act, self.last = nn.Tanh(), nn.Linear(8, 8)
        with torch.no_grad():
            for parameter in (self.gate.weight, self.gate.bias, self.keys.weight):
                parameter[1] = parameter[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).topk(2).indices
        weights = self.act((self.keys(chosen) * x[:, None]).sum(-1))
        return x + 1e-6 * self.last((weights[..., None] * self.values(chosen)).sum(-2))


def test_a_gradient_depends_on_a_choice_that_the_value_hardly_shows(tmp_path: Path) -> None:
    """The weights of two tied vectors are equal, and the gradients of these weights are not."""
    for name, first in (("a", True), ("b", False)):
        model = Retrieval()
        with torch.no_grad():
            model.gate.bias[0] += 2e-7 if first else -2e-7
        with tt.capture(model, tmp_path / name, keep="tensors"):
            model(torch.randn(64, 8, generator=torch.Generator().manual_seed(1))).mean().backward()
    found = tt.compare(tmp_path / "a", tmp_path / "b")
    assert found.first is None, found.sentence
    assert any("tokens chose another expert" in note for note in found.notes), found.notes
