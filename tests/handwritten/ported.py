"""Four of the models written again for paddle, with the same parameters, on several seeds."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tensortap as tt
from field.bench.measuring import Outcome, right_outcome

from .models import MODELS
from .running import training_of

STEPS = 2


@dataclass(frozen=True)
class Ported:
    """A model that is trained in torch and in paddle."""

    model: str
    seed: int

    def judged(self, folder: Path, way: str) -> Outcome:
        keep = "summary" if way == "summary" else "tensors"
        paths = [folder / f"{self.model} {self.seed} {keep} {side}" for side in ("torch", "paddle")]
        self._train(*paths, keep)
        result = tt.compare(*paths)
        for path in paths:
            shutil.rmtree(path)
        held_out = MODELS[self.model].held_out
        return right_outcome(f"paddle, seed {self.seed}", self.model, "torch to paddle", way, held_out, result)

    def _train(self, reference: Path, candidate: Path, keep: str) -> None:
        import paddle

        training = training_of(self.model, STEPS, self.seed)
        theirs = _layers()[self.model]()
        theirs.train()
        tt.transfer(training.model, theirs, strict=True)
        adam = self.seed % 2
        ours_by: Any = (torch.optim.AdamW if adam else torch.optim.SGD)(training.model.parameters(), lr=1e-3)
        kind = functools.partial(paddle.optimizer.AdamW, weight_decay=0.01) if adam else paddle.optimizer.SGD
        theirs_by: Any = kind(1e-3, parameters=theirs.parameters())
        with tt.capture(training.model, reference, keep=keep) as tap:
            for (batch,) in training.batches:
                ours_by.zero_grad()
                training.loss(training.model, batch).backward()
                ours_by.step()
                tap.step()
        with tt.capture(theirs, candidate, keep=keep) as tap:
            for (batch,) in training.batches:
                given = {name: paddle.to_tensor(value.numpy()) for name, value in batch.items()}
                _LOSSES[self.model](theirs, given).backward()
                theirs_by.step()
                theirs_by.clear_grad()
                tap.step()


def _next_token(model: Any, batch: Any) -> Any:
    import paddle.nn.functional as PF  # noqa: N812

    return PF.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def _classify(model: Any, batch: Any) -> Any:
    import paddle.nn.functional as PF  # noqa: N812

    return PF.cross_entropy(model(batch["images"]), batch["labels"])


def _predict(model: Any, batch: Any) -> Any:
    import paddle.nn.functional as PF  # noqa: N812

    return PF.cross_entropy(model(batch["sound"]).transpose([0, 2, 1]).flatten(0, 1), batch["labels"].flatten())


_LOSSES = {"gpt": _next_token, "resnet": _classify, "convnext": _classify, "wavenet": _predict}


@functools.cache
def _layers() -> dict[str, Callable[[], Any]]:
    """The models in paddle."""
    import paddle
    import paddle.nn.functional as PF  # noqa: N812
    from paddle import nn

    class CausalAttention(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

        def forward(self, x: Any) -> Any:
            rows, length, _ = x.shape
            q, k, v = self.qkv(x).reshape([rows, length, 3, 3, 8]).transpose([2, 0, 3, 1, 4]).unbind(0)
            scores = q.matmul(k, transpose_y=True) * 8**-0.5 + paddle.full([length, length], -1e9).triu(1)
            return self.out(PF.softmax(scores, -1).matmul(v).transpose([0, 2, 1, 3]).reshape([rows, length, 24]))

    class Block(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attn, self.norm2 = nn.LayerNorm(24), CausalAttention(), nn.LayerNorm(24)
            self.up, self.down = nn.Linear(24, 64), nn.Linear(64, 24)

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.norm1(x))
            return x + self.down(PF.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(50, 24), self.create_parameter([10, 24])
            self.blocks, self.norm = nn.LayerList([Block() for _ in range(2)]), nn.LayerNorm(24)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.norm(x).matmul(self.embed.weight, transpose_y=True)

    def conv(given: int, made: int, size: int, stride: int) -> Any:
        return nn.Conv2D(given, made, size, stride, size // 2, bias_attr=False)

    class Basic(nn.Layer):
        def __init__(self, given: int, made: int, stride: int = 1) -> None:
            super().__init__()
            self.conv1, self.bn1 = conv(given, made, 3, stride), nn.BatchNorm2D(made)
            self.conv2, self.bn2 = conv(made, made, 3, 1), nn.BatchNorm2D(made)
            self.short = nn.Identity()
            if stride > 1 or given != made:
                self.short = nn.Sequential(conv(given, made, 1, stride), nn.BatchNorm2D(made))

        def forward(self, x: Any) -> Any:
            y = PF.relu(self.bn1(self.conv1(x)))
            return PF.relu(self.bn2(self.conv2(y)) + self.short(x))

    class ResNet(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(conv(3, 8, 3, 1), nn.BatchNorm2D(8), nn.ReLU())
            self.layers = nn.Sequential(Basic(8, 8), Basic(8, 16, 2), Basic(16, 16), Basic(16, 32, 2))
            self.head = nn.Linear(32, 5)

        def forward(self, images: Any) -> Any:
            return self.head(self.layers(self.stem(images)).mean([2, 3]))

    class ConvNextBlock(nn.Layer):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.depthwise = nn.Conv2D(width, width, 5, padding=2, groups=width)
            self.norm = nn.LayerNorm(width, epsilon=1e-6)
            self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
            self.scale = self.create_parameter([width])

        def forward(self, x: Any) -> Any:
            y = self.norm(self.depthwise(x).transpose([0, 2, 3, 1]))
            return x + (self.scale * self.down(PF.gelu(self.up(y)))).transpose([0, 3, 1, 2])

    class ConvNext(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.stage1 = nn.Conv2D(3, 12, 2, 2), nn.Sequential(ConvNextBlock(12), ConvNextBlock(12))
            self.smaller, self.stage2 = nn.Conv2D(12, 20, 2, 2), nn.Sequential(ConvNextBlock(20))
            self.norm, self.head = nn.LayerNorm(20), nn.Linear(20, 5)

        def forward(self, images: Any) -> Any:
            return self.head(self.norm(self.stage2(self.smaller(self.stage1(self.stem(images)))).mean([2, 3])))

    class Gated(nn.Layer):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.dilation = dilation
            self.conv = nn.Conv1D(12, 24, 2, dilation=dilation)
            self.skip, self.stay = nn.Conv1D(12, 12, 1), nn.Conv1D(12, 12, 1)

        def forward(self, x: Any) -> Any:
            f, g = self.conv(PF.pad(x, [self.dilation, 0], data_format="NCL")).chunk(2, 1)
            y = paddle.tanh(f) * PF.sigmoid(g)
            return x + self.stay(y), self.skip(y)

    class WaveNet(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.begin, self.layers = nn.Conv1D(1, 12, 1), nn.LayerList([Gated(2**n) for n in range(4)])
            self.end1, self.end2 = nn.Conv1D(12, 16, 1), nn.Conv1D(16, 8, 1)

        def forward(self, sound: Any) -> Any:
            x, total = self.begin(sound), 0.0
            for layer in self.layers:
                x, skip = layer(x)
                total = total + skip
            return self.end2(PF.relu(self.end1(PF.relu(total))))

    return {"gpt": Gpt, "resnet": ResNet, "convnext": ConvNext, "wavenet": WaveNet}


PORTED = [Ported(model, seed) for model in _LOSSES for seed in range(5)]
