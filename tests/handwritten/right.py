"""Pairs of right runs: the same maths computed in another way. None of them may raise an alarm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from field.kit.mistake import nothing
from field.kit.patches import Apply, both, trains
from field.kit.running import loss_of

from . import differences as d
from .models import MODELS
from .running import STEPS, fitted, training_of


@dataclass(frozen=True)
class Right:
    """Two right trainings of one model."""

    name: str
    model: str
    candidate: Apply = nothing
    reference: Apply = nothing
    common: Apply = nothing
    steps: int = STEPS
    seed: int = 0
    noise: bool = False
    """Whether the noise of the reference is measured."""
    isolated: bool = True
    """Whether a check suits it."""

    @property
    def held_out(self) -> bool:
        return MODELS[self.model].held_out


def _pairs_of(name: str, number: int) -> Iterator[Right]:
    of, few = MODELS[name], (1, 3, 2)[number % 3]
    training = training_of(name)
    modules = list(training.model.modules())
    pictures = any(isinstance(module, nn.Conv2d) for module in modules)
    floats = any(v.is_floating_point() and v.ndim > 1 for v in training.batches[0][0].values())
    optimizers = list(d.OPTIMIZERS)
    usual, ways = d.OPTIMIZERS[optimizers[number % len(optimizers)]]
    fit = fitted(name)
    for title, rewrite in of.rewrites.items():
        yield Right(title, name, rewrite, steps=few)
        for common, apply in of.commons.items():
            yield Right(f"{title}, {common}", name, rewrite, common=apply)
    first = next(iter(of.rewrites.values()))
    yield Right("first rewrite, 10 steps", name, first, steps=10, isolated=False)
    yield Right("first rewrite, fitted", name, first, common=fit)
    yield Right("first rewrite, another seed", name, first, seed=7)
    yield Right("sums", name, d.SUMS, steps=few)
    yield Right("sums, 10 steps", name, d.SUMS, steps=10, isolated=False)
    yield Right("sums, fitted", name, d.SUMS, common=fit)
    yield Right("sums, repeated rows", name, d.SUMS, common=d.REPEATED)
    yield Right("sums, dead units", name, d.SUMS, common=d.dead)
    if floats:
        yield Right("sums, large inputs", name, d.SUMS, common=d.LARGE)
        yield Right("sums, small inputs", name, d.SUMS, common=d.SMALL)
        yield Right("sums, zero inputs", name, d.SUMS, common=d.ZERO)
    yield Right("chunks", name, d.CHUNKS, steps=few)
    yield Right("threads", name, d.THREADS)
    yield Right("functions by hand", name, d.FUNCTIONS_BY_HAND, steps=few)
    if of.compiles:
        yield Right("compiled", name, d.COMPILED, isolated=False)
    if of.compiles and number % 8 == 0:
        yield Right("inductor", name, d.INDUCTOR, isolated=False)
    if pictures:
        yield Right("channels last", name, d.channels_last)
        yield Right("unfolded", name, d.UNFOLDED)
        yield Right("unfolded, fitted", name, d.UNFOLDED, common=fit)
    if of.splits:
        yield Right("split", name, d.split(2), isolated=False)
    if of.checkpoints:
        yield Right("computed again", name, d.computed_again(of.checkpoints))
    for title, way in ways.items():
        yield Right(f"{optimizers[number % len(optimizers)]} {title}", name, way, reference=usual, steps=3)
    yield Right("sums and optimizer", name, d.SUMS, common=usual, steps=3)
    if of.short and not of.draws:
        yield Right("autocast", name, d.AUTOCAST)
        yield Right("autocast of the reference", name, reference=d.AUTOCAST, steps=few)
        yield Right("autocast, fitted", name, d.AUTOCAST, common=fit)
        if _runs(name, first, torch.bfloat16):
            yield Right("autocast and first rewrite", name, both(d.AUTOCAST, first))
        yield Right("sums under autocast", name, d.SUMS, common=d.AUTOCAST)
        half = _runs(name, nothing, torch.float16)
        if floats and half:
            yield Right("float16 that overflows", name, d.HALF, common=both(d.LARGE, d.LARGE))
        if floats:
            yield Right("autocast, large inputs", name, d.AUTOCAST, common=d.LARGE)
        if half:
            yield Right("float16", name, d.HALF)
    if of.short and _runs(name, d.in_bf16):
        yield Right("bf16, sums", name, d.SUMS, common=d.in_bf16)
        yield Right("bf16, sums, with noise", name, d.SUMS, common=d.in_bf16, noise=True)


def _runs(name: str, change: Apply, autocast: torch.dtype | None = None) -> bool:
    """Whether its code runs in other dtypes."""
    training = training_of(name, 1, 0, change, trains(autocast=autocast))
    try:
        loss_of(training, training.model, training.batches[0][0]).backward()
    except (RuntimeError, ValueError):
        return False
    return True


def pairs_of(name: str) -> list[Right]:
    """All right pairs of a model."""
    with torch.random.fork_rng(devices=[]):
        return list(_pairs_of(name, list(MODELS).index(name)))
