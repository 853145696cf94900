"""A model that is compiled as a whole computes its loss inside the graph: what it does with its outputs is not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from tensortap.compare.judge.rules import table
from tensortap.compare.judge.rules.evidence import JudgedPair
from tensortap.compare.judge.rules.table import RULES, Rule
from tensortap.core.records import MODULE_KINDS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Model(nn.Module):
    """Returns its loss with its logits. The bias of `first` has a gradient that is zero in theory."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(1))
        self.wrong = wrong

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.norm(self.first(x)))) * self.scale
        return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1 * self.wrong), logits


def trained(watch: Any, compiled: bool, wrong: bool = False) -> Any:
    torch.manual_seed(0)
    model = Model(wrong)
    random = torch.Generator().manual_seed(1)
    called: Any = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with watch(called, optimizer) as watching:
        for _ in range(2):
            x, labels = torch.randn(32, 8, generator=random), torch.randint(4, (32,), generator=random)
            optimizer.zero_grad()
            called(x, labels)[0].backward()
            optimizer.step()
    return watching


def captured(path: Path, compiled: bool, wrong: bool = False) -> Path:
    trained(lambda m, o: tt.capture(m, path, keep="tensors", kinds=MODULE_KINDS, optimizer=o), compiled, wrong)
    return path


@pytest.mark.parametrize("isolated", [False, True], ids=["free", "isolated"])
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "other loss"])
def test_gradients_at_outputs_count_only_if_those_of_parameters_differ(
    tmp_path: Path, isolated: bool, wrong: bool
) -> None:
    reference = captured(tmp_path / "a", False)
    if isolated:
        check = trained(lambda m, o: tt.check(m, reference, optimizer=o), True, wrong)
        result = check.result
    else:
        result = tt.compare(reference, captured(tmp_path / "b", True, wrong))
    assert (result.verdict == "diverged") == wrong, result.sentence
    if wrong:
        assert result.first is not None and result.first.module == "", result.sentence
    elif isolated:  # nothing inside ran by itself
        assert result.sentence.startswith(
            "Of 4 modules, 1 ran on the reference's own inputs; all that was compared agrees"
        )
    else:
        assert result.sentence.startswith("Everything that both runs have matches")


def test_a_containers_own_parameter_is_made_by_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, bool] = {}

    def probe(pair: JudgedPair) -> bool:
        if pair.kind == "param_grad":
            key = pair.evidence.structure
            found[f"{key.module[pair.row]}.{key.path[pair.row]}"] = pair.is_made_by_container
        return False

    monkeypatch.setattr(table, "RULES", (*RULES, Rule("probe", probe, lambda pair: 0.0)))
    reference = captured(tmp_path / "a", False)
    with torch.autocast("cpu", torch.bfloat16):
        tt.compare(reference, captured(tmp_path / "b", False))
    assert found[".scale"] and not found["head.weight"]


class WithTerm(nn.Module):
    """Returns a term of its loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        term = hidden.square().mean()
        return nn.functional.cross_entropy(self.head(hidden), labels) + 0.01 * term, term


@pytest.mark.parametrize("way", ["tensors", "summary", "isolated"])
def test_a_term_of_a_loss_inside_a_graph_has_its_gradient_there(tmp_path: Path, way: str) -> None:
    def run(model: nn.Module) -> None:
        random = torch.Generator().manual_seed(1)
        model(torch.randn(32, 8, generator=random), torch.randint(4, (32,), generator=random))[0].backward()

    torch.manual_seed(0)
    model = WithTerm()
    keep = "summary" if way == "summary" else "tensors"
    with tt.capture(model, tmp_path / "a", keep=keep):
        run(model)
    model.zero_grad()
    compiled: Any = torch.compile(model, backend="aot_eager")
    if way == "isolated":
        with tt.check(compiled, tmp_path / "a") as check:
            run(compiled)
        result = check.result
    else:
        with tt.capture(compiled, tmp_path / "b", keep=keep):
            run(compiled)
        result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "match", result.sentence


class Layer(nn.Module):
    """Makes a bias, reads it, and returns it for the layers after it, as the first attention of a T5 does."""

    def __init__(self, makes_bias: bool) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)
        self.bias = nn.Embedding(6, 8) if makes_bias else None
        self.kept = 1.0
        """Share of the bias's gradient that its own code keeps."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            bias = self.bias(torch.arange(6))
            read = bias * self.kept + bias.detach() * (1 - self.kept)
        else:
            assert bias is not None
            read = bias
        return x + torch.tanh(self.mix(self.norm(x)) + read), bias


class Stack(nn.Module):
    def __init__(self, between: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(True), Layer(False), Layer(False)])
        self.between = between
        """Whether its own code changes the bias between the layers."""
        self.passed = 1.0
        """Factor of the gradient that comes back to the first layer's bias from the others."""

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.layers[0](x)
        if self.between:
            bias = bias * 0.5
        if self.passed != 1:
            bias = bias * self.passed + bias.detach() * (1 - self.passed)
        for layer in list(self.layers)[1:]:
            x, bias = layer(x, bias)
        return x


def _run(model: nn.Module) -> None:
    model(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))).square().mean().backward()


def _checked_in_layers(path: Path, between: bool, mistake: str = "", **options: Any) -> Any:
    torch.manual_seed(0)
    model = Stack(between)
    kinds = ("input", "output", "grad_input", "grad_output", "param_grad")
    with tt.capture(model, path, keep="tensors", kinds=kinds):
        _run(model)
    model.zero_grad()
    if mistake == "eps":
        model.layers[0].norm.eps = 0.1
    elif mistake == "inside":
        model.layers[0].kept = 0.5
    elif mistake == "between":
        model.passed = 0.5
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    with tt.check(model, path, **options) as check:
        _run(model)
    return check.result


