"""A framework over NumPy, added from outside of the package through its public contract alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import UsageError
from tensortap.frameworks import FrameworkBase, Remove, register

STEPS = 3


# --- the toy: modules with hooks, arrays with a gradient, and backward by hand -------------------------------------
class Array:
    """A NumPy array whose gradient can be watched."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, np.float32)
        self.gradient: np.ndarray | None = None
        self.hooks: list[Callable[[Array], None]] = []

    def receive(self, gradient: np.ndarray) -> np.ndarray:
        self.gradient = gradient
        for hook in list(self.hooks):
            hook(Array(gradient))
        return gradient


class Module:
    """A part of a model. Subclasses define `forward`, and `backward` for the gradient of the last output."""

    def __init__(self) -> None:
        self.before: list[Callable[..., Any]] = []
        self.after: list[Callable[..., Any]] = []
        self.training = True
        self.output = Array(0)

    def __call__(self, *args: Array) -> Array:
        for hook in list(self.before):
            hook(args, {})
        self.output = self.forward(*args)
        for hook in list(self.after):
            hook(self.output)
        return self.output

    def forward(self, x: Array) -> Array:
        raise NotImplementedError

    def backward(self, gradient: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class Linear(Module):
    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        self.weight = Array(np.random.default_rng(seed).standard_normal((inputs, outputs)) / np.sqrt(inputs))

    def forward(self, x: Array) -> Array:
        self.x = x
        return Array(x.values @ self.weight.values)

    def backward(self, gradient: np.ndarray) -> np.ndarray:
        gradient = self.output.receive(gradient)
        self.weight.receive(self.x.values.T @ gradient)
        return gradient @ self.weight.values.T


class Tanh(Module):
    def forward(self, x: Array) -> Array:
        return Array(np.tanh(x.values))

    def backward(self, gradient: np.ndarray) -> np.ndarray:
        return self.output.receive(gradient) * (1 - self.output.values**2)


class WrongTanh(Tanh):
    """A port with a mistake in its forward."""

    def forward(self, x: Array) -> Array:
        return Array(np.tanh(1.01 * x.values))


class WrongBackward(Linear):
    """A port with a mistake in its backward."""

    def backward(self, gradient: np.ndarray) -> np.ndarray:
        return super().backward(gradient) * np.float32(1.05)


class Net(Module):
    def __init__(self, act: type[Module] = Tanh, last: type[Linear] = Linear) -> None:
        super().__init__()
        self.first, self.act, self.last = Linear(4, 8, 0), act(), last(8, 2, 1)

    def forward(self, x: Array) -> Array:
        return self.last(self.act(self.first(x)))

    def backward(self, gradient: np.ndarray) -> np.ndarray:
        return self.first.backward(self.act.backward(self.last.backward(gradient)))


# --- its support ---------------------------------------------------------------------------------------------------
class Toy(FrameworkBase):
    name = "toy"

    def is_module(self, value: Any) -> bool:
        return isinstance(value, Module)

    def children(self, module: Module) -> Sequence[tuple[str, Module]]:
        return [(name, value) for name, value in vars(module).items() if isinstance(value, Module)]

    def parameters(self, module: Module) -> Sequence[tuple[str, Array]]:
        return [("weight", module.weight)] if isinstance(module, Linear) else []

    def on_call(self, module: Module, before: Callable[..., Any], after: Callable[..., Any]) -> Remove:
        first, last = placed(module.before, before), placed(module.after, after)

        def remove() -> None:
            first()
            last()

        return remove

    def on_gradient(self, tensor: Array, seen: Callable[[Any], None]) -> Remove:
        return placed(tensor.hooks, seen)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Array)

    def host(self, tensor: Array) -> np.ndarray:
        return tensor.values


def placed(hooks: list[Any], hook: Any) -> Remove:
    hooks.append(hook)

    def remove() -> None:
        if hook in hooks:
            hooks.remove(hook)

    return remove


@pytest.fixture
def toy() -> Iterator[None]:
    remove = register(Module.__module__.partition(".")[0], Toy, models="a toy Module")
    yield
    remove()


def train(net: Net, tap: Any) -> None:
    random = np.random.default_rng(2)
    for _ in range(STEPS):
        loss_gradient = net(Array(random.standard_normal((16, 4)))).values / 16
        net.backward(loss_gradient)
        for part in (net.first, net.last):
            assert part.weight.gradient is not None
            part.weight.values = part.weight.values - np.float32(0.1) * part.weight.gradient
        tap.step()


def captured(folder: Path, net: Net, **options: Any) -> Path:
    with tt.capture(net, folder, **options) as tap:
        train(net, tap)
    return folder


