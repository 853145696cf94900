"""Verdicts on incomplete runs: kinds that were not recorded, records of one side only, modules never called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from made_runs import Seen, values, write
from torch import nn

import tensortap as tt
from tensortap.report.html import comparison as comparison_html

DEFAULT = ("input", "output", "grad_output", "param_grad")
ALL = (*DEFAULT, "grad_input", "param", "buffer")


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.act = nn.Tanh()
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        return self.head(self.act(y + self.attention(y, y, y, need_weights=False)[0]))


def trained(path: Path, model: nn.Module, steps: int = 1, betas: tuple[float, float] = (0.9, 0.999)) -> Path:
    """Train with a tap that does not record parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=betas)
    kinds = ("input", "output", "grad_output", "param_grad")
    with tt.capture(model, path, keep="tensors", optimizer=optimizer, kinds=kinds):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
    return path


def attending() -> Attending:
    torch.manual_seed(0)
    return Attending()


def test_a_module_that_only_keeps_weights_is_not_to_blame(tmp_path: Path) -> None:
    wrong = attending()
    wrong.act.register_forward_hook(lambda module, args, output: output * 1.001)
    result = tt.compare(trained(tmp_path / "a", attending()), trained(tmp_path / "b", wrong))
    assert {birth.module for birth in result.births} == {"act"}


class TwoOutputs(nn.Module):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.stem, self.bridge, self.head = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.recurrent = nn.GRU(6, 6, batch_first=True)
        self._cut = cut

    def forward(self, x: torch.Tensor) -> Any:
        outputs, last = self.recurrent(self.stem(x))
        return self.head(outputs.mean(1) + self.bridge(last[0].detach() if self._cut else last[0]))


