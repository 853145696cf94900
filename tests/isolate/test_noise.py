"""Noise: what is measured, that the model is restored, and that comparisons use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, hooks_on
from tensortap.core.records import Key
from tensortap.isolate.perturbation import Perturbation
from tensortap.store.noise_file import read_noise

EPSILON = 2.0**-7
KEY = Key(0, 0, "forward", "fc", 0, "input", "0")


class Steep(nn.Module):
    """Amplifies the rounding of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (7 * x).exp()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Steep(), nn.BatchNorm1d(32), nn.Linear(32, 8)).bfloat16()


def inputs() -> torch.Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).bfloat16()


def step(net: nn.Module) -> None:
    (net(inputs()).float() * 3).square().mean().backward()


def test_a_module_that_amplifies_has_more_noise(tmp_path: Path) -> None:
    noise = read_noise(tt.noise(model(), step, tmp_path / "noise"))
    linear, row = noise.of(("0", 0, "output", "0"))
    assert 0.5 * EPSILON < linear < 3 * EPSILON
    assert row > linear
    assert noise.of(("1", 0, "output", "0"))[0] > 1.5 * linear
    assert {spot[2] for spot in noise._spreads} >= {"output", "grad_input", "param_grad"}
    assert noise.of(("0", 5, "output", "0")) == noise.of(("0", 0, "output", "0"))  # a call that was not measured
    assert noise.of(("nowhere", 0, "output", "0")) == (0.0, 0.0)


