"""Changes that no version counts, unused views, and unusual modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import coverage, values
from tensortap.capture import native_classes


def test_an_optimizer_that_counts_no_version(tmp_path: Path) -> None:
    """A fused step changes two rows of a large table; neither the version nor a few samples would show it."""
    for name, rate in (("a", 0.1), ("b", 0.5)):
        torch.manual_seed(0)
        model = nn.Embedding(1000, 64)
        optimizer = torch.optim.SGD(model.parameters(), rate, fused=True)
        with tt.capture(model, tmp_path / name, keep="tensors", kinds=("param", "param_grad"), optimizer=optimizer):
            model(torch.tensor([3, 5])).sum().backward()
            optimizer.step()
        after = values(tt.open(tmp_path / name), "param")["", 1, "weight"]
        assert np.array_equal(after, model.weight.detach().numpy())
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None and result.first.key.kind == "param" and "optimizer" in str(result)


def test_a_change_that_leaves_the_first_channel_alone(run_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            y.data[:, 1:] *= 2
            return self.b(y)

    model = Model()
    with tt.capture(model, run_path, keep="tensors"):
        model(torch.randn(64, 256))
    with tt.open(run_path) as run:
        made, taken = values(run, "output")["a", 0, "0"], values(run, "input")["b", 0, "0"]
    np.testing.assert_array_equal(taken[:, 1:], 2 * made[:, 1:])


def test_an_input_buffer_that_is_filled_anew(run_path: Path) -> None:
    model, buffer = nn.Linear(1000, 2), np.zeros((1, 1000), np.float32)
    with tt.capture(model, run_path, kinds="input") as tap:
        for step in range(3):
            buffer[0, step * 7 + 1] = 1
            model(torch.from_numpy(buffer))
            tap.step()
    assert [r.summary.l1 for r in tt.open(run_path)] == [1, 2, 3]


@pytest.mark.parametrize("portable", [False, True])
def test_large_tensors_are_read_once_and_again_if_they_change(
    run_path: Path, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that are too large to be copied: an alias is recognised, a change without a version is noticed, and a
    gradient that is clipped before the optimizer's step is recorded again."""
    if portable:
        monkeypatch.setattr(native_classes, "load", lambda: None)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.same, self.b = nn.Linear(256, 256), nn.Identity(), nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.same(self.a(x))
            y.data.mul_(2)
            return self.b(y)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.capture(model, run_path, optimizer=optimizer, kinds=("input", "output", "param_grad", "step_grad")):
        for step in range(4):
            model(torch.randn(300, 256)).square().mean().backward()
            if step == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    run = tt.open(run_path)
    for step in range(4):
        of = {(r.key.module, r.key.kind): r for r in run.records(step=step) if r.key.path in ("0", "weight")}
        made, passed, taken = of["a", "output"], of["same", "output"], of["b", "input"]
        assert made.tensor == passed.tensor != taken.tensor
        assert taken.summary.l2 == pytest.approx(2 * made.summary.l2)
        assert taken.summary.digest != made.summary.digest
        assert (("a", "step_grad") in of) == (step == 3), "a gradient is recorded twice if it changed"
        if step == 3:
            assert of["a", "step_grad"].summary.l2 < of["a", "param_grad"].summary.l2


def test_a_view_that_backward_never_reached_has_no_gradient(run_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.flat = nn.Linear(3, 4), nn.Flatten()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.a(x)
            return y, self.flat(y)

    model = Model()
    with tt.capture(model, run_path, keep="tensors") as tap:
        model(torch.randn(2, 5, 3))[0].square().sum().backward()
        tap.step()
    assert {(module, path) for module, _, path in values(tt.open(run_path), "grad_output")} == {("", "0"), ("a", "0")}
    assert coverage(tap)["flat"][0] == "no gradient"


def test_a_view_whose_memory_was_changed_past_it(run_path: Path) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).t().contiguous().t()
            y.detach().mul_(0.5)
            return y

    model = nn.Sequential(Scaled(4, 4))
    with tt.capture(model, run_path, keep="tensors") as tap:
        model(torch.ones(2, 4)).sum().backward()
        tap.step()
    np.testing.assert_array_equal(values(tt.open(run_path), "grad_output")["0", 0, "0"], np.ones((2, 4)))


def test_the_last_output_changed_in_place(run_path: Path) -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            y += 1
            return y

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            y += 1
            return y

    for number, model in enumerate((Model(3, 4), Outer())):
        path = run_path.with_name(str(number))
        with tt.capture(model, path, keep="tensors") as tap:
            model(torch.randn(2, 5, 3)).square().sum().backward()
            tap.step()
        leaf = "" if number == 0 else "inner"
        assert (leaf, 0, "0") in values(tt.open(path), "grad_output")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_module_is_reported_as_unseen(run_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU())), nn.Linear(4, 4))
    with tt.capture(model, run_path) as tap:
        model(torch.randn(2, 3)).sum().backward()
        tap.step()
    assert {r.key.module for r in tt.open(run_path).records(kind="output")} == {"", "1"}
    assert "takes no hooks" in coverage(tap)["0"][1] and coverage(tap)["0.0"][0] == "skipped"


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_does_not_stop_the_tap(run_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with tt.capture(model, run_path) as tap:
        for _ in range(2):
            model(torch.randn(2, 3)).sum().backward()
            tap.step()
    run = tt.open(run_path)
    assert run.finished and {r.key.path for r in run.records(kind="param_grad", step=1)} == {"weight", "bias"}
