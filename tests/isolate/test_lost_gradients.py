"""Missing gradients: the responsible module is reported, and models that only look different are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt

KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")
Spoil = Callable[[Any], None]


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def nested() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8)), nn.Linear(8, 8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(torch.arange(4))))


def step(model: nn.Module) -> None:
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).square().sum().backward()


def input_detached(module: nn.Module) -> None:
    inner = module.forward
    module.forward = lambda x: inner(x.detach())  # type: ignore[method-assign]


def output_detached(module: nn.Module) -> None:
    inner = module.forward
    module.forward = lambda x: inner(x).detach()  # type: ignore[method-assign]


def without_autograd(module: nn.Module) -> None:
    module.forward = torch.no_grad()(module.forward)  # type: ignore[method-assign]


def frozen(module: nn.Module) -> None:
    module.weight.requires_grad_(False)  # type: ignore[union-attr, operator]


def captured(model: nn.Module, path: Path, **options: Any) -> Path:
    with tt.capture(model, path, **({"keep": "tensors", "kinds": KINDS} | options)):
        step(model)
    return path


def spoilt(build: Callable[[], nn.Module], module: str, spoil: Spoil) -> nn.Module:
    model = build()
    spoil(model.get_submodule(module))
    return model


def named(result: Any) -> list[str]:
    return [birth.module for birth in result.births]


@pytest.mark.parametrize(
    ("build", "module", "spoil"),
    [
        (nested, "1.1.1", input_detached),
        (nested, "1.1.0", output_detached),
        (nested, "1.1", without_autograd),
        (plain, "2", output_detached),
        (plain, "1", without_autograd),
        (plain, "2", frozen),
        (Tied, "mid", input_detached),
        (Tied, "mid", output_detached),
    ],
)
def test_only_the_responsible_module_is_reported(
    build: Callable[[], nn.Module], module: str, spoil: Spoil, run_path: Path
) -> None:
    reference, model = captured(build(), run_path), spoilt(build, module, spoil)
    with tt.check(model, reference) as check:
        step(model)
    assert named(check.result) == [module], check.result.sentence


class Handing(nn.Module):
    """The root passes a value through a block, whose submodules pass it on unchanged."""

    class Block(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.same, self.inner = nn.Identity(), inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.same(x))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.block = Handing.Block(Handing.Block(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.block(self.first(x) * x))


def cut_by_the_root(model: Any) -> None:
    model.forward = lambda x: model.last(x + model.block((model.first(x) * x).detach()))


def cut_by_the_block(model: Any) -> None:
    model.block.forward = lambda x: model.block.inner(x.detach())


@pytest.mark.parametrize(("spoil", "module"), [(cut_by_the_root, ""), (cut_by_the_block, "block")])
def test_only_the_code_that_detached_it_is_reported(spoil: Spoil, module: str, run_path: Path) -> None:
    reference, model = captured(Handing(), run_path), Handing()
    spoil(model)
    with tt.check(model, reference) as check:
        step(model)
    assert named(check.result) == [module], check.result.sentence


@pytest.mark.parametrize(
    ("build", "module", "spoil", "named_module"),
    [
        (Handing, "", cut_by_the_root, ""),
        (Handing, "", cut_by_the_block, "block"),
        (nested, "1.1.0", output_detached, "1.1.0"),
        (plain, "2", output_detached, "2"),
        (Tied, "mid", output_detached, "mid"),
    ],
)
def test_free_runs_name_the_code_that_detached_it(
    build: Callable[[], nn.Module], module: str, spoil: Spoil, named_module: str, run_path: Path, tmp_path: Path
) -> None:
    candidate = captured(spoilt(build, module, spoil), tmp_path / "candidate", keep="summary")
    result = tt.compare(captured(build(), run_path, keep="summary"), candidate)
    assert result.first is not None and result.first.module == named_module, result.sentence
    if result.first.container is not None:
        assert f"{named_module or '(root)'} cuts it off" in result.sentence


class Passing(nn.Module):
    """Passes on what the module inside returns, as it is or in another shape."""

    def __init__(self, inner: nn.Module, *shape: int) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y.view(self.shape) if self.shape else y


class Stacked(nn.Module):
    """Modules in modules, around the only one that has parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = Passing(Passing(nn.Linear(8, 8)), 2, 2, 8)
        self.body = Passing(Passing(Passing(nn.Linear(8, 8), 2, 16)), 4, 8)
        self.places, self.head = torch.randn(2, 2, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body((self.embed(x) + self.places).view(4, 8)))


