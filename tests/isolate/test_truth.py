"""Checks and comparisons with a truth: who rounds more, who is wrong, and what a truth must not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import hooks_on
from tensortap.core.causes import Cause
from tensortap.core.records import EXIT_CODES, Comparison
from tensortap.errors import UsageError
from tensortap.report.terminal.assertion import message

WIDTH = 32
KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")


class Norm(nn.Module):
    """Scales rows in float32, and rounds before the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + 0.3 * torch.randn(WIDTH)), 1e-6

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scaled(x.float()).to(x.dtype)


class WeightFirst(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * self.scaled(x.float())).to(x.dtype)


class NotUpcast(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scaled(x)


class Angles(nn.Module):
    """The factors of a rotary embedding, in the dtype of its input."""

    upcast = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if self.upcast else x.dtype
        speed = 100.0 ** (-torch.arange(WIDTH, dtype=dtype) / WIDTH)
        return torch.outer(torch.arange(x.shape[1], dtype=dtype), speed).cos().to(x.dtype)


class Attention(nn.Module):
    upcast = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) * 0.1
        if self.upcast:
            shares = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
        else:
            shares = (scores - scores.amax(-1, keepdim=True)).exp()
            shares = shares / shares.sum(-1, keepdim=True)
        return self.out(shares @ v)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.angles, self.norm = nn.Embedding(50, WIDTH), Angles(), Norm()
        self.attention, self.drop, self.last = Attention(), nn.Dropout(dropout), Norm()
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.drop(self.attention(self.norm(x * self.angles(x))))
        return self.head(self.last(x))


def build(dtype: torch.dtype = torch.bfloat16, dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    model = Net(dropout).bfloat16().to(dtype)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(3)
    return model


def step(model: nn.Module) -> None:
    tokens = torch.arange(4 * 32).view(4, 32) * 7 % 50
    model(tokens).float().logsumexp(-1).sum().backward()


def capture(model: nn.Module, path: Path, **options: Any) -> Path:
    with tt.capture(model, path, **{"keep": "tensors", "kinds": KINDS, **options}):
        step(model)
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(build(), tmp_path_factory.mktemp("truth") / "reference")


def check(model: nn.Module, reference: Path, truth: Any = "float64", **options: Any) -> Comparison:
    with tt.check(model, reference, truth=truth, **options) as checked:
        step(model)
    return checked.result


def changed(change: Callable[[Net], None]) -> Net:
    model = build()
    change(model)
    return model


def in_chunks(model: Net) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):

            def forward(x: torch.Tensor, linear: nn.Linear = module) -> torch.Tensor:
                (a, b), (u, v) = x.float().chunk(2, -1), linear.weight.float().chunk(2, -1)
                return (a @ u.T + b @ v.T).to(x.dtype)

            module.forward = forward


def test_a_norm_that_is_not_upcast_rounds_once_more(reference: Path) -> None:
    result = check(changed(lambda model: setattr(model.norm, "__class__", NotUpcast)), reference)
    assert result.verdict == "imprecise" and EXIT_CODES[result.verdict] == 4
    assert [(birth.module, birth.cause, birth.status) for birth in result.births] == [
        ("norm", Cause.LESS_EXACT, "imprecise")
    ]
    assert result.first is result.births[0] and result.first.truth is not None
    assert 1.2 < result.first.truth.ratio < 1.5 and 0.5 < result.first.truth.roundings < 2
    assert "norm (Norm) rounds about once more than the reference's" in result.sentence
    assert "Within tolerance, every module agrees" in result.sentence
    assert "the candidate is less exact!" in message(result, None)
    assert not any(row["birth"] for row in result.rows)


def test_the_softmax_of_a_container_is_found_in_its_own_code(reference: Path) -> None:
    result = check(changed(lambda model: setattr(model.attention, "upcast", False)), reference)
    assert result.verdict == "imprecise" and result.first is not None
    assert (result.first.module, result.first.container) == ("attention", "attention")
    assert "The own code of attention rounds" in result.sentence and "attention.out (input 0)" in result.sentence


def test_a_kernel_that_only_sums_in_another_order_matches(reference: Path) -> None:
    result = check(changed(in_chunks), reference)
    assert result.verdict == "match" and result.counts["close"] and not result.births and not result.notes


def test_a_more_exact_candidate_is_a_note(reference: Path) -> None:
    result = check(changed(lambda model: setattr(model.norm, "__class__", WeightFirst)), reference)
    assert result.verdict == "match"
    assert any("the candidate is the more exact one in norm" in note for note in result.notes)


