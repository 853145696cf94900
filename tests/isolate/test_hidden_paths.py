"""Values that no record holds, such as attributes and own values of a container, make no bystander a finding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt
from tensortap.core.records import Comparison

WIDTH, WORDS = 16, 30
FLOWING = ("input", "output", "grad_input", "grad_output", "param_grad")
KINDS = (*FLOWING, "param", "step_grad", "buffer")
Change = Callable[[Any], None]


class Gate(nn.Module):
    """Passes a score on by an attribute."""

    factor, scale = 1.0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = torch.sigmoid(self.linear(x) * self.scale)
        self.score = share.mean() * self.factor
        return x * share


class Mix(nn.Module):
    uses_context, detaches = True, False

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        context = context.detach() if self.detaches else context
        return self.own(x) + (self.other(context) if self.uses_context else 0)


class Net(nn.Module):
    divisor = 4

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.drop = nn.Embedding(WORDS, WIDTH), Gate(), nn.Dropout(0.1)
        self.first, self.second, self.norm = Mix(), Mix(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        context = x.cumsum(1) / self.divisor  # no module makes it
        y = self.first(self.drop(self.gate(x)), context)
        y = y + self.second(F.gelu(y), context)
        return self.head(self.norm(y) * (1 + self.gate.score))


def build(*changes: Change, of: type[nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Net() if of is None else of()
    for change in changes:
        change(model)
    return model


def train(model: nn.Module, watch: Callable[[nn.Module, Any], Any], seed: int = 1) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, WORDS, (2, 2, 9), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(seed)
    with watch(model, optimizer) as watching:
        for batch in tokens:
            optimizer.zero_grad()
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()
    return watching


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hidden") / "reference"
    train(build(), lambda model, optimizer: tt.capture(model, path, keep="tensors", kinds=KINDS, optimizer=optimizer))
    return path


def check(reference: Path, *changes: Change, seed: int = 1) -> Comparison:
    model = build(*changes)
    result: Comparison = train(
        model, lambda model, optimizer: tt.check(model, reference, optimizer=optimizer), seed
    ).result
    return result


def with_attribute(module: str, name: str, value: Any) -> Change:
    return lambda model: setattr(model.get_submodule(module), name, value)


@pytest.mark.parametrize(("name", "value"), [("factor", 1.2), ("scale", 1.2)])
def test_code_that_reads_the_attribute_of_a_wrong_module_is_not_named(reference: Path, name: str, value: float) -> None:
    result = check(reference, with_attribute("gate", name, value))
    assert {birth.module for birth in result.births} == {"gate"}
    assert any(note.endswith("not compared: tensors of gate") for note in result.notes)


def test_a_right_module_with_attributes_hides_no_mistake_around_it(reference: Path) -> None:
    result = check(reference, with_attribute("", "divisor", 5))
    assert {birth.module for birth in result.births} == {""}


@pytest.mark.parametrize("name", ["uses_context", "detaches"])
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_container_lacks_the_gradient_of_an_input_that_is_no_longer_used(
    reference: Path, place: str, name: str
) -> None:
    result = check(reference, with_attribute(place, name, name == "detaches"))
    assert {birth.module for birth in result.births} == {place}


def test_the_owner_of_a_parameter_that_is_no_longer_tied_is_not_named(reference: Path) -> None:
    def untie(model: Any) -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    result = check(reference, untie)
    assert {birth.module for birth in result.births} == {"head"}
    assert "head.weight is tied to embed.weight in the reference alone" in result.sentence


def test_a_check_says_that_the_random_state_differs(reference: Path) -> None:
    result = check(reference, seed=7)
    assert [birth.module for birth in result.births] == ["drop"]
    assert "The random state differs before step 0" in result.sentence
    same = check(reference)
    assert same.verdict == "match" and not any("random state" in note for note in same.notes)


class Part(nn.Module):
    """Returns an auxiliary loss beside its result."""

    detaches = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        loss = y.float().square().mean()
        return x + F.gelu(y), loss.detach() if self.detaches else loss


class Around(nn.Module):
    """Returns the loss of the part inside as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), Part()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.part(self.norm(x))
        return result


class WithTerms(nn.Module):
    detaches = False

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Around() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, terms = self.embed(tokens), []
        for layer in self.layers:
            x, term = layer(x)
            terms.append(term)
        total = torch.stack(terms).sum()
        return self.head(x), total.detach() if self.detaches else total


def step_with_terms(model: nn.Module, weight: float) -> None:
    tokens = torch.randint(0, WORDS, (4, 9), generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16):
        logits, terms = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss + weight * terms if weight else loss).backward()


_TERMS = [
    ("layers.1.part", with_attribute("layers.1.part", "detaches", True), 1e-3),
    ("", with_attribute("", "detaches", True), 1e-3),
    ("", lambda model: None, 0.0),
]


@pytest.mark.parametrize(("place", "change", "weight"), _TERMS)
@pytest.mark.parametrize("way", ["tensors", "summary", "check"])
def test_a_term_of_the_loss_that_is_detached_is_found_in_bfloat16(
    way: str, place: str, change: Change, weight: float, tmp_path: Path
) -> None:
    """It moves gradients by less than rounding does; only its own gradient shows it."""
    keep, model = "summary" if way == "summary" else "tensors", build(of=WithTerms)
    with tt.capture(model, tmp_path / "reference", keep=keep, kinds=FLOWING):
        step_with_terms(model, 1e-3)
    model = build(change, of=WithTerms)
    if way == "check":
        with tt.check(model, tmp_path / "reference") as watching:
            step_with_terms(model, weight)
        result = watching.result
    else:
        with tt.capture(model, tmp_path / "candidate", keep=keep, kinds=FLOWING):
            step_with_terms(model, weight)
        result = tt.compare(tmp_path / "reference", tmp_path / "candidate")
    assert result.verdict == "diverged" and {birth.module for birth in result.births} == {place}
    assert "never comes" in result.sentence


def test_a_whole_loss_may_be_computed_from_other_outputs(tmp_path: Path) -> None:
    """A gradient of 1 / n is that of a mean over micro batches, not of a term."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(x)
            return logits, F.cross_entropy(logits, y)

    x, y = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(8)
    for name in ("inside", "outside"):
        torch.manual_seed(0)
        model = WithLoss()
        with tt.capture(model, tmp_path / name, keep="tensors", kinds=FLOWING):
            logits, loss = model(x, y)
            ((loss if name == "inside" else F.cross_entropy(logits, y)) / 2).backward()
    assert tt.compare(tmp_path / "inside", tmp_path / "outside").verdict == "match"