def test_the_model_is_restored(tmp_path: Path) -> None:
    net = model()
    step(net)
    states = {key: value.clone() for key, value in net.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    held = [parameter.grad for parameter in net.parameters()]
    random = torch.get_rng_state()
    tt.noise(net, step, tmp_path / "noise")
    assert all(torch.equal(value, states[key]) for key, value in net.state_dict().items())
    assert all(p.grad is g for p, g in zip(net.parameters(), held, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert hooks_on(net) == 0


def test_the_model_is_restored_when_the_step_fails(tmp_path: Path) -> None:
    net, calls = model(), []
    states = {key: value.clone() for key, value in net.state_dict().items()}

    def failing(net: nn.Module) -> None:
        step(net)
        calls.append(None)
        if len(calls) > 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tt.noise(net, failing, tmp_path / "noise")
    assert all(torch.equal(value, states[key]) for key, value in net.state_dict().items())
    assert not (tmp_path / "noise").exists()


def test_a_batch_alone_is_enough(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = tt.noise(model(), inputs(), tmp_path / "a", seeds=2, progress=lambda done, all_: calls.append((done, all_)))
    assert calls == [(1, 2), (2, 2)]
    assert read_noise(path).of(("0", 0, "grad_input", "0")) == (0.0, 0.0)  # the input takes no part in autograd
    assert read_noise(path).of(("3", 0, "param_grad", "weight"))[0] > 0
    structured = zoo.Structured()
    assert len(read_noise(tt.noise(structured, {"x": zoo.batch()}, tmp_path / "b")))
    assert len(read_noise(tt.noise(zoo.Both(), (zoo.batch(), zoo.batch(seed=2)), tmp_path / "c")))


def test_inner_precision_is_detected(tmp_path: Path) -> None:
    """Takes and returns float32, computes in bfloat16: perturbations of a float32 epsilon would have no effect."""

    class Lowered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.fc.weight.bfloat16()
            return (x.bfloat16() @ weight.T).float()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lowered, self.norm, self.short = Lowered(), nn.LayerNorm(32), nn.Linear(32, 4).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.short(self.norm(self.lowered(x)).bfloat16())

    torch.manual_seed(0)
    noise = read_noise(tt.noise(Net(), torch.randn(64, 32), tmp_path / "noise"))
    assert noise.of(("lowered", 0, "output", "0"))[0] > 0.5 * EPSILON
    assert noise.of(("norm", 0, "output", "0"))[0] < 1e-5


def in_another_way(net: nn.Module) -> nn.Module:
    """The same function; its intermediate results are rounded at other places."""
    net[1].forward = lambda x: x.exp().pow(7)
    return net


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    net = model()
    with tt.capture(net, tmp_path / "reference", keep="tensors", kinds=ALL_KINDS):
        step(net)
    return tmp_path / "reference"


def checked(net: nn.Module, reference: Path, **options: Any) -> Any:
    with tt.check(net, reference, **options) as check:
        step(net)
    return check.result


def test_a_check_allows_for_noise(reference: Path, tmp_path: Path) -> None:
    noise = tt.noise(model(), step, tmp_path / "noise")
    assert checked(in_another_way(model()), reference).verdict == "diverged"
    assert checked(in_another_way(model()), reference, noise=noise).verdict == "match"
    assert checked(in_another_way(model()), reference, noise=str(noise)).verdict == "match"
    assert checked(in_another_way(model()), reference, noise=[str(noise), noise]).verdict == "match"
    with tt.open(reference) as run:  # its records are not taken for sources
        assert checked(in_another_way(model()), reference, noise=run).verdict == "diverged"
    wrong = in_another_way(model())
    inner = wrong[3].forward
    wrong[3].forward = lambda x: inner(x) * 1.02
    result = checked(wrong, reference, noise=noise)
    assert [birth.module for birth in result.births] == ["3"]
    assert "measured noise" in result.policy


def test_a_comparison_allows_for_noise(reference: Path, tmp_path: Path) -> None:
    noise = tt.noise(model(), step, tmp_path / "noise")
    net = in_another_way(model())
    with tt.capture(net, tmp_path / "candidate", keep="tensors", kinds=ALL_KINDS):
        step(net)
    assert tt.compare(reference, tmp_path / "candidate").first.module == "1"
    result = tt.compare(reference, tmp_path / "candidate", noise=[noise])
    assert result.first is None or result.first.module != "1"
    rules = {row["rule"] for row in result.rows if row["module"] == "1" and row["kind"] == "output"}
    assert rules == {"measured noise"}


def test_perturbations_are_one_epsilon_and_reproducible() -> None:
    values = np.array([0.0, 1.0, -3.5, np.inf, np.nan, 1e30, 3e38], np.float32)
    perturbation = Perturbation(0, 1, lambda key: "float32")
    moved = perturbation.apply(values, KEY)
    assert moved.dtype == np.float32
    assert moved[0] == 0 and moved[3] == np.inf and np.isnan(moved[4])
    relative = np.abs(moved[[1, 2, 5]] / values[[1, 2, 5]] - 1)
    assert np.all((relative > 0) & (relative < 2.5 * 2.0**-23))
    assert np.array_equal(moved, perturbation.apply(values, KEY), equal_nan=True)
    many = np.ones(1000, np.float32)
    assert not np.array_equal(perturbation.apply(many, KEY), Perturbation(1, 1, lambda key: None).apply(many, KEY))
    coarse = Perturbation(0, 1, lambda key: "bfloat16").apply(many, KEY)
    assert np.abs(coarse - 1).min() > 0.99 * EPSILON
    integers = np.arange(5)
    assert perturbation.apply(integers, KEY) is integers


def test_codes_that_a_model_is_given_are_not_perturbed() -> None:
    """Labels that are left out, or a mask: code may ask for the very number."""
    values, perturbation = np.array([-100.0, 1.0, 0.5], np.float32), Perturbation(0, 1, lambda key: None)
    assert (perturbation.apply(values, KEY._replace(module="")) == values).tolist() == [True, True, False]
    assert (perturbation.apply(values, KEY) != values).all()


def test_a_noise_file_is_only_overwritten_on_request(tmp_path: Path) -> None:
    path = tt.noise(model(), step, tmp_path / "noise", seeds=1)
    with pytest.raises(tt.TensortapError, match="overwrite=True"):
        tt.noise(model(), step, path, seeds=1)
    tt.noise(model(), step, path, seeds=1, overwrite=True)
    other = tmp_path / "mine.txt"
    other.write_text("mine")
    with pytest.raises(tt.TensortapError, match="exists already"):
        tt.noise(model(), step, other, seeds=1, overwrite=True)
    with pytest.raises(tt.TensortapError, match="1 or more"):
        tt.noise(model(), step, tmp_path / "none", seeds=0)


def test_a_damaged_noise_file_is_not_taken_for_a_run(reference: Path, tmp_path: Path) -> None:
    path = tt.noise(model(), step, tmp_path / "noise", seeds=1)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(tt.TensortapError, match="noise"):
        tt.compare(reference, reference, noise=[path])
