"""A check that can do only a part of its work, or none."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from tensortap.errors import UsageError

KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def step(net: nn.Module) -> None:
    net(batch()).square().sum().backward()


def captured(path: Path, work: Callable[[nn.Module], None] = step, **options: Any) -> Path:
    with tt.capture(net := model(), path, **({"keep": "tensors", "kinds": KINDS} | options)):
        work(net)
    return path


def penalised(net: nn.Module) -> None:
    x = batch().requires_grad_()
    out = net(x).square().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    (out + gradient.square().sum()).backward()


def test_a_gradient_penalty_is_compared_but_not_replaced(run_path: Path) -> None:
    reference, net, free = captured(run_path, penalised), model(), model()
    with tt.check(net, reference) as check:
        penalised(net)
    penalised(free)
    assert check.result.verdict == "match", check.result.sentence
    for ours, theirs in zip(net.parameters(), free.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5), "the penalty must reach the parameters"
    assert any("create_graph=True" in note for note in check.result.notes)


def test_a_run_of_the_other_framework_is_refused(run_path: Path) -> None:
    import paddle

    with tt.capture(net := paddle.nn.Linear(8, 8), run_path, keep="tensors", kinds=KINDS):
        net(paddle.ones([4, 8])).sum().backward()
    with pytest.raises(UsageError, match=r"is a run of paddle, and the model is a torch model: .* tensortap\.compare"):
        tt.check(nn.Linear(8, 8), run_path)


def scaled(module: str) -> nn.Module:
    net = model()
    target = net.get_submodule(module)
    inner = target.forward
    target.forward = lambda x: inner(x) * 1.1  # type: ignore[method-assign]
    return net


def checked(net: nn.Module, reference: Path, **options: Any) -> Any:
    with tt.check(net, reference, **options) as check:
        step(net)
    return check.result


def named(result: Any) -> list[str]:
    return [birth.module for birth in result.births]


@pytest.mark.parametrize("kept", ["2", ""])
def test_a_partly_kept_reference_judges_its_kept_tensors(kept: str, run_path: Path) -> None:
    """A module that cannot be fed counts as part of the module around it; a correct module is never reported."""
    reference = captured(run_path, keep={kept: "tensors", "*": "summary"})
    right = checked(model(), reference)
    assert right.verdict == "match", right.sentence
    assert any("kept no tensors of 5 of its 6 modules" in note for note in right.notes)
    assert named(checked(scaled("2"), reference)) == [kept]
    assert named(checked(scaled("1"), reference)) == [""]
    assert named(checked(scaled("4"), reference)) == [""]


def trained(net: nn.Module, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    return net, torch.optim.SGD(net.parameters(), lr=rate)


def test_a_wrong_optimizer_is_one_finding(run_path: Path) -> None:
    def work(rate: float, watch: Callable[[Any, Any], Any]) -> Any:
        net, optimizer = trained(model(), rate)
        with watch(net, optimizer) as watching:
            for _ in range(2):
                step(net)
                optimizer.step()
                optimizer.zero_grad()
        return watching

    kinds = (*KINDS, "param")
    work(0.01, lambda net, o: tt.capture(net, run_path, keep="tensors", kinds=kinds, optimizer=o))
    result = work(0.02, lambda net, o: tt.check(net, run_path, optimizer=o)).result
    assert len(result.births) == 1
    assert result.sentence.startswith("The update of parameters is wrong: after step 0, 0.weight is off by")


def clipped(net: nn.Module, watch: Callable[[nn.Module], Any], rate: float = 0.01) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.0)
    with watch(net) as watching:
        for _ in range(3):
            step(net)
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            watching.step()
    return watching


def wrong_from_the_second_step_on() -> nn.Module:
    net = model()
    inner, calls = net[2].forward, iter(range(9))
    net[2].forward = lambda x: inner(x) * (1.1 if next(calls) else 1.0)
    return net


def without_a_gradient() -> nn.Module:
    net = model()
    net[2].weight.requires_grad_(False)
    return net


@pytest.mark.parametrize("build", [lambda: scaled("2"), wrong_from_the_second_step_on, without_a_gradient])
def test_an_optimizer_with_a_wrong_gradient_is_not_reported(build: Callable[[], nn.Module], run_path: Path) -> None:
    """One wrong gradient changes the norm that all are clipped by."""
    clipped(model(), lambda net: tt.capture(net, run_path, keep="tensors", kinds=(*KINDS, "param")))
    result = clipped(build(), lambda net: tt.check(net, run_path)).result
    assert named(result) == ["2"]
    assert "optimizer" not in result.sentence


def test_an_optimizer_that_is_wrong_before_any_wrong_gradient_is_reported(run_path: Path) -> None:
    clipped(model(), lambda net: tt.capture(net, run_path, keep="tensors", kinds=(*KINDS, "param")))
    result = clipped(wrong_from_the_second_step_on(), lambda net: tt.check(net, run_path), rate=0.02).result
    assert result.sentence.startswith("The update of parameters is wrong: after step 0, 0.weight is off by")
    assert [birth.key.kind for birth in result.births].count("param") == 1


def test_parameters_that_differed_at_the_start_are_reported(run_path: Path) -> None:
    reference, net = captured(run_path, kinds=(*KINDS, "param")), model()
    with torch.no_grad():
        net[0].weight += 1
        net[2].weight += 1
    result = checked(net, reference)
    assert named(result) == ["0", "2"]
    assert result.sentence.startswith("The parameters already differed: before step 0, 0.weight is off by")
    assert result.sentence.endswith("so do parameters of 1 more module.")


def test_an_interrupted_step_is_reported(run_path: Path) -> None:
    reference, net = captured(run_path), model()
    check = tt.check(net, reference)
    with pytest.raises(ZeroDivisionError), check:
        net(batch())
        raise ZeroDivisionError
    assert check.result.sentence.startswith("The step was interrupted. Up to there: Every module agrees")


def test_a_forward_without_backward_is_reported(run_path: Path) -> None:
    reference, net = captured(run_path), model()
    with tt.check(net, reference) as check:
        net(batch())
    assert check.result.sentence.endswith("No backward ran: the reference's gradients were not compared.")


def test_steps_that_the_model_never_ran_are_noted(run_path: Path) -> None:
    def twice(net: nn.Module, watching: Any, counted: bool) -> Any:
        with watching:
            step(net)
            if counted:
                watching.step()
            net.zero_grad()
            step(net)
        return watching

    net = model()
    twice(net, tt.capture(net, run_path, keep="tensors", kinds=KINDS), counted=True)
    uncounted = twice(net := model(), tt.check(net, run_path), counted=False).result
    assert any("has step 1, which the model did not run, or not as a step of its own" in n for n in uncounted.notes)
    counted = twice(net := model(), tt.check(net, run_path), counted=True).result
    assert not counted.notes
    assert not checked(model(), run_path, steps=[0]).notes


def test_steps_that_only_the_model_ran_are_noted(run_path: Path) -> None:
    reference, net = captured(run_path), model()
    with tt.check(net, reference) as check:
        step(net)
        step(net)
    assert any("the model ran more often in step 0 than the reference" in note for note in check.result.notes)


class Repeated(nn.Module):
    """One block called several times, and a shared module that others call."""

    def __init__(self, times: int = 3, beside: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head, self.side = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8), nn.Linear(8, 8)
        self.mixed = nn.MultiheadAttention(8, 2)  # keeps weights in a module that is never called itself
        self.times, self.beside = times, beside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.block(x)
            x = x + self.mixed(x, x, x, need_weights=False)[0]
        out: torch.Tensor = self.head(x)
        return out


def test_a_block_with_one_call_less_is_not_reported_as_wrong(run_path: Path) -> None:
    with tt.capture(net := Repeated(), run_path, keep="tensors", kinds=KINDS):
        step(net)
    assert named(checked(Repeated(times=2), run_path)) == [""]


def test_a_call_without_only_its_gradient_is_reported(run_path: Path) -> None:
    def work(net: Repeated, watch: Callable[[nn.Module], Any]) -> Any:
        with watch(net) as watching:
            outs = [net.side(batch()) for _ in range(net.beside)]
            torch.stack(outs).square().sum().backward()
        return watching

    kinds = ("input", "output", "param_grad")
    work(Repeated(), lambda net: tt.capture(net, run_path, keep="tensors", kinds=kinds))
    result = work(Repeated(beside=1), lambda net: tt.check(net, run_path)).result
    assert named(result) == ["side"]


def test_noise_of_another_model_is_refused(run_path: Path, tmp_path: Path) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = nn.ModuleDict({f"part{i}": nn.Linear(8, 8) for i in range(12)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.deep.values():
                x = part(x)
            return x

    reference = captured(run_path, modules=["0", "2", "4"])
    tt.noise(Other(), batch(), tmp_path / "noise")
    with pytest.raises(UsageError, match="was measured on another model: 0 of the 13 modules"):
        tt.check(model(), reference, noise=tmp_path / "noise")
    with pytest.raises(UsageError, match="was measured on another model"):
        tt.compare(reference, reference, noise=[tmp_path / "noise"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": "00"}, r"no module of the model matches modules='00'; did you mean 0\?"),
        ({"modules": lambda name, module: False}, "no module of the model matches modules=<function>$"),
        ({"rtol": -1}, "rtol must be 0 or more, not -1"),
        ({"steps": [5]}, "has none of these; it has 0"),
    ],
)
def test_invalid_options_raise_before_the_step(options: dict[str, Any], message: str, run_path: Path) -> None:
    reference = captured(run_path)
    with pytest.raises(UsageError, match=message):
        tt.check(model(), reference, **options)


def test_an_empty_block_is_reported(run_path: Path) -> None:
    with tt.check(model(), captured(run_path)) as check:
        pass
    assert check.result.verdict == "incomparable"
    assert check.result.sentence.startswith("Nothing to judge: no module of the model ran in the block")


def test_noise_without_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the work ran no module of the model"):
        tt.noise(model(), lambda net: None, tmp_path / "noise")


def test_noise_restores_all_random_states(tmp_path: Path) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()

    def work(net: nn.Module) -> None:
        net(batch() * random.random() * np.random.rand()).square().sum().backward()

    tt.noise(model(), work, tmp_path / "noise", seeds=1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_skipped_module_whose_input_the_model_returns(run_path: Path) -> None:
    """The loss's part of the gradient is correct; the rest comes from the module that passes the input on."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.block, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.first(x)
            return self.last(self.block(hidden)), hidden

    def work(net: nn.Module) -> None:
        out, hidden = net(batch())
        (out.square().sum() + hidden.pow(3).sum()).backward()

    with tt.capture(right := Both(), run_path, keep="tensors", kinds=KINDS):
        work(right)
    skipping = Both()
    skipping.block.forward = lambda x: x  # type: ignore[method-assign]
    with tt.check(skipping, run_path) as check:
        work(skipping)
    assert named(check.result) == ["block"]