@pytest.mark.parametrize("more", [(), ("grad_input",)])
def test_one_of_two_gradients_never_comes(tmp_path: Path, more: tuple[str, ...]) -> None:
    kinds = ("input", "output", "grad_output", "param_grad", *more)
    for name, cut in (("a", False), ("b", True)):
        torch.manual_seed(0)
        model = TwoOutputs(cut)
        with tt.capture(model, tmp_path / name, keep="tensors", kinds=kinds):
            model(torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert [birth.status for birth in result.births] == ["missing"]
    lost = "bridge's input 0" if more else "recurrent's output 1"
    assert f"the gradient of {lost} never comes, though the reference has it" in result.sentence
    assert "the own code of (root) cuts it off" in result.sentence
    torch.manual_seed(0)
    model = TwoOutputs(cut=True)
    with tt.check(model, tmp_path / "a") as check:
        model(torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    assert "recurrent" not in {birth.module for birth in check.result.births}


def test_where_inputs_were_not_recorded_only_the_first_is_born(tmp_path: Path) -> None:
    for name in "ab":
        model = attending()
        if name == "b":
            model.act.register_forward_hook(lambda module, args, output: output * 1.001)
        with tt.capture(model, tmp_path / name, kinds="output") as tap:
            for step in range(2):
                model(torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(step)))
                tap.step()
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert [(birth.module, birth.key.step) for birth in result.births] == [("act", 0)]
    assert "and its inputs were not recorded" in result.sentence


def test_an_optimizer_is_not_cleared_by_unrecorded_parameters(tmp_path: Path) -> None:
    result = tt.compare(
        trained(tmp_path / "a", attending(), steps=4), trained(tmp_path / "b", attending(), steps=4, betas=(0.9, 0.99))
    )
    assert result.verdict == "incomparable"
    assert result.sentence.startswith("Cannot tell whether the runs match: from step 2 on, ")
    assert 'were not recorded. Capture with kinds=(..., "param"). The loops differ: beta2 is 0.999' in result.sentence
    assert "The runs match" not in result.sentence
    quite_other = trained(tmp_path / "c", attending(), steps=4, betas=(0.5, 0.9))
    result = tt.compare(tmp_path / "a", quite_other)
    assert result.first is not None and result.first.key.step > 0
    assert "Its parameters were not recorded, so the optimizer may be wrong instead" in result.sentence


def test_noise_of_an_optimizer_is_a_match_if_parameters_were_recorded(tmp_path: Path) -> None:
    for name in "ab":
        model = attending()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with tt.capture(model, tmp_path / name, optimizer=optimizer):
            for step in range(4):
                optimizer.zero_grad()
                model(torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                for parameter in model.parameters():
                    if name == "b" and parameter.grad is not None:  # another order of sums
                        parameter.grad *= 1 + 2**-22
                optimizer.step()
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "match", result.sentence


def test_missing_steps_are_reported_if_the_rest_matches(tmp_path: Path) -> None:
    for name, steps in (("a", (1, 1, 1)), ("b", (1, 2))):
        model = attending()
        with tt.capture(model, tmp_path / name) as tap:
            for times in steps:
                for _ in range(times):
                    model(torch.ones(4, 5, 8))
                tap.step()
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "match" and result.sentence.startswith("Everything that both runs have matches: all ")
    said = " The reference alone has step 2, and in step 1 it ran 1 time and the candidate 2 times."
    assert result.sentence.endswith(said)
    assert tt.compare(tmp_path / "a", tmp_path / "a").sentence.startswith("The runs match: ")
    assert tt.compare(tmp_path / "a", tmp_path / "b", steps={2: 0}).sentence.startswith("The runs match: ")


# --- gradients of one side alone --------------------------------------------------------------------------------------
class TwoNetworks(nn.Module):
    """One network learns to predict the other's output; the other must not learn."""

    def __init__(self, stop: bool = True) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
        self.target = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
        self._stop = stop

    def forward(self, x: torch.Tensor) -> Any:
        wanted = self.target(x).detach() if self._stop else self.target(x)
        return (F.normalize(self.online(x), dim=-1) - F.normalize(wanted, dim=-1)).square()


def ran(
    path: Path,
    model: nn.Module,
    kinds: tuple[str, ...] = DEFAULT,
    micros: int = 1,
    steps: int = 2,
    rate: float = 1e-2,
    after: Callable[[], None] = lambda: None,
) -> Path:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    with tt.capture(model, path, keep="tensors", kinds=kinds, optimizer=optimizer):
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(micros):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + micro))
                model(x).mean().backward()
            optimizer.step()
            after()
    return path


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("kinds", [DEFAULT, ALL], ids=["default", "all"])
def test_a_gradient_for_a_module_that_should_not_learn(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    ran(tmp_path / "a", seeded(TwoNetworks), kinds)
    ran(tmp_path / "b", seeded(lambda: TwoNetworks(stop=False)), kinds)
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None and result.first.status == "extra" and result.first.key.step == 0
    expected = "a gradient comes to target.2's parameter bias, which it does not in the reference."
    assert result.sentence == f"The forward pass agrees, but in step 0 {expected}"
    assert [birth.module for birth in result.births if birth.status == "extra"] == ["target.2", "target.0"]
    with (tmp_path / "page.html").open("wb") as file:
        comparison_html.write(result, file)
    assert "comes, though not in the reference; inspect target.2" in (tmp_path / "page.html").read_text()
    back = tt.compare(tmp_path / "b", tmp_path / "a")
    assert back.first is not None and back.first.status == "missing"


def test_a_check_of_one_backward_sees_it_too(tmp_path: Path) -> None:
    kinds = (*DEFAULT, "grad_input")
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    model = seeded(TwoNetworks)
    with tt.capture(model, tmp_path / "a", keep="tensors", kinds=kinds):
        model(x).mean().backward()
    model = seeded(lambda: TwoNetworks(stop=False))
    with tt.check(model, tmp_path / "a") as check:
        model(x).mean().backward()
    expected = "In step 0, a gradient comes to target.2's parameter bias, which it does not in the reference"
    assert check.result.sentence == f"{expected}; so it is with 1 more module."


@pytest.mark.parametrize("micros", [1, 3])
def test_an_optimizer_is_not_to_blame_for_other_numbers_of_micro_steps(tmp_path: Path, micros: int) -> None:
    ran(tmp_path / "a", seeded(TwoNetworks), ALL, micros=2)
    ran(tmp_path / "b", seeded(TwoNetworks), ALL, micros=micros)
    sentence = tt.compare(tmp_path / "a", tmp_path / "b").sentence
    assert "although its gradient matches" not in sentence
    times = f"{micros} time{'s' * (micros > 1)}"
    assert sentence.endswith(f"In step 0 the reference ran 2 times and the candidate {times}.")


def test_a_forward_without_a_backward_adds_no_micro_step(tmp_path: Path) -> None:
    for name in "ab":
        model = seeded(TwoNetworks)
        with tt.capture(model, tmp_path / name) as tap:
            model(torch.ones(8, 16)).mean().backward()
            if name == "b":
                model(torch.ones(8, 16))
            tap.step()
    assert tt.compare(tmp_path / "a", tmp_path / "b").sentence.startswith("The runs match: ")


# --- right, without evidence -----------------------------------------------------------------------------------------
class InTwo(nn.Linear):
    """The same sum, in another order."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        half = self.in_features // 2
        left, right = (input[..., :half], self.weight[:, :half]), (input[..., half:], self.weight[:, half:])
        return left[0] @ left[1].T + right[0] @ right[1].T + self.bias


def rounded_otherwise(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = InTwo
    return model


class Averaged(nn.Module):
    """The target is a moving average of the other network. Biases before a norm get gradients of noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (
            nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8)) for _ in range(2)
        )
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.predict = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        said, wanted = self.predict(self.online(x)), self.target(x)
        return 2 - 2 * (F.normalize(said, dim=-1) * F.normalize(wanted, dim=-1)).sum(-1)

    def average(self) -> None:
        with torch.no_grad():
            for own, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)