def test_lost_precision_is_told_from_another_formula(reference: Path) -> None:
    coarse = check(changed(lambda model: setattr(model.angles, "upcast", False)), reference)
    assert coarse.first is not None and coarse.first.module == "angles" and coarse.verdict == "diverged"
    assert "the candidate loses precision" in coarse.sentence
    other = changed(lambda model: setattr(model.last, "eps", 0.5))
    formula = check(other, reference)
    assert formula.first is not None and formula.first.module == "last"
    assert "the two compute different things, or the reference is the less exact one" in formula.sentence
    # The reference's own model knows which of the two is meant.
    known = check(other, reference, truth=build())
    assert "The candidate is the one at fault" in known.sentence


def test_a_truth_changes_nothing(tmp_path: Path) -> None:
    """Not the random numbers, buffers and gradients of the model; and its own hooks run once."""

    def noisy() -> tuple[nn.Module, list[str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Norm8())
        fired: list[str] = []
        model[0].register_forward_hook(lambda *_: fired.append("hook"))
        return model.bfloat16(), fired

    class Norm8(nn.Module):
        rounds = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.bfloat16().to(x.dtype) * 0.3 if self.rounds else x.float() * 0.3
            return x.bfloat16()

    batch = torch.randn(64, 8).bfloat16()
    model, _ = noisy()
    with tt.capture(model, tmp_path / "reference", keep="tensors", kinds=KINDS):
        model(batch).float().sum().backward()
    left: list[Any] = []
    for truth in (None, "float64"):
        model, fired = noisy()
        model[3].rounds = True
        with tt.check(model, tmp_path / "reference", truth=truth) as checked:
            torch.manual_seed(7)
            model(batch).float().sum().backward()
        left.append((fired, torch.rand(3), [*model.state_dict().values()], [p.grad for p in model.parameters()]))
        assert hooks_on(model) == 1  # the test's own
    for one, other in zip(*left, strict=True):
        assert len(one) == len(other)
        assert all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
        )
    assert any("draw random numbers: 2" in note for note in checked.result.notes)


def test_a_model_that_does_not_run_in_float64_has_no_truth(reference: Path) -> None:
    class Picky(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == torch.bfloat16, "bfloat16 only"
            return self.weight * self.scaled(x)

    result = check(changed(lambda model: setattr(model.norm, "__class__", Picky)), reference)
    assert result.verdict == "match"
    assert any("does not run in float64 (AssertionError: bfloat16 only" in note for note in result.notes)
    assert "Whether norm" in result.sentence and "is not judged: no truth." in result.sentence


class ByHand(torch.autograd.Function):
    """A product whose weight gradient is summed over eight parts, in some dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        parts = zip(gradient.flatten(0, 1).chunk(8), x.flatten(0, 1).chunk(8), strict=True)
        total: Any = sum(one.to(ctx.dtype).T @ other.to(ctx.dtype) for one, other in parts)
        return gradient @ weight, total.to(weight.dtype), None


def backward_by_hand(dtype: torch.dtype) -> Callable[[Net], None]:
    def change(model: Net) -> None:
        inner = model.attention.out  # a name of the original in a closure, which a copy must not call
        inner.forward = lambda x: ByHand.apply(x, inner.weight, dtype)

    return change


class SoftmaxByHand(torch.autograd.Function):
    """A softmax whose backward is not upcast."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        shares = scores.softmax(-1, dtype=torch.float32)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        shares, gradient = ctx.saved_tensors[0].bfloat16(), gradient.bfloat16()
        return (gradient - (gradient * shares).sum(-1, keepdim=True)) * shares


class CoarseBackward(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(SoftmaxByHand.apply(q @ k.transpose(1, 2) * 0.1).to(x.dtype) @ v)


def test_a_backward_that_sums_in_bfloat16_is_named(reference: Path) -> None:
    model = changed(backward_by_hand(torch.bfloat16))
    result = check(model, reference)
    assert result.verdict == "imprecise" and result.first is not None and result.first.truth is not None
    assert [(birth.module, birth.key.kind) for birth in result.births] == [("attention.out", "param_grad")]
    assert 1.5 < result.first.truth.ratio < 4
    assert "its param_grad weight is" in result.sentence and "from the float64 result" in result.sentence
    swapped = check(build(), capture(model, reference.parent / "coarse"))
    assert swapped.verdict == "match"
    assert any("the candidate is the more exact one in attention.out" in note for note in swapped.notes)


def test_the_same_backward_with_longer_sums_matches(reference: Path) -> None:
    result = check(changed(backward_by_hand(torch.float32)), reference)
    assert result.verdict == "match" and not result.births and not result.notes


def test_a_copy_that_calls_the_model_itself_has_no_truth(reference: Path) -> None:
    def change(model: Net) -> None:
        holder = {"layer": model.attention.qkv}
        model.attention.forward = lambda x: (
            Attention.forward(model.attention, x)
            if holder["layer"](x) is x
            else (model.attention.out(holder["layer"](x).chunk(3, -1)[2]))
        )

    left = []
    for truth in (None, "float64"):
        model = changed(change)
        result = check(model, reference, truth)
        left.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*left, strict=True))
    assert any("the copy still calls attention.qkv of the model itself" in note for note in result.notes)