_BETWEEN = pytest.mark.parametrize("between", [False, True], ids=["as it is", "changed between"])


@_BETWEEN
@pytest.mark.parametrize("options", [{}, {"truth": "float64"}, {"isolate": False}], ids=["plain", "truth", "free"])
def test_layers_that_are_compiled_one_by_one_may_read_what_they_return(
    tmp_path: Path, options: dict[str, Any], between: bool
) -> None:
    result = _checked_in_layers(tmp_path / "run", between, **options)
    assert result.verdict == "match", result.sentence


@_BETWEEN
def test_runs_of_layers_that_are_compiled_one_by_one_match(tmp_path: Path, between: bool) -> None:
    torch.manual_seed(0)
    model = Stack(between)
    for name in ("eager", "compiled"):
        if name == "compiled":
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        with tt.capture(model, tmp_path / name, kinds=("input", "output", "grad_input", "grad_output", "param_grad")):
            _run(model)
        model.zero_grad()
    for reference, candidate in ("eager", "compiled"), ("compiled", "eager"):
        result = tt.compare(tmp_path / reference, tmp_path / candidate)
        assert result.verdict == "match", result.sentence


@pytest.mark.parametrize(
    ("mistake", "between", "named"),
    [("eps", False, "layers.0"), ("eps", True, "layers.0"), ("inside", False, "layers.0"), ("between", False, "")],
)
def test_what_is_wrong_beside_a_compiled_layer_that_reads_what_it_returns(
    tmp_path: Path, mistake: str, between: bool, named: str
) -> None:
    result = _checked_in_layers(tmp_path / "run", between, mistake)
    assert [birth.module for birth in result.births] == [named], result.sentence


class Routed(nn.Module):
    """Weighs two experts by scores, which its own code uses, and shows them for a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.one, self.other = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scores = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        self.scores = self.gate(normed)
        weights = self.scores.softmax(-1)
        return x + weights[..., :1] * self.one(normed) + weights[..., 1:] * self.other(normed)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Routed(), Routed()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return x, self.layers[0].scores, self.layers[1].scores


def _run_router(model: nn.Module, weight: float) -> None:
    x, first, second = model(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)))
    loss = x.square().mean()
    if weight:
        loss = loss + weight * (first.square().mean() + second.square().mean())
    loss.backward()


@pytest.mark.parametrize("way", ["summary", "tensors", "isolated"])
@pytest.mark.parametrize("weight", [0.1, 0.0], ids=["in the loss", "not in the loss"])
@pytest.mark.parametrize(("mistake", "named"), [("", None), ("loss", ""), ("eps", "layers.0")])
def test_values_that_compiled_layers_show(
    tmp_path: Path, way: str, weight: float, mistake: str, named: str | None
) -> None:
    keep: Any = "summary" if way == "summary" else "tensors"
    kinds = ("input", "output", "grad_input", "grad_output", "param_grad")
    torch.manual_seed(0)
    model = Router()
    with tt.capture(model, tmp_path / "a", keep=keep, kinds=kinds):
        _run_router(model, weight)
    model.zero_grad()
    if mistake == "eps":
        model.layers[0].norm.eps = 0.1
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    watching: Any
    if way == "isolated":
        watching = tt.check(model, tmp_path / "a")
    else:
        watching = tt.capture(model, tmp_path / "b", keep=keep, kinds=kinds)
    with watching:
        _run_router(model, weight + 0.1 if mistake == "loss" else weight)
    result = watching.result if way == "isolated" else tt.compare(tmp_path / "a", tmp_path / "b")
    if named is None:
        assert result.verdict == "match", result.sentence
    else:
        assert result.first is not None and result.first.module == named, result.sentence
        if way == "isolated":
            assert {birth.module for birth in result.births} == {named}, result.sentence


class Rounded(torch.autograd.Function):
    """Rounds a gradient to another bfloat16, as a sum in another order would."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        signs = torch.arange(gradient.numel()).remainder(2).reshape(gradient.shape) * 2 - 1
        return (gradient.float() * (1 + 2**-8 * signs)).to(gradient.dtype)


class Attention(nn.Module):
    """The gradient of the keys' bias is zero in theory."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.is_rounded = False

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4
        if self.is_rounded:
            scores = Rounded.apply(scores)
        return self.norm(x + scores.softmax(-1) @ self.value(x))


@pytest.mark.parametrize(("wrong", "verdict"), [(False, "match"), (True, "diverged")])
def test_a_bias_that_cancels_out_in_a_layer_of_another_precision(tmp_path: Path, wrong: bool, verdict: str) -> None:
    """Both sides compute in bfloat16, one with a gradient that is rounded otherwise; nothing inside is recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), nn.Linear(16, 4))
    x = torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(1))
    kinds = ("input", "output", "grad_input", "grad_output", "param_grad")
    for name in ("eager", "compiled"):
        if name == "compiled":
            model.zero_grad()
            model[0].is_rounded = True
            model[0].compile(backend="aot_eager")
            if wrong:
                model[0].key.weight.register_hook(lambda gradient: gradient * 1.5)
        with tt.capture(model, tmp_path / name, kinds=kinds, keep="tensors"), torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().mean().backward()
    result = tt.compare(tmp_path / "eager", tmp_path / "compiled")
    assert result.verdict == verdict, result.sentence
    status = {
        (row["module"], row["path"]): row["status"] for row in result.table.to_pylist() if row["kind"] == "param_grad"
    }
    assert (status["0.key", "bias"] == "close") != wrong
