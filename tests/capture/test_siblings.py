"""grad_input of tensors that one operation made, such as a split: paddle's graph does not distinguish them."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensortap as tt
from support.tapping import coverage, values

paddle = pytest.importorskip("paddle")

UNTOLD = "cannot be separated"
CUTS = {
    torch: {
        "split": lambda y: y.split(2, dim=1),
        "unequal": lambda y: y.split([1, 3], dim=1),
        "chunk": lambda y: y.chunk(2, dim=0),
        "unbind": lambda y: y.reshape(2, 8).unbind(0),
    },
    paddle: {
        "split": lambda y: paddle.split(y, 2, axis=1),
        "unequal": lambda y: paddle.split(y, [1, 3], axis=1),
        "chunk": lambda y: paddle.chunk(y, 2, axis=0),
        "unbind": lambda y: paddle.unbind(y.reshape([2, 8]), 0),
    },
}
both = pytest.mark.parametrize("framework", [torch, paddle], ids=["torch", "paddle"])


def model_of(framework: Any, cut: Callable[..., Any], mix: Callable[..., Any], loss: Callable[..., Any]) -> Any:
    """The module `cut` makes parts of x·w, with w = 1; `mix` gets them, and `loss` its output and the parts."""
    base: Any = torch.nn.Module if framework is torch else paddle.nn.Layer

    class Calls(base):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, *inputs: Any) -> Any:
            return self.function(*inputs)

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.mix, ones = Calls(cut), Calls(mix), framework.ones([4, 4])
            self.w = torch.nn.Parameter(ones) if framework is torch else paddle.create_parameter([4, 4], "float32")
            if framework is paddle:
                self.w.set_value(ones)

        def forward(self, x: Any) -> Any:
            parts = self.cut(x * self.w)
            return loss(self.mix(*parts), *parts)

    return Model()


def total(output: Any, *_parts: Any) -> Any:
    return output.sum()


def taken(
    framework: Any, path: Path, cut: str | Callable[..., Any], mix: Callable[..., Any], loss: Callable[..., Any] = total
) -> tuple[dict[str, float], str]:
    """The gradients at the inputs of `mix`, which all hold one number each, and the remark on the module."""
    model = model_of(framework, CUTS[framework][cut] if isinstance(cut, str) else cut, mix, loss)
    with tt.capture(model, path, keep="tensors", kinds=("grad_input",)) as tap:
        model(framework.ones([4, 4])).backward()
        tap.step()
    found = {
        place: array for (module, _, place), array in values(tt.open(path), "grad_input").items() if module == "mix"
    }
    assert all(len(np.unique(array)) == 1 for array in found.values())
    return {place: float(array.flat[0]) for place, array in found.items()}, coverage(tap)["mix"][1]


@both
@pytest.mark.parametrize("cut", ["split", "chunk", "unbind"])
def test_every_output_of_an_operation_has_a_gradient_of_its_own(framework: Any, cut: str, run_path: Path) -> None:
    assert taken(framework, run_path, cut, lambda a, b: a * 2 + b * 3) == ({"0": 2, "1": 3}, "")


@both
def test_one_that_is_used_twice_gets_the_sum(framework: Any, run_path: Path) -> None:
    assert taken(framework, run_path, "split", lambda a, b: a * 2 + b * 3 + a * 5) == ({"0": 7, "1": 3}, "")


@both
def test_the_same_tensor_twice_next_to_its_sibling(framework: Any, run_path: Path) -> None:
    def cut(y: Any) -> Any:
        a, b = CUTS[framework]["split"](y)
        return a, b, a

    found, said = taken(framework, run_path, cut, lambda a, b, again: a * 2 + b * 3 + again * 5)
    assert found == {"0": 7, "1": 3}
    assert "grad_input 0 is for input 2 too: they are one tensor" in said


@both
def test_one_that_the_module_does_not_use_has_none(framework: Any, run_path: Path) -> None:
    assert taken(framework, run_path, "split", lambda a, b: b * 3) == ({"1": 3}, "")


@both
def test_different_shapes_distinguish_gradients(framework: Any, run_path: Path) -> None:
    found = taken(
        framework,
        run_path,
        "unequal",
        lambda a, b: (a * 2).sum() + (b * 3).sum() + (a * 5).sum(),
        lambda output, a, b: output + (a * 11).sum() + (b * 13).sum(),
    )
    assert found == ({"0": 7, "1": 3}, "")


@both
def test_values_and_indices(framework: Any, run_path: Path) -> None:
    def cut(y: Any) -> Any:
        return framework.topk(y, 2)

    assert taken(framework, run_path, cut, lambda best, where: best * 2) == ({"0": 2}, "")


def test_indices_that_take_part_in_autograd_get_no_gradient(run_path: Path) -> None:
    model = model_of(paddle, lambda y: tuple(paddle.topk(y, 2)), lambda best, where: best * 2, total)
    with tt.capture(model, run_path, keep="tensors", kinds=("grad_output",)) as tap:
        model(paddle.ones([4, 4])).backward()
        tap.step()
    found = values(tt.open(run_path), "grad_output")
    assert np.all(found["cut", 0, "0"] == 2) and ("cut", 0, "1") not in found


@both
def test_gradients_sent_to_a_module_with_several_outputs(framework: Any, run_path: Path) -> None:
    model = model_of(framework, CUTS[framework]["split"], lambda a, b: a.sin() * b + a, total)
    with tt.capture(model, run_path, keep="tensors", kinds=("grad_input", "grad_output")) as tap:
        model(framework.arange(16).reshape([4, 4]) * 0.1).backward()
        tap.step()
    run, places = tt.open(run_path), ("0", "1")
    sent, received = values(run, "grad_input"), values(run, "grad_output")
    for place in places:
        assert np.array_equal(sent["mix", 0, place], received["cut", 0, place])
    x = np.arange(16, dtype="float32").reshape(4, 4) * np.float32(0.1)
    assert np.allclose(sent["mix", 0, "0"], np.cos(x[:, :2]) * x[:, 2:] + 1, rtol=1e-5)
    assert np.allclose(sent["mix", 0, "1"], np.sin(x[:, :2]), rtol=1e-5)


# --- ambiguous on paddle only ----------------------------------------------------------------------------------------
def test_earlier_gradients_of_others_are_not_attributed_to_the_module(run_path: Path) -> None:
    found, said = taken(
        paddle, run_path, "split", lambda a, b: a * 2 + b * 3, lambda output, a, b: output.sum() + (a * 7).sum()
    )
    assert found == {} and f"grad_input 0 {UNTOLD}" in said and f"grad_input 1 {UNTOLD}" in said


def test_later_gradients_of_others_do_not_count(run_path: Path) -> None:
    found, said = taken(
        paddle,
        run_path,
        "split",
        lambda a, b: a * 2 + b * 3,
        lambda output, a, b: output.sum() + (((a * 7) * 1) * 1 * 1 * 1).sum() + (((b * 7) * 1) * 1 * 1 * 1).sum(),
    )
    assert (found, said) == ({"0": 2, "1": 3}, "")


def test_equal_numbers_do_not_mislead(run_path: Path) -> None:
    """The sums are 2 and 1, the shares 1 and 2, and each gradient is 1."""
    found, said = taken(
        paddle, run_path, "split", lambda a, b: a + b + b, lambda output, a, b: output.sum() + (a - b).sum()
    )
    assert found == {} and UNTOLD in said


def test_a_hook_of_the_users_that_replaces_the_gradient(run_path: Path) -> None:
    def cut(y: Any) -> Any:
        a, b = paddle.split(y, 2, axis=1)
        a.register_hook(lambda gradient: gradient * 10)
        return a, b

    found, said = taken(paddle, run_path, cut, lambda a, b: a * 2 + b * 3 + b * 5)
    assert found == {"1": 8} and f"grad_input 0 {UNTOLD}" in said


def test_a_second_backward_through_the_same_graph(run_path: Path) -> None:
    model = model_of(paddle, CUTS[paddle]["split"], lambda a, b: a * 2 + b * 3 + a * 5, total)
    with tt.capture(model, run_path, keep="tensors", kinds=("grad_input",)) as tap:
        loss = model(paddle.ones([4, 4]))
        loss.backward(retain_graph=True)
        loss.backward()
        tap.step()
    found = values(tt.open(run_path), "grad_input")
    assert np.all(found["mix", 0, "0"] == 7) and np.all(found["mix", 0, "1"] == 3)


def test_backwards_that_each_see_a_part(run_path: Path) -> None:
    model = model_of(paddle, CUTS[paddle]["split"], lambda a, b: (a * 2, b * 3), lambda output, *_: output)
    with tt.capture(model, run_path, keep="tensors", kinds=("grad_input",)) as tap:
        for part in model(paddle.ones([4, 4])):
            part.sum().backward(retain_graph=True)
        tap.step()
    assert ("mix", 0, "0") not in values(tt.open(run_path), "grad_input")
    assert f"grad_input 0 {UNTOLD}" in coverage(tap)["mix"][1]


def test_no_bit_changes_and_nothing_stays(run_path: Path) -> None:
    alive: list[weakref.ref[Any]] = []

    def cut(y: Any) -> Any:
        parts = paddle.split(y, 2, axis=1)
        alive.extend(weakref.ref(part) for part in parts)
        return parts

    def gradient(path: Path | None) -> Any:
        model = model_of(
            paddle, cut, lambda a, b: a.sin() * b + a, lambda output, a, b: (output * a).sum() + b.cos().sum()
        )
        x = paddle.to_tensor(np.random.default_rng(0).standard_normal((4, 4)), dtype="float32")
        if path is None:
            model(x).backward()
        else:
            with tt.capture(model, path, kinds=("grad_input",)) as tap:
                model(x)  # without a backward
                assert [part() for part in alive[-2:]] == [None, None]
                model(x).backward()
                tap.step()
        return model.w.grad.numpy()

    assert np.array_equal(gradient(None), gradient(run_path))
    gc.collect()
    assert not any(part() is not None for part in alive)


@both
def test_where_in_a_module(framework: Any, run_path: Path) -> None:
    """Its condition gets no gradient, which paddle leaves out in one place and not in the other."""
    assert taken(framework, run_path, lambda y: (y,), lambda y: framework.where(y > 0, y * 1, y) * 2) == ({"0": 2}, "")


@pytest.mark.parametrize("join", ["concat", "stack", "add_n"])
def test_nodes_that_take_lists_do_not_break_backward(join: str, run_path: Path) -> None:
    found, said = taken(paddle, run_path, lambda y: (y,), lambda y: getattr(paddle, join)([y, y]))
    assert found == {} and "grad_input 0 passes through a graph node that cannot be watched" in said


def test_peek_shows_both() -> None:
    model, shown = model_of(paddle, CUTS[paddle]["split"], lambda a, b: a * 2 + b * 3, total), io.StringIO()
    with tt.peek(model, "mix", kinds=("grad_input",), times=1, file=shown):
        model(paddle.ones([4, 4])).backward()
    lines = [line for line in shown.getvalue().splitlines() if "grad_input" in line]
    assert len(lines) == 2, shown.getvalue()


def test_siblings_that_go_into_a_list(run_path: Path) -> None:
    found, said = taken(paddle, run_path, "split", lambda a, b: paddle.concat([a, b]))
    assert found == {} and "grad_input 1 passes through a graph node that cannot be watched" in said
