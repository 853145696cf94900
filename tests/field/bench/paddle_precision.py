"""Paddle models in float32 whose layers round to bfloat16 inside, forward or backward, and right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paddle
import paddle.nn.functional as F  # noqa: N812 - as everyone writes it
from paddle import nn

Change = Callable[[Any], None]
"""Replaces the forward of a layer."""


def _rounded(x: Any) -> Any:
    return x.astype("bfloat16").astype("float32")


class _Rounds(paddle.autograd.PyLayer):  # type: ignore[misc]  # paddle is untyped to us
    """Passes a value on, and rounds its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _rounded(gradient)


def _with_input(change: Callable[[Any], Any]) -> Change:
    def apply(layer: Any) -> None:
        inner = layer.forward
        layer.forward = lambda x, *rest, **named: inner(change(x), *rest, **named)

    return apply


def _with_output(change: Callable[[Any], Any]) -> Change:
    def apply(layer: Any) -> None:
        inner = layer.forward
        layer.forward = lambda *given, **named: change(inner(*given, **named))

    return apply


def _summed_in_two(layer: Any) -> None:
    def forward(x: Any) -> Any:
        half = layer.weight.shape[0] // 2
        result = x[..., :half] @ layer.weight[:half] + x[..., half:] @ layer.weight[half:]
        return result if layer.bias is None else result + layer.bias

    layer.forward = forward


def _norm_by_hand(layer: Any) -> None:
    def forward(x: Any) -> Any:
        centred = x - x.mean(-1, keepdim=True)
        scale = paddle.rsqrt((centred * centred).mean(-1, keepdim=True) + layer._epsilon)
        return centred * scale * layer.weight + layer.bias

    layer.forward = forward


def _in_halves(layer: Any) -> None:
    inner = layer.forward
    layer.forward = lambda x: paddle.concat([inner(part) for part in x.chunk(2)])


MISTAKES: dict[str, Change] = {
    "input rounded": _with_input(_rounded),
    "output rounded": _with_output(_rounded),
    "input gradient rounded": _with_input(_Rounds.apply),
    "output gradient rounded": _with_output(_Rounds.apply),
}
RIGHT: dict[str, tuple[type, Change]] = {
    "sums in two": (nn.Linear, _summed_in_two),
    "norms by hand": (nn.LayerNorm, _norm_by_hand),
    "halves of the batch": (nn.Conv2D, _in_halves),
}


def _encoder() -> Any:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, activation="gelu"), 2)


def _texts() -> Any:
    return paddle.randn([4, 12, 32])


def _pictures(size: int) -> Callable[[], Any]:
    return lambda: paddle.randn([4, 3, size, size])


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "TransformerEncoder": (_encoder, _texts),
    "resnet18": (lambda: paddle.vision.models.resnet18(num_classes=10), _pictures(32)),
    "mobilenet_v2": (lambda: paddle.vision.models.mobilenet_v2(scale=0.25, num_classes=10), _pictures(32)),
    "squeezenet1_1": (lambda: paddle.vision.models.squeezenet1_1(num_classes=10), _pictures(48)),
}


def built(model: str) -> Any:
    """Return a new model, always the same; without dropout, which has no truth."""
    paddle.seed(0)
    made = MODELS[model][0]()
    for layer in made.sublayers():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return made


def step(name: str, model: Any) -> None:
    """One forward and backward."""
    paddle.seed(1)
    batch = MODELS[name][1]()
    made = model(batch)
    weights = paddle.to_tensor((paddle.arange(made.size) * 7 % 11).reshape(made.shape).astype("float32") - 5)
    (F.softsign(made) * weights).mean().backward()


def places(model: Any) -> Iterator[str]:
    """Yield a layer of each kind: products, convolutions, norms."""
    for kinds in ((nn.Linear,), (nn.Conv2D,), (nn.LayerNorm, nn.BatchNorm2D)):
        found = [name for name, layer in model.named_sublayers() if isinstance(layer, kinds)]
        if found:
            yield found[len(found) // 2]


def layer_of(model: Any, name: str) -> Any:
    return dict(model.named_sublayers())[name]