def test_a_softmax_whose_backward_is_not_upcast_is_named(reference: Path) -> None:
    result = check(changed(lambda model: setattr(model.attention, "__class__", CoarseBackward)), reference)
    assert [(birth.module, birth.key.kind) for birth in result.births] == [("attention", "grad_output")]
    assert "the gradient that it sends back to attention.qkv (grad_output 0)" in result.sentence


def test_gradients_of_micro_steps_and_of_a_shared_backward(tmp_path: Path) -> None:
    """Each backward has a truth of its own; one of several forwards has the sum of theirs."""
    tokens = torch.arange(4 * 32).view(4, 32) * 7 % 50

    def apart(model: nn.Module) -> None:
        for part in (tokens, tokens.flip(1)):
            model(part).float().logsumexp(-1).sum().backward()

    def together(model: nn.Module) -> None:
        sum(model(part).float().logsumexp(-1).sum() for part in (tokens, tokens.flip(1))).backward()

    for number, run in enumerate((apart, together)):
        model = build()
        with tt.capture(model, tmp_path / str(number), keep="tensors", kinds=KINDS):
            run(model)
        for dtype, verdict in ((torch.bfloat16, "imprecise"), (torch.float32, "match")):
            model = changed(backward_by_hand(dtype))
            with tt.check(model, tmp_path / str(number), truth="float64") as checked:
                run(model)
            assert checked.result.verdict == verdict
            assert {birth.module for birth in checked.result.births} <= {"attention.out"}


def test_a_gradient_that_is_zero_in_theory_is_not_judged(tmp_path: Path) -> None:
    """What a bias before a softmax gets is rounding, on both sides."""

    class Shifted(nn.Module):
        coarse = False

        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 0.5 + self.shift.sum() if self.coarse else (x.float() * 0.5 + self.shift.float().sum()).to(x.dtype)
            return x.softmax(-1)

    def run(model: nn.Module) -> None:
        torch.manual_seed(3)
        batch = torch.randn(64, WIDTH).bfloat16()
        (model(batch).float() * torch.randn(64, WIDTH)).sum().backward()

    model = Shifted().bfloat16()
    with tt.capture(model, tmp_path / "reference", keep="tensors", kinds=KINDS):
        run(model)
    model = Shifted().bfloat16()
    model.coarse = True
    with tt.check(model, tmp_path / "reference", truth="float64") as checked:
        run(model)
    assert not any(birth.key.kind == "param_grad" for birth in checked.result.births if birth.status == "imprecise")


