"""A value that passes through several modules is one tensor with one gradient, in capture and in a check."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from support.tapping import hooks_on
from support.zoo import Doubled
from tensortap.isolate.aliases import CallBoundary, TensorAliases

KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")


class Router(nn.Module):
    """Uses its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self.lin(x).softmax(-1)
        return self.out(shares * shares), shares


class Quiet(Router):
    """Does not use its own output."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.lin(x)
        return self.out(scores), scores.softmax(-1)


class Block(nn.Module):
    """Returns its router's output, and uses it, too."""

    def __init__(self, router: Callable[[], nn.Module] = Router) -> None:
        super().__init__()
        self.router = router()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, shares = self.router(x)
        return x + y * shares.amax(-1, keepdim=True), shares


class Blocks(nn.Module):
    def __init__(self, times: int = 1, reentrant: bool | None = None, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.block, self.times, self.reentrant = block(), times, reentrant

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for _ in range(self.times):
            if self.reentrant is None:
                x, shares = self.block(x)
            else:
                x, shares = checkpoint(self.block, x, use_reentrant=self.reentrant)
            found.append(shares)
        return x, *found


class Bias(nn.Module):
    """The first layer computes a bias that passes through all layers, two modules deep."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.table = nn.Linear(8, 8), nn.Embedding(4, 8)

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if bias is None:
                bias = self.table(torch.arange(4)) * 2
            return self.lin(x) * bias, bias

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Bias.Attention()

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            y, bias = self.attention(x, bias)
            return x + y, bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Bias.Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class HandedThrough(nn.Module):
    """A block's value passes unchanged through two modules, and the block uses it, too."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.both = nn.Identity(), nn.Dropout(0.0), nn.Bilinear(8, 8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 2
            z = self.second(self.first(y))
            return z, self.both(z, y) + y.sin()

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.inner = nn.Linear(8, 8), HandedThrough.Inner()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z, w = self.inner(self.lin(x))
        return z, w


class Twice(nn.Module):
    """Returns one tensor under two names, as does the module in it."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.lin(x)
            return y, y

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = Twice.Pair(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.pair(x)
        return self.head(a) + b.sin()


class ChangedBetween(nn.Module):
    """Changes an inner module's output in place and returns it, which makes it another value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        z = y * 2
        y += 1
        return y, self.head(z)


class Viewed(Block):
    """Returns another tensor of the same memory: its gradient is not that of the router's."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, shares = self.router(x)
        return x + y, shares.view(shares.shape)


def loss_of(out: Any) -> torch.Tensor:
    """A loss with a different gradient for each element."""
    parts = (out,) if isinstance(out, torch.Tensor) else out
    return torch.stack(
        [(part.pow(2) * torch.arange(1.0, part.numel() + 1).view_as(part)).mean() for part in parts]
    ).sum()


def batch() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(model: nn.Module) -> None:
    loss_of(model(batch())).backward()


def two_micro_steps(model: nn.Module) -> None:
    step(model)
    step(model)


def penalised(model: nn.Module) -> None:
    x = batch()
    loss = loss_of(model(x))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def built(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return build()


def captured(build: Callable[[], nn.Module], path: Path, work: Callable[[nn.Module], None] = step) -> Path:
    with tt.capture(model := built(build), path, keep="tensors", kinds=KINDS):
        work(model)
    return path


def checked(model: nn.Module, reference: Path, work: Callable[[nn.Module], None] = step) -> Any:
    with tt.check(model, reference) as check:
        work(model)
    return check.result


def named(result: Any) -> list[str]:
    return [birth.module for birth in result.births]


# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "work"),
    [
        (Blocks, step),
        (lambda: Blocks(times=3), step),
        (lambda: Blocks(times=2), two_micro_steps),
        (lambda: Blocks(times=2, reentrant=True), step),
        (lambda: Blocks(reentrant=False), step),
        (Bias, step),
        (HandedThrough, step),
        (Twice, step),
        (lambda: nn.Sequential(Twice()), step),
        (ChangedBetween, step),
        (Viewed, step),
    ],
)
def test_a_model_agrees_with_itself(
    build: Callable[[], nn.Module], work: Callable[[nn.Module], None], run_path: Path
) -> None:
    result = checked(built(build), captured(build, run_path, work), work)
    assert result.verdict == "match", result.sentence
    assert not result.unmatched, result.unmatched[:5]
    assert max(row["rel_l2"] for row in result.rows) < 1e-6


def test_a_gradient_penalty_agrees_with_itself(run_path: Path) -> None:
    model, free = built(Blocks), built(Blocks)
    result = checked(model, captured(Blocks, run_path, penalised), penalised)
    penalised(free)
    assert result.verdict == "match", result.sentence
    assert {row["path"] for row in result.rows if row["kind"] == "grad_output"} >= {"1", "1~2"}
    for ours, theirs in zip(model.parameters(), free.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5)


def test_parameter_gradients_are_as_without_a_check(run_path: Path) -> None:
    model, free = built(Bias), built(Bias)
    checked(model, captured(Bias, run_path))
    step(free)
    for ours, theirs in zip(model.parameters(), free.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-5)


# --- what is wrong ----------------------------------------------------------------------------------------------------


class Calm(Block):
    """Only returns it, without using it."""

    def __init__(self) -> None:
        super().__init__(Quiet)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, shares = self.router(x)
        return x + y, shares


class Around(nn.Module):
    """The root uses the block's output without returning it."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, shares = self.block(x)
        return y + shares.sin().sum()


def wrong_in_the_router(model: Any) -> None:
    router = model.block.router

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = router.lin(x).softmax(-1)
        return router.out(Doubled.apply(shares) * shares), shares

    router.forward = forward


def wrong_in_the_block(model: Any) -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, shares = model.block.router(x)
        return x + y * Doubled.apply(shares).amax(-1, keepdim=True), shares

    model.block.forward = forward


def wrong_around(model: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y, shares = model.block(x)
        return y + Doubled.apply(shares).sin().sum()

    model.forward = forward


@pytest.mark.parametrize(
    ("build", "spoil", "module"),
    [
        (Blocks, wrong_in_the_router, "block.router"),
        (lambda: Blocks(block=lambda: Block(Quiet)), wrong_in_the_block, "block"),
        (lambda: Around(Block), wrong_in_the_router, "block.router"),
        (lambda: Around(lambda: Block(Quiet)), wrong_in_the_block, "block"),
        (lambda: Around(Calm), wrong_around, ""),
    ],
)
def test_a_wrong_backward_is_attributed_to_the_innermost_module_that_adds_to_it(
    build: Callable[[], nn.Module], spoil: Callable[[Any], None], module: str, run_path: Path
) -> None:
    reference, model = captured(build, run_path), built(build)
    spoil(model)
    assert named(checked(model, reference)) == [module]


def test_a_loss_with_another_gradient_is_reported(run_path: Path) -> None:
    def build() -> nn.Module:
        return Blocks(block=Calm)

    def other(model: nn.Module) -> None:
        x, shares = model(batch())
        loss_of((x, Doubled.apply(shares))).backward()

    result = checked(built(build), captured(build, run_path), other)
    assert named(result) == [""]
    assert result.first.inputs_matched is None


# --- what it knows a tensor by ----------------------------------------------------------------------------------------


def test_no_tensor_is_kept_alive_and_no_hook_remains(run_path: Path) -> None:
    reference, model = captured(Blocks, run_path), built(Blocks)
    seen = []
    with tt.check(model, reference):
        out = model(batch())
        seen = [weakref.ref(each) for each in out]
        loss_of(out).backward()
        del out
        assert not any(each() is not None for each in seen), "the step is not over, but nobody uses them any more"
    assert hooks_on(model) == 0


def test_aliases_depend_on_identity_and_version() -> None:
    known = TensorAliases(lambda tensor: tensor._version)
    first, second, third = torch.ones(2), torch.ones(2), torch.ones(2)
    known.add_substitute(second, first, 7)
    known.add_substitute(third, second, 7)
    assert known.original(third, 7) is first
    assert known.original(third, 8) is third, "the reference has another tensor there"
    second.add_(1)
    assert known.original(second, 7) is second
    assert known.original(third, 7) is first
    first.add_(1)
    assert known.original(third, 7) is third
    calls: list[CallBoundary] = []
    known.add_output(first, 7, calls)
    assert known.boundaries(first, 7) is calls
    assert known.boundaries(first, 8) is None
    assert known.boundaries(first.clone(), 7) is None
    known.clear()
    assert known.boundaries(first, 7) is None


def test_a_dead_tensor_is_forgotten() -> None:
    """Another tensor may reuse its address."""
    known = TensorAliases(lambda tensor: tensor._version)
    for _ in range(20):
        tensor = torch.ones(2)
        assert known.boundaries(tensor, 7) is None
        assert known.original(tensor, 7) is tensor
        known.add_output(tensor, 7, [])
        known.add_substitute(tensor, torch.zeros(2), 7)
        del tensor
    assert not known._returned._notes
    assert not known._originals._notes


class Shifting(nn.Module):
    """Adds positions to what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.proj = nn.Embedding(3, 8), nn.Identity()
        self.keys, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, memory: torch.Tensor) -> torch.Tensor:
        memory += self.positions(torch.arange(3))
        memory = self.proj(memory)
        result: torch.Tensor = self.out(memory) * self.keys(memory).tanh()
        return result


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), Shifting()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = self.encoder(x)
        return {"out": self.decoder(memory), "memory": memory}


class Outer(nn.Module):
    """Returns a value that the module inside has changed in place, and that has a gradient there alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.inner(x)
        return {"loss": found["out"].square().sum(), "memory": found["memory"]}


@pytest.mark.parametrize("wrong", [False, True])
def test_the_gradient_of_a_value_changed_in_place_stays_inside_what_changed_it(tmp_path: Path, wrong: bool) -> None:
    torch.manual_seed(0)
    model = Outer()
    x = torch.randn(2, 3, 8)
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=KINDS):
        model(x)["loss"].backward()
    model.zero_grad()
    if wrong:
        model.inner.decoder.out.register_forward_pre_hook(lambda _, args: (args[0].detach(),))
    with tt.check(model, tmp_path / "run") as check:
        model(x)["loss"].backward()
    assert (check.result.verdict == "match") != wrong, check.result.sentence
