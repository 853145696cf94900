"""A loss of two terms may go back term by term, or at once: only the sum of its gradients is comparable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt
from tensortap.core.records import Key
from tensortap.isolate import backwards
from tensortap.isolate.backwards import FirstParts, PartialGradient
from tensortap.isolate.reference import Counterpart

KINDS = ("input", "output", "grad_input", "grad_output", "param", "param_grad", "step_grad")
_ISOLATED = pytest.mark.parametrize("isolate", [True, False], ids=["isolated", "free"])


class TwoHeads(nn.Module):
    """The scale belongs to both heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU())
        self.one, self.other = nn.Linear(32, 4), nn.Linear(32, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.one(hidden) * self.scale, self.other(hidden) * self.scale


def build() -> tuple[TwoHeads, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TwoHeads()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: TwoHeads, optimizer: torch.optim.Optimizer, terms: int, mistake: str = "") -> None:
    for seed in range(2):
        optimizer.zero_grad()
        one, other = model(torch.randn(24, 16, generator=torch.Generator().manual_seed(seed)))
        losses = [F.cross_entropy(one, torch.arange(24) % 4), other.square().mean()]
        if mistake == "weight":
            losses[1] = losses[1] * 0.5
        if terms == 1:
            (losses[0] + losses[1]).backward()
        else:
            losses[0].backward(retain_graph=True)
            if mistake != "missing":
                losses[1].backward()
        optimizer.step()


def checked(path: Path, terms: tuple[int, int], mistake: str = "", wrong: str = "", **options: Any) -> Any:
    model, optimizer = build()
    with tt.capture(model, path, keep="tensors", kinds=KINDS, optimizer=optimizer):
        train(model, optimizer, terms[0])
    model, optimizer = build()
    if wrong:
        model.get_submodule(wrong).register_full_backward_hook(lambda module, sent, got: (sent[0] * 0.9,))
    with tt.check(model, path, optimizer=optimizer, **options) as check:
        train(model, optimizer, terms[1], mistake)
    return check.result


@_ISOLATED
@pytest.mark.parametrize("terms", [(1, 2), (2, 1), (2, 2)])
def test_backwards_of_single_terms_match_one_of_their_sum(
    tmp_path: Path, isolate: bool, terms: tuple[int, int]
) -> None:
    result = checked(tmp_path / "run", terms, isolate=isolate)
    assert result.verdict == "match", result.sentence


@_ISOLATED
@pytest.mark.parametrize("terms", [(1, 2), (2, 1)])
def test_a_term_with_another_weight_is_found(tmp_path: Path, isolate: bool, terms: tuple[int, int]) -> None:
    result = checked(tmp_path / "run", terms, "weight", isolate=isolate)
    assert result.verdict == "diverged", result.sentence


@_ISOLATED
def test_a_term_that_does_not_go_back_is_found(tmp_path: Path, isolate: bool) -> None:
    result = checked(tmp_path / "run", (1, 2), "missing", isolate=isolate)
    assert result.verdict == "diverged", result.sentence


@pytest.mark.parametrize(("terms", "named"), [((1, 2), "body.1"), ((2, 1), "body")])
def test_a_wrong_backward_is_named_beside_other_backwards(tmp_path: Path, terms: tuple[int, int], named: str) -> None:
    """What a module sends is recorded once, in the first of two backwards: the code around may be wrong, too."""
    result = checked(tmp_path / "run", terms, wrong="body.1")
    assert result.first is not None and result.first.module == named, result.sentence
    assert {birth.module for birth in result.births} == {named}, result.sentence


def test_only_so_many_first_parts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backwards, "_MOST_BYTES", 40)
    parts, values = FirstParts(), torch.ones(8).numpy()
    found = Counterpart(0, "Linear", "float32", (8,), 0, 0, 1.0, None)
    keys = [Key(0, 0, "backward", name, 0, "grad_output", "0") for name in ("a", "b")]
    for row, key in enumerate(keys):
        parts.keep(PartialGradient(key, row, found, values))
    later, recorded = [key._replace(path="0~2") for key in keys], lambda found: 3 * values
    total = parts.add(later[0], values, recorded)
    assert total is not None and total.values is not None
    assert total.values.tolist() == [2.0] * 8 and values.tolist() == [1.0] * 8
    lost = parts.add(later[1], values, recorded)
    assert lost is not None and lost.values is None and lost.is_lost
    equal = Key(0, 0, "backward", "c", 0, "grad_output", "0")
    parts.keep(PartialGradient(equal, 2, found, None))
    total = parts.add(equal._replace(path="0~2"), values, recorded)
    assert total is not None and total.values is not None and total.values.tolist() == [4.0] * 8
    assert parts.add(equal._replace(module="d", path="0~2"), values, recorded) is None
    assert all(map(parts.was_added, later))


def test_parts_that_are_too_many_to_keep_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backwards, "_MOST_BYTES", 600)
    result = checked(tmp_path / "run", (1, 2), isolate=False)
    assert result.verdict != "diverged", result.sentence
    assert any(row["status"] == "unjudged" for row in result.table.to_pylist())


@_ISOLATED
@pytest.mark.parametrize("terms", [(1, "twice"), (2, "missing")])
def test_a_backward_that_runs_twice_or_not_at_all(tmp_path: Path, isolate: bool, terms: tuple[int, str]) -> None:
    """Without an optimizer, only the gradients show it."""

    def run(model: TwoHeads, times: int | str) -> None:
        one, other = model(torch.randn(24, 16, generator=torch.Generator().manual_seed(0)))
        losses = [F.cross_entropy(one, torch.arange(24) % 4), other.square().mean()]
        if times == 1:
            losses[0].backward()
            return
        losses[0].backward(retain_graph=True)
        if times == 2:
            losses[1].backward()
        elif times == "twice":
            losses[0].backward()

    kinds = KINDS[:-1]
    model = build()[0]
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=kinds):
        run(model, terms[0])
    model = build()[0]
    with tt.check(model, tmp_path / "run", isolate=isolate) as check:
        run(model, terms[1])
    assert check.result.verdict == "diverged", check.result.sentence


@_ISOLATED
def test_a_gradient_of_one_backward_that_is_not_finite_is_judged(tmp_path: Path, isolate: bool) -> None:
    model, optimizer = build()
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=KINDS, optimizer=optimizer):
        train(model, optimizer, 2)
    model, optimizer = build()
    model.body[1].register_full_backward_hook(lambda module, sent, got: (sent[0] * float("nan"),))
    with tt.check(model, tmp_path / "run", optimizer=optimizer, isolate=isolate) as check:
        train(model, optimizer, 1)
    assert check.result.verdict == "diverged", check.result.sentence