@pytest.mark.parametrize("spoil", [input_detached, output_detached])
@pytest.mark.parametrize("module", ["embed", "embed.inner", "body", "body.inner", "body.inner.inner"])
def test_the_innermost_module_that_detached_it_is_reported(
    module: str, spoil: Spoil, run_path: Path, tmp_path: Path
) -> None:
    if module.startswith("embed") and spoil is input_detached:
        pytest.skip("the model's own input needs no gradient")
    reference, model = captured(Stacked(), run_path), spoilt(Stacked, module, spoil)
    with tt.check(model, reference) as check:
        step(model)
    assert named(check.result) == [module], check.result.sentence
    candidate = captured(spoilt(Stacked, module, spoil), tmp_path / "candidate", keep="summary")
    result = tt.compare(reference, candidate)
    first = result.first
    assert first is not None and (first.module if first.container is None else first.container) == module


class Reusing(nn.Module):
    """Calls one module twice, the second time with what may be detached."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.mlp, self.last = (
            nn.Linear(8, 8),
            nn.Tanh(),
            Passing(nn.Linear(8, 8)),
            nn.Linear(8, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.first(x))
        return self.last(hidden + self.act(self.mlp(hidden)))


def test_the_other_calls_of_a_module_are_not_taken_for_detached(run_path: Path, tmp_path: Path) -> None:
    reference = captured(Reusing(), run_path)
    result = tt.compare(reference, captured(spoilt(Reusing, "mlp", output_detached), tmp_path / "candidate"))
    assert result.first is not None and result.first.module == "mlp"


class Borrowing(nn.Module):
    """Calls a part of a module before the module itself."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mix(x)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.image = Borrowing.Text(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.text(self.text.embed(x) + self.image(x))


def embedded_without_gradient(model: Any) -> None:
    model.forward = lambda x: model.text(model.text.embed(x).detach() + model.image(x))


def test_the_caller_of_a_borrowed_module_is_reported(run_path: Path, tmp_path: Path) -> None:
    reference, model = captured(Borrowing(), run_path), Borrowing()
    embedded_without_gradient(model)
    result = tt.compare(reference, captured(model, tmp_path / "candidate"))
    assert result.first is not None and result.first.container == "", result.sentence
    with tt.check(model, reference) as check:
        step(model)
    assert named(check.result) == [""], check.result.sentence


class WithLoss(nn.Module):
    """Computes its loss itself, of what the head returns and of what the body does, and returns both."""

    detaches = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        logits = self.head(hidden)
        loss = logits.square().mean()
        return {"loss": (loss.detach() if self.detaches else loss) + hidden.square().mean(), "logits": logits}


def test_a_model_that_detaches_a_term_of_its_own_loss_is_reported(run_path: Path, tmp_path: Path) -> None:
    def trained(model: nn.Module) -> None:
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))["loss"].backward()

    paths = [run_path, tmp_path / "candidate"]
    for path, detaches in zip(paths, (False, True), strict=True):
        model = WithLoss()
        model.detaches = detaches
        with tt.capture(model, path, keep="tensors", kinds=KINDS):
            trained(model)
    result = tt.compare(*paths)
    assert result.first is not None and result.first.container == "", result.sentence
    with tt.check(model, run_path) as check:
        trained(model)
    assert named(check.result) == [""], check.result.sentence


def test_a_run_notes_what_autograd_does_not_reach(run_path: Path) -> None:
    facts = tt.open(captured(spoilt(plain, "2", output_detached), run_path)).loop()
    assert facts.value("detached", 0, "2") == {"outputs": ["0"]}
    assert facts.value("detached", 0, "3") == {"inputs": ["0"], "outputs_of_detached": ["0"]}
    assert facts.value("detached", 0, "1") is None


def test_without_input_gradients_there_is_still_one_finding(run_path: Path) -> None:
    reference = captured(nested(), run_path, kinds=("input", "output", "grad_output", "param_grad"))
    model = spoilt(nested, "1.1.0", output_detached)
    with tt.check(model, reference) as check:
        step(model)
    assert named(check.result) == ["1.1.0"]


@pytest.mark.parametrize("kinds", [KINDS, ("output", "grad_output", "param_grad"), ("output", "param_grad")])
@pytest.mark.parametrize("spoil", [input_detached, output_detached, frozen])
def test_two_free_runs_do_not_match(kinds: tuple[str, ...], spoil: Spoil, run_path: Path, tmp_path: Path) -> None:
    reference, model = captured(plain(), run_path, kinds=kinds), spoilt(plain, "2", spoil)
    stored = tt.compare(reference, captured(model, tmp_path / "candidate", kinds=kinds))
    assert stored.verdict == "diverged", stored.sentence
    assert "never comes, though the reference has it" in stored.sentence
    model = spoilt(plain, "2", spoil)
    with tt.check(model, reference, isolate=False) as check:
        step(model)
    assert (check.result.sentence, named(check.result)) == (stored.sentence, named(stored))


