"""paddle.Model.fit with evaluation before, between and after.

usage: hapi.py RESULT [mistake]
"""

import sys
from pathlib import Path

import numpy as np
import paddle


class Digits(paddle.io.Dataset):
    def __init__(self, count: int) -> None:
        random = np.random.default_rng(8)
        self.inputs = random.standard_normal((count, 6)).astype("float32")
        self.labels = random.integers(0, 3, (count, 1))

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[index], self.labels[index]

    def __len__(self) -> int:
        return len(self.inputs)


def main(result: str, mistake: str = "") -> None:
    paddle.seed(8)
    norm = paddle.nn.LayerNorm(8, epsilon=1e-3 if mistake else 1e-5)
    network = paddle.nn.Sequential(paddle.nn.Linear(6, 8), norm, paddle.nn.ReLU(), paddle.nn.Linear(8, 3))
    model = paddle.Model(network)
    model.prepare(paddle.optimizer.AdamW(1e-2, parameters=network.parameters()), paddle.nn.CrossEntropyLoss())
    model.evaluate(Digits(8), batch_size=4, verbose=0)
    model.fit(Digits(16), Digits(8), batch_size=4, epochs=2, eval_freq=1, shuffle=False, verbose=0)
    losses = model.evaluate(Digits(8), batch_size=4, verbose=0)["loss"]
    parameters = b"".join(parameter.numpy().tobytes() for parameter in network.parameters())
    Path(result).write_bytes(repr(losses).encode() + parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])