# --- capture and compare -------------------------------------------------------------------------------------------
def test_equal_runs_match(tmp_path: Path, toy: None) -> None:
    kinds = ("input", "output", "grad_output", "param", "param_grad")
    runs = [captured(tmp_path / name, Net(), kinds=kinds, keep="tensors") for name in "ab"]
    result = tt.compare(*runs)
    assert result.verdict == "match"
    run = tt.open(runs[0])
    assert run.info["framework"] == "toy" and run.steps == list(range(STEPS))
    assert {record.key.kind for record in run.records()} == set(kinds)
    assert {row.module: row.status for row in run.coverage[0]} == dict.fromkeys(("", "first", "act", "last"), "seen")


def test_a_mistake_in_a_forward_is_attributed_to_its_module(tmp_path: Path, toy: None) -> None:
    runs = [captured(tmp_path / "a", Net()), captured(tmp_path / "b", Net(act=WrongTanh))]
    result = tt.compare(*runs)
    assert result.verdict == "diverged" and result.first is not None
    assert result.first.key[:4] == (0, 0, "forward", "act")


def test_a_mistake_in_a_backward_is_attributed_to_its_module(tmp_path: Path, toy: None) -> None:
    runs = [captured(tmp_path / "a", Net()), captured(tmp_path / "b", Net(last=WrongBackward))]
    result = tt.compare(*runs)
    assert result.verdict == "diverged" and result.first is not None
    # The gradient between the two is wrong, and only the output of act records it.
    assert result.first.key[:6] == (0, 0, "backward", "act", 0, "grad_output")


def test_capture_leaves_nothing_behind(toy: None) -> None:
    net = Net()
    with tt.capture(net, keep="tensors") as tap:
        train(net, tap)
    for module in (net, net.first, net.act, net.last):
        assert not module.before and not module.after and not module.output.hooks
    assert not net.first.weight.hooks and not net.last.weight.hooks


# --- what the toy does not support ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"kinds": ("grad_input",)}, "grad_input is not available for toy: .*consumers"),
        ({"optimizer": object()}, "optimizer= is not available for toy: .*on_optimizer_step"),
        ({"compiled": "eager"}, 'compiled="eager" is not available for toy: .*run_eagerly'),
    ],
)
def test_options_of_capture(tmp_path: Path, toy: None, options: dict[str, Any], missing: str) -> None:
    with pytest.raises(UsageError, match=missing):
        tt.capture(Net(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_other_features(tmp_path: Path, toy: None) -> None:
    run = captured(tmp_path / "run", Net(), keep="tensors")
    net, batch = Net(), Array(np.ones((16, 4)))
    uses: dict[str, Callable[[], Any]] = {
        "substitute": lambda: tt.check(net, run),
        "save_state": lambda: tt.noise(net, batch, tmp_path / "noise"),
        "profiling": lambda: tt.annotate(net),
        "ownership": lambda: tt.inspect(net),
        "registered": lambda: tt.audit(net),
        "player": lambda: tt.replay(run, "act", net),
    }
    for missing, use in uses.items():
        with pytest.raises(UsageError, match=rf"is not available for toy: its support lacks .*{missing}"):
            use()
    assert not net.before and not net.after


# --- recognition ---------------------------------------------------------------------------------------------------
def test_a_model_of_no_framework_is_refused(toy: None) -> None:
    with pytest.raises(UsageError, match=r"a builtins\.set is not a model: give .*a toy Module"):
        tt.capture({1})


def test_the_registration_can_be_removed(toy: None) -> None:
    remove = register(Module.__module__.partition(".")[0], Toy, models="the same again")
    remove()
    remove()
    with tt.capture(Net()) as tap:
        assert tap.rank == 0


SCRIPT = """
import sys
import tensortap as tt
from tensortap.errors import UsageError
from toys import Net
with tt.capture(Net()) as tap:
    Net()
assert "toys_support" in sys.modules and not {"torch", "paddle"} & set(sys.modules)
try:
    tt.capture(object())
except UsageError as error:
    assert "torch.nn.Module" in str(error)
assert not {"torch", "paddle"} & set(sys.modules)
"""


def test_an_installed_package_is_found_by_its_entry_point_and_others_stay_unloaded(tmp_path: Path) -> None:
    source = Path(__file__).read_text()
    (tmp_path / "toys.py").write_text(source.partition("# --- its support")[0])
    support = source.partition("# --- its support")[2].partition("@pytest.fixture")[0].partition("\n")[2]
    (tmp_path / "toys_support.py").write_text(f"from toys import *\nfrom toys import Linear, Module\n{support}")
    info = tmp_path / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tensortap.frameworks]\ntoys = toys_support:Toy\n")
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