@pytest.mark.parametrize(("kinds", "verdict"), [(DEFAULT, "incomparable"), (ALL, "match")], ids=["default", "all"])
def test_an_average_of_a_network_follows_its_noise(tmp_path: Path, kinds: tuple[str, ...], verdict: str) -> None:
    for name in "ab":
        model = seeded(Averaged)
        if name == "b":
            rounded_otherwise(model)
        ran(tmp_path / name, model, kinds, steps=4, rate=1e-3, after=model.average)
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.counts.get("close") and result.verdict == verdict, result.sentence


@pytest.mark.parametrize(
    ("size", "off", "verdict"), [(1e-3, 1e-5, "match"), (1.0, 1e-5, "diverged"), (1e-3, 0.5, "diverged")]
)
def test_a_gradient_that_cancels_out_has_the_rounding_of_its_sources(
    tmp_path: Path, size: float, off: float, verdict: str
) -> None:
    """But not at will: it may be small for other reasons, too."""
    for name, noise in (("a", 0.0), ("b", off)):
        sent = np.float32(size) * (values(4, (64, 64)) + np.float32(noise) * values(5, (64, 64)))
        seen = [
            Seen("first", values(1, (64, 64)), "input"),
            Seen("first", values(2, (64, 64)), tensor=90),
            Seen("second", values(2, (64, 64)), "input", tensor=90),
            Seen("second", values(3, (64, 64))),
            Seen("second", values(6, (64, 64)), "grad_output"),
            Seen("first", sent, "grad_output"),
        ]
        write(tmp_path / name, seen)
    assert tt.compare(tmp_path / "a", tmp_path / "b").verdict == verdict


# --- attribution of missing gradients ---------------------------------------------------------------------------------
class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(F.silu(self.norm(x)))


class Skipping(nn.Module):
    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.down, self.middle, self.up = Residual(16), Residual(16), nn.Linear(32, 8)
        self._cut = cut

    def forward(self, x: torch.Tensor) -> Any:
        kept = self.down(x)
        return self.up(torch.cat((self.middle(kept), kept.detach() if self._cut else kept), -1)).square()


def test_a_user_that_sent_the_right_gradient_back_has_not_lost_the_other(tmp_path: Path) -> None:
    ran(tmp_path / "a", seeded(Skipping), ALL)
    ran(tmp_path / "b", seeded(lambda: Skipping(cut=True)), ALL)
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None and result.first.module == "" and result.first.key.module == "down"


def test_a_loss_of_parts_that_are_called_one_by_one(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 1.01)):
        model = seeded(lambda: nn.ModuleDict({"first": Residual(8), "second": Residual(8)}))
        with tt.capture(model, tmp_path / name, keep="tensors") as tap:
            (scale * model["second"](model["first"](torch.ones(4, 8))).square().mean()).backward()
            tap.step()
    sentence = tt.compare(tmp_path / "a", tmp_path / "b").sentence
    assert "the gradient that enters second at its output is off" in sentence and "check the loss" in sentence


def test_other_names_that_no_rule_explains_are_reported(tmp_path: Path) -> None:
    for name in "ab":
        model = seeded(lambda: nn.Sequential(Residual(16), Residual(16), Residual(16)))
        if name == "b":
            model[1] = nn.Sequential(model[1])
        ran(tmp_path / name, model, steps=1)
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    names = "1.norm of the reference and 1.0 of the candidate"
    assert [note for note in result.notes if names in note and "--map with an empty file" in note]
    paired = tt.compare(tmp_path / "a", tmp_path / "b", mapping={})
    assert not [note for note in paired.notes if names in note] and len(paired) > len(result)


def test_a_notice_of_both_runs_appears_once(tmp_path: Path) -> None:
    for name in "ab":
        model = seeded(lambda: Residual(16))
        with tt.capture(model, tmp_path / name, keep={"nothing.of.that": "tensors", "*": "summary"}) as tap:
            model(torch.ones(4, 16))
            tap.step()
    notes = tt.compare(tmp_path / "a", tmp_path / "b").notes
    assert [note for note in notes if "nothing.of.that" in note] == [note for note in notes if "both runs: " in note]
    assert len([note for note in notes if "nothing.of.that" in note]) == 1


