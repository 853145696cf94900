"""A `paddle.Model`, as its own users train it, is taken by its network wherever a model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from tensortap.compat.dump import HookerAndDumper
from tensortap.compat.profiler import backward_hook_wrapper, forward_hook_wrapper
from tensortap.compat.saving_hook import register_saving_hook, remove_saving_hook
from tensortap.errors import UsageError

paddle = pytest.importorskip("paddle")
nn = paddle.nn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:paddle", "ignore::DeprecationWarning")


def made(prepared: bool = True) -> Any:
    paddle.seed(1)
    model = paddle.Model(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    if prepared:
        optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
        model.prepare(optimizer, nn.CrossEntropyLoss())
    return model


class Data(paddle.io.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> tuple[Any, Any]:
        random = np.random.default_rng(at)
        return random.standard_normal(4).astype("float32"), random.integers(0, 2, 1)


def fit(model: Any) -> list[Any]:
    model.fit(Data(), batch_size=2, epochs=1, shuffle=False, verbose=0)
    return [parameter.numpy() for parameter in model.parameters()]


def test_capture_and_check_of_a_fit(tmp_path: Path) -> None:
    model = made()
    with tt.capture(model, tmp_path / "run", keep="tensors", optimizer=model):
        tapped = fit(model)
    assert all(np.array_equal(a, b) for a, b in zip(fit(made()), tapped, strict=True))
    run = tt.open(tmp_path / "run")
    assert {r.key.module for r in run} == {"", "0", "1", "2"}
    assert sorted({r.key.step for r in run}) == [0, 1, 2]
    again = made()
    with tt.check(again, tmp_path / "run", optimizer=again._optimizer) as check:
        fit(again)
    assert check.result.verdict == "match"


def test_a_model_without_an_optimizer_raises(run_path: Path) -> None:
    model = made(prepared=False)
    with pytest.raises(UsageError, match=r"not a Model; leave it out and call tap\.step"):
        tt.capture(model, run_path, optimizer=model)


def test_all_tools_accept_a_paddle_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, target = made(), made()
    assert [str(each.name) for each in tt.inspect(model, optimizer=model).tensors][:2] == ["0.weight", "0.bias"]
    assert len(tt.transfer(model, target).copied) == 4
    with tt.audit(model, optimizer=model) as audit:
        fit(model)
    assert "optimizer step, 3 times" in str(audit)
    with tt.peek(model, "0", times=1), tt.annotate(model):
        fit(model)
    assert "0 · Linear · call 1 of 1 · forward" in capsys.readouterr().out
    tt.noise(model, paddle.ones([2, 4]), tmp_path / "noise", seeds=1)
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=("input", "output", "param"), optimizer=model):
        fit(model)
    assert tt.replay(tmp_path / "run", "2", model=model).verdict == "match"


def test_the_interfaces_that_scripts_already_use(tmp_path: Path) -> None:
    model = made()
    assert register_saving_hook(model, tmp_path / "saved") is model
    fit(model)
    assert remove_saving_hook(model) == 1
    assert [*(tmp_path / "saved" / "tensors").rglob("*.npy")]
    dumper = HookerAndDumper(f"{tmp_path}/")
    with dumper.register_hooks(model):
        fit(model)
    assert [*tmp_path.glob("*.hdf5")]
    assert forward_hook_wrapper(model) is model
    assert backward_hook_wrapper(model) is model
    fit(model)
