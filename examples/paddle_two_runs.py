"""Train one PaddlePaddle model twice, with a mistake in the second, and let tensortap name it.

python examples/paddle_two_runs.py
"""

from __future__ import annotations

import paddle
from paddle import nn

import tensortap as tt


def build(slope: float) -> nn.Layer:
    paddle.seed(0)
    return nn.Sequential(
        nn.Conv2D(3, 8, 3, padding=1),
        nn.BatchNorm2D(8),
        nn.LeakyReLU(slope),
        nn.Conv2D(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 10),
    )


def train(model: nn.Layer, path: str) -> None:
    optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
    images = paddle.linspace(-1, 1, 4 * 3 * 8 * 8).reshape([4, 3, 8, 8])
    labels = paddle.to_tensor([1, 3, 5, 7])
    with tt.capture(model, path, optimizer=optimizer, overwrite=True):
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()


def main() -> None:
    train(build(slope=0.01), "runs/paddle-reference")
    train(build(slope=0.02), "runs/paddle-candidate")  # the mistake
    print(tt.compare("runs/paddle-reference", "runs/paddle-candidate"))


if __name__ == "__main__":
    main()