# --- no birth ---------------------------------------------------------------------------------------------------------
def test_differing_runs_never_match(tmp_path: Path) -> None:
    """One branch is cut off that should not be, and another one not that should: each alone would explain the other."""

    class Branches(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            self.stem, self.left, self.right, self.target = (nn.Linear(8, 8) for _ in range(4))
            self._wrong = wrong

        def forward(self, x: torch.Tensor) -> Any:
            y, wanted = torch.tanh(self.stem(x)), self.target(x)
            left = self.left(y.detach() if self._wrong else y)
            return (left + self.right(y) - (wanted if self._wrong else wanted.detach())).square()

    for name in "ab":
        model = seeded(lambda wrong=name == "b": Branches(wrong))
        with tt.capture(model, tmp_path / name, keep="tensors"):
            model(torch.ones(4, 8)).mean().backward()
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.counts["diverged"] and result.verdict == "diverged" and result.births


def test_an_interrupted_reference_may_lack_gradients(tmp_path: Path) -> None:
    for name in "ab":
        model = seeded(TwoNetworks)
        with contextlib.suppress(RuntimeError), tt.capture(model, tmp_path / name, keep="tensors") as tap:
            for step in range(2):
                if name == "a" and step:
                    model.online[0].register_full_backward_pre_hook(out_of_memory)
                model(torch.ones(8, 16)).mean().backward()
                tap.step()
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "incomparable" and "out of memory" in result.sentence  # and no gradient is called lost


def out_of_memory(module: nn.Module, gradients: Any) -> None:
    raise RuntimeError("out of memory")


def test_the_first_layer_is_frozen_in_the_candidate_alone(tmp_path: Path) -> None:
    kinds = ("input", "output", "grad_input", "grad_output", "param_grad")
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    with tt.capture(model, tmp_path / "a", keep="tensors", kinds=kinds):
        model(x).square().mean().backward()
    model.zero_grad()
    model[0].requires_grad_(False)
    with tt.check(model, tmp_path / "a") as check:
        model(x).square().mean().backward()
    assert check.result.verdict == "diverged" and "never comes" in check.result.sentence


def test_the_roots_own_code_gets_no_tolerance_from_other_gradients(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(torch.tanh(self.first(x))) * self.scale

    for name in "ab":
        model = seeded(Scaled)
        if name == "b":
            rounded_otherwise(model)

        def later(model: Any = model, name: str = name) -> None:
            model.scale = 1.0002 if name == "b" else 1.0

        ran(tmp_path / name, model, steps=3, after=later)
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None and result.first.module == ""


def test_a_parameter_that_two_forwards_use_before_one_backward(tmp_path: Path) -> None:
    """Its gradient comes once, in the micro step of either: it is neither missing nor extra, and compared."""

    def record(name: str, first: bool) -> Path:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
        model.forward = lambda x: (model["a"](x), model["b"](x))  # type: ignore[method-assign, assignment]
        x = torch.linspace(-1, 1, 8).view(2, 4)
        with tt.capture(model, tmp_path / name) as tap:
            one, other = model(x), model(x)
            used = one[1] if first else one[1].detach()
            (one[0].sum() + other[0].square().sum() + other[1].sum() + used.square().sum()).backward()
            tap.step()
        return tmp_path / name

    result = tt.compare(record("a", first=False), record("b", first=True))
    assert result.first is not None and result.first.module == "b", result.sentence
    assert "never comes" not in result.sentence


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.given(x) + self.kept(state))


class _Recurrent(nn.Module):
    """Calls a cell again and again. `cut`: the state is detached between the calls."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.first, self.cell, self.cut = nn.Linear(4, 4), _Cell(), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros(2, 4), []
        for part in self.first(x).unbind(1):
            state = self.cell(part, state)
            states.append(state)
            state = state.detach() if self.cut else state
        return torch.stack(states, 1)


@pytest.mark.parametrize("keep", ["tensors", "summary"])
def test_a_state_that_is_detached_between_calls(tmp_path: Path, keep: str) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    for path, cut in zip(paths, (False, True), strict=True):
        torch.manual_seed(0)
        model = _Recurrent(cut)
        kinds = ("input", "output", "grad_input", "grad_output", "param_grad")
        with tt.capture(model, path, keep=keep, kinds=kinds):
            model(torch.randn(2, 5, 4)).square().sum().backward()
    found = tt.compare(*paths)
    assert found.first is not None and found.first.module == "", found.sentence


class FaintBranch(nn.Module):
    """Adds so little by a branch that leaving it out shows in no activation."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(x + 1e-9 * self.branch(x) if self.whole else x)


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_code_that_leaves_a_module_out_is_named_and_no_optimizer(tmp_path: Path, keep: str) -> None:
    for name, whole in (("a", True), ("b", False)):
        torch.manual_seed(0)
        model = FaintBranch(whole)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with tt.capture(model, tmp_path / name, keep=keep, optimizer=optimizer):
            for step in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None and result.first.cause == "missing_gradient", result.sentence
    assert (result.first.module, result.first.key.module) == ("", "branch")
    assert "though the reference has it: (root) never calls branch" in result.sentence
