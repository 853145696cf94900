"""Calls of modules whose only hooks are those of a run: `torch.nn.Module._call_impl` in C."""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import tensortap as tt
from support.fake_gpu import choose_language
from tensortap.frameworks.torch.module_calls import module_calls

QUICK, BY_TORCH, UNHOOKED = "_wrapped_call_impl", "inner", "_call_impl"
"""Which function calls the forward: none in between, torch's code for hooks, torch's code without hooks."""


class Layer(nn.Module):
    """Notes which function calls it, and runs other code during its forward."""

    def __init__(self, during: Callable[[Layer], Any] = lambda layer: None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.during = during
        self.callers: list[str] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.callers.append(sys._getframe(1).f_code.co_name)
        self.during(self)
        return self.linear(x) * scale


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    choose_language(monkeypatch, "C++")
    gc.collect()  # what an earlier test has dropped
    yield


class Model(nn.Module):
    """Calls a layer. Torch itself always calls the root of a tapped model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.layer(x, **options)  # type: ignore[no-any-return]


def train(model: Model, tap: Any, steps: int = 4, **options: Any) -> torch.Tensor:
    for _ in range(steps):
        output = model(torch.ones(2, 4, requires_grad=True), **options)
        output.sum().backward()
        tap.step()
    return output


def outputs(folder: Path) -> int:
    return len(list(tt.open(folder).records(module="layer.linear", kind="output")))


def test_runs_without_torch_s_code_while_a_tap_is_open(tmp_path: Path) -> None:
    model = Model()
    expected = model(torch.ones(2, 4), scale=2.0)
    assert model.layer.callers == [UNHOOKED]
    with tt.capture(model, tmp_path / "run") as tap:
        assert torch.equal(train(model, tap, scale=2.0), expected)
    assert model.layer.callers[1:] == [QUICK] * 4
    del tap
    gc.collect()
    model(torch.ones(2, 4))
    assert model.layer.callers[-1] == UNHOOKED
    assert outputs(tmp_path / "run") == 4


def test_knows_the_torch_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module_calls() is not None

    def replaced(self: Any, *args: Any) -> Any:
        return self.forward(*args)

    code = replaced.__code__.replace(co_names=("forward_in_a_new_way",))
    newer = FunctionType(code.replace(co_filename=nn.Module._call_impl.__code__.co_filename), globals())
    for function in (replaced, newer):
        monkeypatch.setattr(nn.Module, "_call_impl", function)
        assert module_calls() is None


@pytest.mark.parametrize(
    "place",
    [
        lambda model: model.register_forward_pre_hook(lambda *_: None),
        lambda model: model.register_forward_hook(lambda *_: None),
        lambda model: model.register_full_backward_hook(lambda *_: None),
        lambda model: model.register_full_backward_pre_hook(lambda *_: None),
        lambda _: torch_module.register_module_forward_pre_hook(lambda *_: None),
        lambda _: torch_module.register_module_forward_hook(lambda *_: None),
        lambda _: torch_module.register_module_full_backward_hook(lambda *_: None),
        lambda _: torch_module.register_module_full_backward_pre_hook(lambda *_: None),
    ],
)
def test_leaves_modules_with_other_hooks_to_torch(place: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    model = Model()
    with tt.capture(model, tmp_path / "run") as tap:
        train(model, tap)
        handle = place(model.layer)
        try:
            train(model, tap)
        finally:
            handle.remove()
        train(model, tap)
    assert model.layer.callers == [QUICK] * 4 + [BY_TORCH] * 4 + [QUICK] * 4
    assert outputs(tmp_path / "run") == 12


def test_leaves_tracing_and_compiling_to_torch(tmp_path: Path) -> None:
    model = Model()
    with tt.capture(model, tmp_path / "run") as tap:
        train(model, tap)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, (torch.ones(2, 4),), check_trace=False)
        assert set(model.layer.callers[4:]) == {"_slow_forward"}
        assert "layer.linear" in dict(traced.named_modules())
        compiled = torch.compile(lambda x: model.layer.linear(x) + 1, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2, 4)), model.layer.linear(torch.ones(2, 4)) + 1)


def test_two_runs_of_one_model_go_through_torch(tmp_path: Path) -> None:
    model = Model()
    with tt.capture(model, tmp_path / "a") as a, tt.capture(model, tmp_path / "b") as b:
        train(model, a)
        b.step()
    assert set(model.layer.callers) == {BY_TORCH}


@pytest.mark.parametrize("for_all", [False, True])
def test_calls_hooks_that_are_placed_during_the_call(for_all: bool, tmp_path: Path) -> None:
    handles: list[Any] = []
    seen: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(module, Layer):
            seen.append((module, args))
            return output + 1
        return None

    def place(layer: Layer) -> None:
        if layer.during is place:
            layer.during = lambda layer: None
            handles.append(
                torch_module.register_module_forward_hook(hook) if for_all else layer.register_forward_hook(hook)
            )

    results = []
    for tapped in (False, True):
        torch.manual_seed(0)
        model = Model()
        model.layer.register_forward_hook(lambda *_: None) if not tapped else None
        seen.clear()
        if tapped:
            with tt.capture(model, tmp_path / "run") as tap:
                train(model, tap)
                model.layer.during = place
                results.append(train(model, tap, steps=1))
            assert model.layer.callers == [QUICK] * 5
        else:
            model.layer.during = place
            results.append(model(torch.ones(2, 4)))
        assert len(seen) == 1
        assert len(seen[0][1]) == 1
        handles.pop().remove()
    assert torch.equal(*results)


def test_a_run_that_ends_during_a_call(tmp_path: Path) -> None:
    model = Model()
    tap = tt.capture(model, tmp_path / "run")
    train(model, tap)
    model.layer.during = lambda layer: tap.close()
    expected = model.layer.linear(torch.ones(2, 4))
    assert torch.equal(model(torch.ones(2, 4)), expected)
    assert model.layer.callers[-1] == QUICK
    model(torch.ones(2, 4))
    assert model.layer.callers[-1] == UNHOOKED


@pytest.mark.parametrize("error", [ValueError("too hot"), KeyboardInterrupt()])
def test_an_exception_passes(error: BaseException, tmp_path: Path) -> None:
    model = nn.Sequential(Layer(), nn.Linear(4, 4))
    always: list[str] = []

    def fail(layer: Layer) -> None:
        layer.register_forward_hook(lambda *_: always.append("here"), always_call=True)
        layer.register_forward_hook(lambda *_: always.append("never"))
        raise error

    with tt.capture(model, tmp_path / "run") as tap:
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            tap.step()
        model[0].during = fail
        with pytest.raises(type(error)) as caught:
            model(torch.ones(2, 4))
        assert caught.value is error
        assert [frame.name for frame in traceback.extract_tb(caught.tb)][-2:] == ["forward", "fail"]
        assert model[0].callers[-1] == QUICK
        assert always == (["here"] if isinstance(error, Exception) else []), "as torch does"
        model[0].during = lambda layer: None
        model[0]._forward_hooks.popitem()
        model[0]._forward_hooks.popitem()
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            tap.step()
    assert model[0].callers[-1] == QUICK
    assert [record.key.step for record in tt.open(tmp_path / "run").records(kind="output", module="1")] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


def test_an_always_called_hook_that_fails_is_a_warning(tmp_path: Path) -> None:
    model = Model()

    def broken(*_: Any) -> None:
        raise RuntimeError("broken hook")

    def fail(layer: Layer) -> None:
        layer.register_forward_hook(broken, always_call=True)
        raise ValueError("too hot")

    with tt.capture(model, tmp_path / "run") as tap:
        train(model, tap)
        model.layer.during = fail
        with pytest.warns(UserWarning, match="broken hook"), pytest.raises(ValueError, match="too hot"):
            model(torch.ones(2, 4))


def test_a_replaced_forward_is_called(tmp_path: Path) -> None:
    model = Model()
    with tt.capture(model, tmp_path / "run") as tap:
        train(model, tap)
        inner = model.layer.forward
        model.layer.forward = lambda x: inner(x) * 3  # type: ignore[method-assign]
        assert torch.equal(train(model, tap, steps=1), model.layer.linear(torch.ones(2, 4)) * 3)


def test_a_copy_of_a_module_with_its_hooks_is_not_recorded(tmp_path: Path) -> None:
    model, copied = Model(), Layer()
    with tt.capture(model, tmp_path / "run") as tap:
        copied._forward_hooks, copied._forward_pre_hooks = model.layer._forward_hooks, model.layer._forward_pre_hooks
        copied._forward_hooks_with_kwargs = model.layer._forward_hooks_with_kwargs
        copied._forward_pre_hooks_with_kwargs = model.layer._forward_pre_hooks_with_kwargs
        train(model, tap)
        copied(torch.ones(2, 4))
        tap.step()
    assert copied.callers == [BY_TORCH]
    assert outputs(tmp_path / "run") == 4


def test_an_exception_keeps_its_context(tmp_path: Path) -> None:
    model = Model()

    def fail(layer: Layer) -> None:
        layer.register_forward_hook(lambda *_: None)  # by another, so that Python ends the call
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("too hot")  # noqa: B904

    with tt.capture(model, tmp_path / "run") as tap:
        train(model, tap)
        model.layer.during = fail
        try:
            raise OSError("outer")
        except OSError:
            with pytest.raises(ValueError, match="too hot") as caught:
                model(torch.ones(2, 4))
    chain = [caught.value, caught.value.__context__, caught.value.__context__.__context__]  # type: ignore[union-attr]
    assert [type(each) for each in chain] == [ValueError, KeyError, OSError]