class Recomputed(nn.Module):
    """One block called several times, each time as a region that backward recomputes."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=self._reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_regions_of_one_block_are_distinguished_when_recomputed(tmp_path: Path, reentrant: bool) -> None:
    def ran(watch: Any) -> Any:
        torch.manual_seed(0)
        model = Recomputed(reentrant)
        with watch(model) as watching:
            model(torch.randn(4, 6).requires_grad_()).square().mean().backward()
        return watching

    ran(lambda model: tt.capture(model, tmp_path / "a", keep="tensors", kinds=KINDS))
    result = ran(lambda model: tt.check(model, tmp_path / "a")).result
    assert result.verdict == "match" and result.counts.keys() == {"equal"}, result.sentence


def test_tensors_without_elements_are_replaced(tmp_path: Path) -> None:
    """As those of an expert that no token chose: they have one place in the run, and several shapes."""
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    with tt.capture(net, tmp_path / "run", keep="tensors", kinds=KINDS):
        net(torch.empty(0, 8)).sum().backward()
    with tt.check(net, tmp_path / "run") as check:
        net(torch.empty(0, 8)).sum().backward()
    assert check.result.first is None, check.result.sentence


def test_other_micro_batches_cannot_be_checked(tmp_path: Path) -> None:
    def train(parts: int, watch: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        batch = torch.randn(8, 4)
        with watch(model) as watching:
            for part in batch.chunk(parts):
                (model(part).square().mean() / parts).backward()
            watching.step()
        return watching

    train(2, lambda model: tt.capture(model, tmp_path / "two", keep="tensors"))
    result = train(1, lambda model: tt.check(model, tmp_path / "two")).result
    assert result.verdict == "incomparable" and result.first is None
    assert "splits step 0 into 2 micro batches and the model into 1" in result.sentence
    assert train(2, lambda model: tt.check(model, tmp_path / "two")).result.verdict == "match"


class Packed(nn.Module):
    """Sequences of several lengths, packed for a recurrent layer."""

    def __init__(self, skip: int = 0) -> None:
        super().__init__()
        self.cells, self.head, self.skip = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 8), skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([5, 4 - self.skip, 4, 3])
        packed = nn.utils.rnn.pack_padded_sequence(x[:, :5], lengths, batch_first=True, enforce_sorted=False)
        made, _ = nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=5)
        return self.head(made)


def test_lengths_stay_with_a_tensor_of_another_shape(run_path: Path) -> None:
    def train(net: nn.Module) -> None:
        net(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2))).square().sum().backward()

    def packed(skip: int) -> Packed:
        torch.manual_seed(0)
        return Packed(skip)

    with tt.capture(net := packed(0), run_path, keep="tensors", kinds=KINDS):
        train(net)
    with tt.check(net := packed(1), run_path) as check:
        train(net)
    assert check.result.first is not None and check.result.first.module == "", check.result.sentence


class Moves(nn.Module):
    """States and positions: each layer changes both."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.message, self.weight, self.sign = nn.Linear(9, 8), nn.Linear(8, 1), sign

    def forward(self, states: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        apart = x - x.mean(0)
        message = torch.tanh(self.message(torch.cat([states, apart.square().sum(-1, keepdim=True)], -1)))
        return states + message, x + self.sign * apart * self.weight(message)


class Molecule(nn.Module):
    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList([Moves(), Moves(sign), Moves()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.embed(torch.arange(6) % 4)
        for layer in self.layers:
            states, x = layer(states, x)
        return self.out(states).sum(), x


def with_forces(net: nn.Module) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()
    energy, moved = net(x)
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    (energy.square() + forces.square().mean() + moved.square().mean()).backward()


def test_forces_raise_no_alarm_and_hide_no_wrong_layer(run_path: Path) -> None:
    def molecule(sign: float = 1.0) -> Molecule:
        torch.manual_seed(0)
        return Molecule(sign)

    nets = [molecule(), molecule(), molecule(-1)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with tt.capture(nets[0], run_path, keep="tensors", kinds=(*KINDS, "step_grad"), optimizer=optimizers[0]):
        with_forces(nets[0])
        optimizers[0].step()
    found = []
    for net, optimizer in zip(nets[1:], optimizers[1:], strict=True):
        with tt.check(net, run_path, optimizer=optimizer) as check:
            with_forces(net)
            optimizer.step()
        found.append(check.result)
    assert (found[0].verdict, found[0].first) == ("match", None), found[0].sentence
    assert [birth.module for birth in found[1].births] == ["layers.1"], found[1].sentence
