"""Models of torchvision and their ports in paddle.vision, with the same parameters, on several seeds."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it

import tensortap as tt
from field.kit.building import CLASSES, tv

from .measuring import Bench, Outcome, right_outcome

ROWS, SIZE, STEPS = 4, 64, 2


@dataclass(frozen=True)
class Ported:
    """A model of torchvision, trained in torch and in paddle."""

    model: str
    seed: int
    family: str = "resnet"
    """The family whose turn it is when the benchmark runs this pair."""

    def judged(self, bench: Bench, way: str) -> Outcome:
        keep = "summary" if way == "summary" else "tensors"
        paths = [bench.folder / f"{self.model} {self.seed} {keep} {side}" for side in ("torch", "paddle")]
        if way == "isolated":
            raise ValueError("a check runs in the reference's own framework")
        self._train(*paths, keep)
        result = tt.compare(*paths)
        for path in paths:
            shutil.rmtree(path)
        return right_outcome(f"{self.model}, seed {self.seed}", self.family, "torch to paddle", way, False, result)

    def _train(self, reference: Path, candidate: Path, keep: str) -> None:
        import paddle
        from paddle.vision import models

        torch.manual_seed(self.seed)
        ours = tv(self.model, **({"dropout": 0.0} if "mobilenet" in self.model else {}))("eager").train()
        theirs = getattr(models, self.model)(num_classes=CLASSES)
        for layer in theirs.sublayers():
            if isinstance(layer, paddle.nn.Dropout):
                layer.p = 0.0
        tt.transfer(ours, theirs, strict=True)
        random = np.random.default_rng(self.seed)
        data = [
            (random.standard_normal((ROWS, 3, SIZE, SIZE), dtype=np.float32), random.integers(CLASSES, size=ROWS))
            for _ in range(STEPS)
        ]
        ours_by = torch.optim.SGD(ours.parameters(), lr=1e-3)
        theirs_by = paddle.optimizer.SGD(1e-3, parameters=theirs.parameters())
        with tt.capture(ours, reference, keep=keep) as tap:
            for images, labels in data:
                ours_by.zero_grad()
                F.cross_entropy(ours(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
                ours_by.step()
                tap.step()
        with tt.capture(theirs, candidate, keep=keep) as tap:
            for images, labels in data:
                loss: Any = paddle.nn.functional.cross_entropy(
                    theirs(paddle.to_tensor(images)), paddle.to_tensor(labels)
                )
                loss.backward()
                theirs_by.step()
                theirs_by.clear_grad()
                tap.step()


PORTED = [Ported(model, seed) for model in ("resnet18", "mobilenet_v2") for seed in range(5)]
