"""A truth for paddle models. On a CPU paddle computes nothing in bfloat16, so layers here compute in float32 and pass
bfloat16 values on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import paddle.nn.functional as F  # noqa: N812 - as everyone writes it
import pytest
from paddle import nn

import tensortap as tt
from tensortap.core.causes import Cause
from tensortap.core.records import Comparison

WIDTH = 32
KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")


def rounded(x: Any) -> Any:
    return x.astype("bfloat16").astype("float32")


class Product(nn.Layer):
    """A matrix product of bfloat16 values, summed in float32 and rounded once."""

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        self.weight = self.create_parameter([WIDTH, outputs])

    def forward(self, x: Any) -> Any:
        return (x.astype("float32") @ self.weight).astype("bfloat16")


class Norm(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([WIDTH], default_initializer=nn.initializer.Uniform(0.5, 1.5))

    def forward(self, x: Any) -> Any:
        x = x.astype("float32")
        return (x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight).astype("bfloat16")


class CoarseNorm(Norm):
    def forward(self, x: Any) -> Any:
        x = x.astype("float32")
        scale = rounded(paddle.rsqrt(rounded(x * x).mean(-1, keepdim=True) + 1e-6))
        return (rounded(x * scale) * self.weight).astype("bfloat16")


class RoundedSums(paddle.autograd.PyLayer):  # type: ignore[misc]  # paddle is untyped to us
    """A product whose weight gradient is summed over rows in bfloat16, and the rest as it should be."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensor()
        total = paddle.zeros_like(weight)
        for given, sent in zip(x.flatten(0, -2).chunk(8), gradient.flatten(0, -2).chunk(8), strict=True):
            total = rounded(total + given.T @ sent)
        return gradient @ weight.T, total


class RoundedBackward(Product):
    def forward(self, x: Any) -> Any:
        return RoundedSums.apply(x.astype("float32"), self.weight).astype("bfloat16")


class OtherOrder(Product):
    def forward(self, x: Any) -> Any:
        x, half = x.astype("float32"), WIDTH // 2
        return (x[..., :half] @ self.weight[:half] + x[..., half:] @ self.weight[half:]).astype("bfloat16")


class Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = Norm(), Product(), Product()

    def forward(self, x: Any) -> Any:
        return self.last(F.relu(self.first(self.norm(x)).astype("float32")).astype("bfloat16"))


def build() -> Net:
    paddle.seed(0)
    return Net()


def step(model: nn.Layer) -> None:
    paddle.seed(1)
    batch = paddle.randn([8, 16, WIDTH]).astype("bfloat16")
    batch.stop_gradient = False
    model(batch).astype("float32").square().mean().backward()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("truth") / "reference"
    model = build()
    with tt.capture(model, path, keep="tensors", kinds=KINDS):
        step(model)
    return path


def check(reference: Path, change: Callable[[Net], None], run: Callable[[Any], None] = step) -> Comparison:
    model = build()
    change(model)
    with tt.check(model, reference, truth="float64") as checked:
        run(model)
    return checked.result


def becomes(layer: str, other: type) -> Callable[[Net], None]:
    return lambda model: setattr(getattr(model, layer), "__class__", other)


def test_a_layer_that_rounds_more_is_named(reference: Path) -> None:
    result = check(reference, becomes("norm", CoarseNorm))
    assert result.verdict == "imprecise" and result.first is not None
    assert (result.first.module, result.first.cause) == ("norm", Cause.LESS_EXACT)


def test_a_backward_that_rounds_more_is_named(reference: Path) -> None:
    """A PyLayer runs in float64 in the copy, its backward as well."""
    result = check(reference, becomes("last", RoundedBackward))
    assert result.first is not None and result.first.module == "last"
    assert result.first.key.kind == "param_grad" and result.first.truth is not None
    assert result.first.truth.reference < 1e-6 < 1e-3 < result.first.truth.candidate
    assert result.verdict == "imprecise" and "is less exact than the reference's" in result.sentence


def test_another_order_of_sums_matches(reference: Path) -> None:
    result = check(reference, becomes("first", OtherOrder))
    assert result.verdict == "match" and not result.births and not result.notes


def test_a_truth_changes_nothing(reference: Path) -> None:
    """Not the operations of paddle, its default dtype, the model's gradients, or random numbers."""
    left = []
    operations = dict(vars(paddle._C_ops))
    for truth in (None, "float64"):
        model = build()
        becomes("norm", CoarseNorm)(model)
        with tt.check(model, reference, truth=truth):
            step(model)
        left.append([*model.parameters(), *(each.grad for each in model.parameters()), paddle.rand([3])])
    assert all(bool((one == other).all()) for one, other in zip(*left, strict=True))
    assert vars(paddle._C_ops) == operations and paddle.get_default_dtype() == "float32"


def test_an_operation_without_float64_is_not_judged(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = paddle._C_ops.rsqrt

    def picky(x: Any) -> Any:
        if x.dtype == paddle.float64:
            raise RuntimeError("no kernel for float64")
        return own(x)

    monkeypatch.setattr(paddle._C_ops, "rsqrt", picky)
    result = check(reference, becomes("norm", CoarseNorm))
    assert any("rsqrt has no float64 kernel: norm" in note for note in result.notes)
    assert not result.births


def test_dropout_has_no_truth(tmp_path: Path) -> None:
    class Noisy(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm()

        def forward(self, x: Any) -> Any:
            return F.dropout(self.norm(x).astype("float32"), 0.5, training=True)

    paddle.seed(0)
    model = Noisy()
    with tt.capture(model, tmp_path / "reference", keep="tensors", kinds=KINDS):
        step(model)
    model.norm.__class__ = CoarseNorm
    with tt.check(model, tmp_path / "reference", truth="float64") as checked:
        paddle.seed(7)
        model(paddle.randn([8, 16, WIDTH]).astype("bfloat16")).square().mean().backward()
    assert any("1 modules that draw random numbers: (root)" in note for note in checked.result.notes)


def test_a_transformer_of_paddle(tmp_path: Path) -> None:
    """In float32, the copy has all modules in float64, and lost precision is told from another formula."""

    def encoder() -> nn.Layer:
        paddle.seed(0)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.0), 2)

    def run(model: nn.Layer) -> None:
        paddle.seed(1)
        model(paddle.randn([4, 12, WIDTH])).square().mean().backward()

    model = encoder()
    with tt.capture(model, tmp_path / "reference", keep="tensors", kinds=KINDS):
        run(model)
    for change, module, sentence in (
        (lambda x: rounded(x), "layers.1.linear1", "the candidate loses precision"),
        (lambda x: x * 1.001, "layers.1.linear1", "the two compute different things"),
    ):
        model = encoder()
        inner = model.layers[1].linear1.forward
        model.layers[1].linear1.forward = lambda x, inner=inner, change=change: inner(change(x))
        with tt.check(model, tmp_path / "reference", truth="float64") as checked:
            run(model)
        assert checked.result.first is not None and checked.result.first.module == module
        assert sentence in checked.result.sentence
