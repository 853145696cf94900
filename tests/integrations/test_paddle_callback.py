"""`TapCallback` with `paddle.Model.fit`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap

paddle = pytest.importorskip("paddle")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Data(paddle.io.Dataset):
    def __getitem__(self, index: int) -> Any:
        return np.full(4, index / 8, "float32"), np.array([index % 2])

    def __len__(self) -> int:
        return 8


def model() -> Any:
    paddle.seed(0)
    made = paddle.Model(paddle.nn.Sequential(paddle.nn.Linear(4, 3), paddle.nn.ReLU(), paddle.nn.Linear(3, 2)))
    made.prepare(paddle.optimizer.Adam(0.01, parameters=made.parameters()), paddle.nn.CrossEntropyLoss())
    return made


def fit(trained: Any, data: Any, callbacks: list[Any]) -> None:
    trained.fit(data, data, batch_size=2, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)


def test_steps_evaluation_and_several_fits(tmp_path: Path) -> None:
    from tensortap.integrations.paddle import TapCallback

    plain, recorded = model(), model()
    fit(plain, Data(), [])
    callback = TapCallback(tmp_path / "run")
    fit(recorded, Data(), [callback])
    for ours, theirs in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()
    run = tensortap.open(tmp_path / "run")
    assert run.finished and run.steps == [0, 1, 2, 3] and {record.key.micro for record in run.records()} == {0}
    fit(recorded, Data(), [callback])
    assert tensortap.open(tmp_path / "run-2").steps == [0, 1, 2, 3]
    assert "_run_one_epoch" not in vars(recorded)


def test_an_exception_closes_the_run_as_failed(tmp_path: Path) -> None:
    from tensortap.integrations.paddle import TapCallback

    recorded = model()
    calls = iter(range(3))

    def third(*_: Any) -> None:
        if next(calls) == 2:
            raise ValueError("a bad batch")

    recorded.network.register_forward_pre_hook(third)
    with pytest.raises(ValueError, match="a bad batch"):
        fit(recorded, Data(), [TapCallback(tmp_path / "run")])
    run = tensortap.open(tmp_path / "run")
    assert run.steps == [0, 1] and not run.finished
    assert any("ValueError: a bad batch" in notice for notice in run.notices)
    assert "_run_one_epoch" not in vars(recorded)
