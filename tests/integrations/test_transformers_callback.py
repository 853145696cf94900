"""`TapCallback` with the real Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensortap
from tensortap.errors import UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        if x.isnan().any():
            raise ValueError("a bad batch")
        logits = self.fc(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.tensor(index % 2)} for index in range(16)]
    chosen = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
    } | arguments
    return transformers.Trainer(
        model=Net(),
        args=transformers.TrainingArguments(
            output_dir=str(folder / "out"), report_to=[], use_cpu=True, disable_tqdm=True, **chosen
        ),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=callbacks,
    )


def test_steps_micro_steps_and_evaluation(tmp_path: Path) -> None:
    from tensortap.integrations.transformers import TapCallback

    plain = trainer(tmp_path, [])
    plain.train()
    callback = TapCallback(tmp_path / "run", kinds=("output", "param_grad"))
    recorded = trainer(tmp_path, [callback])
    recorded.train()
    for ours, theirs in zip(recorded.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    run = tensortap.open(tmp_path / "run")
    assert run.finished and run.info["model"] == "Net"
    assert run.steps == [0, 1, 2, 3] and {record.key.micro for record in run.records()} == {0, 1}
    assert not recorded.model.fc._forward_hooks
    assert callback.tap is not None and callback.tap.path == tmp_path / "run"

    recorded.train()  # several fits
    assert tensortap.open(tmp_path / "run-2").steps == [0, 1, 2, 3]


def test_resumption_is_noted(tmp_path: Path) -> None:
    from tensortap.integrations.transformers import TapCallback

    trainer(tmp_path, [], save_strategy="steps", save_steps=2, max_steps=2).train()
    recorded = trainer(tmp_path, [TapCallback(tmp_path / "run")])
    recorded.train(resume_from_checkpoint=True)
    run = tensortap.open(tmp_path / "run")
    assert run.steps == [0, 1]
    assert any("step 0 of this run is step 2 of the training" in notice for notice in run.notices)


def test_an_exception_closes_the_run_as_failed(tmp_path: Path) -> None:
    from tensortap.integrations.transformers import TapCallback

    recorded = trainer(tmp_path, [TapCallback(tmp_path / "run")])
    recorded.train_dataset[5]["x"].fill_(torch.nan)
    with pytest.raises(ValueError, match="a bad batch"):
        recorded.train()
    run = tensortap.open(tmp_path / "run")
    assert not run.finished and any("ValueError: a bad batch" in notice for notice in run.notices)
    assert not recorded.model.fc._forward_hooks


def test_options_are_those_of_capture_and_events_are_open() -> None:
    from tensortap.integrations.transformers import TapCallback

    with pytest.raises(UsageError, match="capture has no such option"):
        TapCallback("run", kind="output")
    callback = TapCallback("run")
    assert callback.on_load_data_end(None, None, None, inputs=1) is None  # an event of PaddleNLP
    with pytest.raises(AttributeError):
        callback.of_nothing  # noqa: B018
