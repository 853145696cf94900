"""Copies and files of a tapped model hold nothing of the tap."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import hooks_on
from tensortap.frameworks.copies import plain_copies

_LOADS = """
import sys
sys.modules["tensortap"] = None  # importing it fails
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(model(torch.ones(2, 4)).sum().item(), len(model._forward_hooks))
"""


class OwnCopies(nn.Linear):
    """A module with copying code of its own, which copies every attribute."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        other = OwnCopies.__new__(OwnCopies)
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def __reduce__(self) -> Any:
        return _rebuilt, (dict(self.__dict__),)


def _rebuilt(state: dict[str, Any]) -> OwnCopies:
    other = OwnCopies.__new__(OwnCopies)
    other.__dict__ = state
    return other


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def through_file(model: nn.Module) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    assert b"tensortap" not in stream.getvalue()
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def through_pickle(model: nn.Module) -> Any:
    data = pickle.dumps(model)
    assert b"tensortap" not in data
    return pickle.loads(data)  # noqa: S301


def held() -> int:
    """How many hooks hold the copying of modules; other tests may have left taps open."""
    return len(plain_copies(nn.Module)._holders)


COPIES: list[Callable[[nn.Module], Any]] = [copy.deepcopy, through_file, through_pickle]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_has_the_users_hooks_alone(copied: Callable[[nn.Module], Any], capsys: Any) -> None:
    model = net()
    model[0].register_forward_hook(print)
    before, held_before = hooks_on(model), held()
    with tt.capture(model) as tap:
        assert held() > held_before
        model(torch.ones(2, 4)).sum().backward()
        seen = len(tap.run)
        other = copied(model)
        assert hooks_on(other) == before and next(iter(other[0]._forward_hooks.values())) is print
        other(torch.ones(2, 4)).sum().backward()
        assert len(tap.run) == seen  # the copy is not tapped
        model(torch.ones(2, 4))
        assert len(tap.run) > seen  # the original still is
    assert hooks_on(model) == before and held() == held_before
    assert held() or "__reduce_ex__" not in vars(nn.Module)


@pytest.mark.parametrize("copied", COPIES)
def test_a_class_with_copying_code_of_its_own(copied: Callable[[nn.Module], Any]) -> None:
    model = OwnCopies(4, 2)
    with tt.capture(model) as tap:
        other = copied(model) if copied is copy.deepcopy else pickle.loads(pickle.dumps(model))  # noqa: S301
        other(torch.ones(2, 4))
        assert not len(tap.run)
    assert b"tensortap" not in pickle.dumps(other)


def test_taps_that_close_in_any_order_leave_nothing() -> None:
    models, held_before = (net(), net()), held()
    first, second = (tt.capture(model) for model in models)
    first.close()
    assert not hooks_on(copy.deepcopy(models[1]))
    second.close()
    assert held() == held_before and (held() or "__reduce_ex__" not in vars(nn.Module))


def test_a_shallow_copy_shares_hooks_as_always() -> None:
    model = nn.Linear(4, 2)
    with tt.capture(model):
        assert copy.copy(model)._forward_hooks is model._forward_hooks


def test_a_saved_model_loads_where_tensortap_is_not_installed(tmp_path: Path) -> None:
    model = net()
    with tt.capture(model):
        model(torch.ones(2, 4)).sum().backward()
        torch.save(model, tmp_path / "model.pt")
    command = [sys.executable, "-W", "ignore", "-c", _LOADS, str(tmp_path / "model.pt")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == [str(model(torch.ones(2, 4)).sum().item()), "0"]


def test_a_module_compiled_in_place() -> None:
    model = net()
    model.compile(backend="eager")
    with tt.capture(model):
        other = copy.deepcopy(model)
        assert not any("tensortap" in type(value).__module__ for value in vars(other).values())


def test_paddle() -> None:
    paddle = pytest.importorskip("paddle")
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.ReLU())
    before = vars(paddle.nn.Layer).get("__reduce_ex__")  # not its own, unless a tap of another test is still open
    with tt.capture(model) as tap:
        assert vars(paddle.nn.Layer).get("__reduce_ex__") is not None
        other = copy.deepcopy(model)
        dicts = [value for layer in other.sublayers(include_self=True) for value in vars(layer).items()]
        assert not any(value for name, value in dicts if "hook" in name and isinstance(value, dict))
        other(paddle.ones([2, 4]))
        assert not len(tap.run)
        model(paddle.ones([2, 4]))
        assert len(tap.run)
    assert vars(paddle.nn.Layer).get("__reduce_ex__") is before