def test_an_operation_without_float64_is_not_judged(reference: Path) -> None:
    library = torch.library.Library("tensortap_test", "DEF")
    library.define("halved(Tensor x) -> Tensor")

    def halved(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("halved has no kernel for double")
        return x / 2

    library.impl("halved", halved, "CompositeExplicitAutograd")

    class Halving(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                torch.ops.tensortap_test.halved(x)
            return self.weight * self.scaled(x)

    def change(model: Net) -> None:
        model.norm.__class__ = Halving
        backward_by_hand(torch.bfloat16)(model)

    result = check(changed(change), reference)
    assert any(
        "not judged, because tensortap_test::halved has no float64 kernel: norm" in note for note in result.notes
    )
    assert {birth.module for birth in result.births} == {"attention.out"}  # the rest of the model has a truth


def test_wrong_uses_are_refused(reference: Path) -> None:
    for options, words in (
        ({"truth": "float128"}, "neither"),
        ({"truth": "float64", "isolate": False}, "isolate=True"),
    ):
        with pytest.raises(UsageError, match=words):
            tt.check(build(), reference, **options)
    with pytest.raises(UsageError, match="in no longer dtype"):
        tt.compare(reference, reference, truth=reference)


@pytest.mark.parametrize("keep", ["tensors", "summary"])
def test_a_third_run_as_truth(keep: str, reference: Path, tmp_path: Path) -> None:
    forward = {"keep": keep, "kinds": ("input", "output")}
    truth = capture(build(torch.float32), tmp_path / "truth", **forward)
    coarse = changed(lambda model: setattr(model.norm, "__class__", NotUpcast))
    wrong = changed(lambda model: setattr(model.last, "eps", 0.5))
    runs = [capture(model, tmp_path / name, **forward) for model, name in ((coarse, "coarse"), (wrong, "wrong"))]
    result = tt.compare(reference, runs[0], truth=truth)
    if keep == "tensors":
        assert result.verdict == "imprecise" and result.first is not None and result.first.module == "norm"
        assert "truth run's result" in result.sentence
        assert tt.compare(runs[0], reference, truth=truth).verdict == "match"  # the other way round it is more exact
    else:
        assert result.verdict == "match"  # sketches are too rough to count single roundings
    result = tt.compare(reference, runs[1], truth=truth)
    assert result.first is not None and result.first.module == "last"
    assert "The candidate is the one at fault" in result.sentence
    assert "The reference is the one at fault" in tt.compare(runs[1], reference, truth=truth).sentence


def test_gradients_against_a_third_run(reference: Path, tmp_path: Path) -> None:
    truth = capture(build(torch.float32), tmp_path / "truth")
    coarse = capture(changed(backward_by_hand(torch.bfloat16)), tmp_path / "coarse")
    result = tt.compare(reference, coarse, truth=truth)
    assert result.verdict == "imprecise"
    assert [(birth.module, birth.key.kind) for birth in result.births] == [("attention.out", "param_grad")]
    assert tt.compare(coarse, reference, truth=truth).verdict == "match"
    for change in (backward_by_hand(torch.float32), in_chunks):
        other = capture(changed(change), tmp_path / "other", overwrite=True)
        assert tt.compare(reference, other, truth=truth).verdict == "match"


def test_modules_of_transformers(tmp_path: Path) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32, vocab_size=50
    )

    def model(attention: str = "eager") -> nn.Module:
        torch.manual_seed(0)
        config._attn_implementation = attention
        made = llama.LlamaModel(config)
        for parameter in made.parameters():
            parameter.data.mul_(4) if parameter.ndim == 2 else parameter.data.add_(0.2 * torch.randn_like(parameter))
        return made.bfloat16()

    class Coarse(llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def run(module: nn.Module) -> None:
        module(input_ids=torch.arange(128).view(2, 64) * 7 % 50, use_cache=False)

    def against(candidate: nn.Module) -> Comparison:
        with tt.check(candidate, tmp_path / "reference", truth="float64") as checked:
            run(candidate)
        return checked.result

    reference = model()
    with tt.capture(reference, tmp_path / "reference", keep="tensors", kinds=("input", "output")):
        run(reference)
    fused = against(model("sdpa"))
    assert fused.verdict == "match" and fused.counts["close"] and not fused.births
    coarse = model()
    coarse.layers[0].post_attention_layernorm.__class__ = Coarse
    result = against(coarse)
    assert [(birth.module, birth.cause) for birth in result.births] == [
        ("layers.0.post_attention_layernorm", Cause.LESS_EXACT)
    ]
    assert result.verdict == "imprecise"


class Scan(nn.Module):
    """A recurrence in float32, of short numbers, that hands a module inside long ones."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, state = self.linear(x).to(self.dtype), 0.0
        states = [state := 0.9 * state + each for each in made.unbind(1)]
        return self.norm(torch.stack(states, 1).float()).to(x.dtype)


def test_a_truth_decides_what_rounding_inside_code_leaves_open(tmp_path: Path) -> None:
    def run(model: nn.Module) -> None:
        model(torch.linspace(-1, 1, 4 * 16 * WIDTH).view(4, 16, WIDTH).bfloat16()).float().logsumexp(
            -1
        ).sum().backward()

    def scan(dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        model = Scan()
        model.linear.bfloat16()
        model.dtype = dtype
        return model

    with tt.capture(right := scan(), tmp_path / "reference", keep="tensors", kinds=KINDS):
        run(right)
    model = scan(torch.bfloat16)
    with tt.check(model, tmp_path / "reference", truth="float64") as checked:
        run(model)
    result = checked.result
    assert (result.verdict, result.first and result.first.module) == ("imprecise", ""), result.sentence