@pytest.mark.parametrize(
    "options",
    [
        {"kinds": ("input", "output")},
        {"kinds": ("input", "output", "grad_output")},
        {"modules": ["2", "4"]},
        {"keep": "summary"},
    ],
)
def test_runs_captured_differently_match(options: dict[str, Any], run_path: Path, tmp_path: Path) -> None:
    result = tt.compare(captured(plain(), run_path), captured(plain(), tmp_path / "candidate", **options))
    assert result.verdict == "match", result.sentence


def test_an_input_without_a_gradient_is_not_reported(run_path: Path, tmp_path: Path) -> None:
    """Only the reference's batch requires a gradient; all parameters have theirs on both sides."""

    def run(path: Path, asked: bool) -> Path:
        x = torch.ones(4, 8).requires_grad_(asked)
        with tt.capture(model := plain(), path, keep="tensors", kinds=KINDS):
            model(x).square().sum().backward()
        return path

    result = tt.compare(run(run_path, asked=True), run(tmp_path / "candidate", asked=False))
    assert result.verdict == "match", result.sentence


def test_an_interrupted_run_has_no_missing_gradients(run_path: Path, tmp_path: Path) -> None:
    def stopped(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    model = plain()
    model[2].register_forward_hook(lambda module, args, output: args[0].register_hook(stopped) and None)  # type: ignore[operator]
    with pytest.raises(KeyboardInterrupt):
        captured(model, tmp_path / "candidate")
    assert not tt.compare(captured(plain(), run_path), tmp_path / "candidate").births
    check = tt.check(model, run_path)
    with pytest.raises(KeyboardInterrupt), check:
        step(model)
    assert not check.result.births


@pytest.mark.parametrize("isolate", [True, False])
def test_parameters_that_moved_into_a_submodule_are_not_missing(isolate: bool, run_path: Path, tmp_path: Path) -> None:
    def refactored() -> Any:
        model: Any = plain()
        model[2] = nn.Sequential(model[2], nn.Identity())
        return model

    reference, model = captured(plain(), run_path), refactored()
    with tt.check(model, reference, isolate=isolate) as check:
        step(model)
    assert check.result.verdict == "match", check.result.sentence
    assert tt.compare(reference, captured(refactored(), tmp_path / "candidate")).verdict == "match"


class Repeated(nn.Module):
    """One block, called twice: a gradient that is cut off between the calls comes to the second alone."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)))
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        return torch.as_tensor(self.block(x.detach() if self.cut else x))


def test_a_cut_between_two_calls_of_one_block_is_named_once(tmp_path: Path) -> None:
    reference = captured(Repeated(cut=False), tmp_path / "a")
    model = Repeated(cut=True)
    with tt.check(model, reference) as check:
        step(model)
    assert named(check.result) == [""]
    assert named(tt.compare(reference, captured(model, tmp_path / "b")))[0] == ""


class Scorer(nn.Module):
    """Returns scores, and what it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = x @ self.weight
        return scores, scores.softmax(-1)


class Routed(nn.Module):
    """The loss reads the scores, too, as one that balances experts does."""

    def __init__(self, share: float, cut: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.head = Scorer(), nn.Linear(8, 8)
        self.share, self.cut = share, cut

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores, chosen = self.score(x)
        hidden = self.head(x * (chosen.detach() if self.cut else chosen))
        return {"loss": hidden.square().mean() + self.share * scores.square().mean(), "scores": scores}


@pytest.mark.parametrize("changes", [{"share": 0.2}, {"share": 0.1, "cut": True}])
def test_what_a_loss_reads_is_not_blamed_on_the_module_that_made_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = Routed(share=0.1)
    with tt.capture(model, tmp_path / "a", keep="tensors", kinds=KINDS):
        model(x)["loss"].backward()
    model = Routed(**changes)
    with tt.check(model, tmp_path / "a") as check:
        model(x)["loss"].backward()
    assert named(check.result) == [""], check.result.sentence


def test_a_parametrized_weight_may_be_read_more_often(tmp_path: Path) -> None:
    class Layer(nn.Linear):
        reads = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = [self.weight for _ in range(self.reads)][-1]
            return nn.functional.linear(x, weight, self.bias)

    def parametrized(reads: int) -> nn.Module:
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.weight_norm(Layer(8, 4))
        layer.reads = reads
        return nn.Sequential(layer, nn.Tanh())

    reference = captured(parametrized(1), tmp_path / "run")
    with tt.check(model := parametrized(2), reference) as check:
        step(model)
    assert check.result.verdict == "match", check.result.sentence
