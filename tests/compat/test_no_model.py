"""Every interface refuses an argument that is not a model, and names the accepted types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tensortap.compat.dump import HookerAndDumper
from tensortap.compat.gradients import save_gradients_and_inputs
from tensortap.compat.profiler import backward_hook_wrapper, forward_hook_wrapper
from tensortap.compat.saving_hook import register_hook, register_saving_hook, remove_saving_hook
from tensortap.errors import UsageError

NO_MODELS: list[Any] = [{"weight": 1}, None, "model", 3, [nn.Linear(2, 2)], nn.Linear]
ENTRIES: list[Callable[[Any], Any]] = [
    register_saving_hook,
    register_hook,
    remove_saving_hook,
    forward_hook_wrapper,
    backward_hook_wrapper,
    lambda model: HookerAndDumper("dumps/").register_hooks(model),
    lambda model: HookerAndDumper("dumps/").forward_hook_fn(model, (), None),
    lambda model: HookerAndDumper("dumps/").backward_hook_fn(model, (), ()),
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("given", NO_MODELS)
def test_arguments_that_are_not_models(entry: Any, given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is not a model: give a torch\.nn\.Module or a paddle\.nn\.Layer") as told:
        entry(given)
    assert told.value.__context__ is None  # one error and not two
    assert not list(tmp_path.iterdir())


def test_a_wrong_argument_does_not_end_the_dump_under_way(tmp_path: Path) -> None:
    dumper = HookerAndDumper(f"{tmp_path}/")
    with dumper.register_hooks(nn.Linear(2, 2), 0, 0) as handle:
        with pytest.raises(UsageError):
            dumper.register_hooks({}, 0, 1)
        assert [path.name for path in tmp_path.iterdir()] == [handle.path.name]
        assert dumper._observer is not None


@pytest.mark.parametrize("given", [nn.Linear, [nn.Linear], ["Linear", 3], nn.Linear(2, 2), 3])
def test_classes_are_given_by_name(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="target_class_names takes class names"):
        register_saving_hook(nn.Linear(2, 2), tmp_path / "t", given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [nn.Linear(2, 2), 3, None])
def test_the_npz_hooks_take_a_name_not_a_module(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name takes a text"):
        save_gradients_and_inputs(given, tmp_path / "debug")
    assert not list(tmp_path.iterdir())
