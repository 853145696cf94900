"""`TapCallback` with the real Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensortap

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = torch.nn.Linear(4, 3), torch.nn.Linear(3, 4)
        self.bad = -1

    def training_step(self, batch: Any, index: int) -> Any:
        if index == self.bad:
            raise ValueError("a bad batch")
        return torch.nn.functional.mse_loss(self.decoder(self.encoder(batch)), batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.decoder(self.encoder(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Any, folder: Path, callbacks: list[Any], resume: str | None = None, **options: Any) -> Any:
    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    chosen = {"max_epochs": 2, "accumulate_grad_batches": 2, "enable_checkpointing": False} | options
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **chosen,
    )
    trainer.fit(model, data, data, ckpt_path=resume)
    return trainer


def test_steps_micro_steps_evaluation_and_several_fits(tmp_path: Path) -> None:
    from tensortap.integrations.lightning import TapCallback

    plain, model = Net(), Net()
    fit(plain, tmp_path, [])
    callback = TapCallback(tmp_path / "run")
    fit(model, tmp_path, [callback])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))
    run = tensortap.open(tmp_path / "run")
    assert run.finished and run.info["model"] == "Net"
    assert run.steps == [0, 1, 2, 3] and {record.key.micro for record in run.records()} == {0, 1}
    assert not model.encoder._forward_hooks
    fit(model, tmp_path, [callback])
    assert tensortap.open(tmp_path / "run-2").steps == [0, 1, 2, 3]


def test_resumption_is_noted(tmp_path: Path) -> None:
    from tensortap.integrations.lightning import TapCallback

    first = fit(Net(), tmp_path, [], max_epochs=1)
    first.save_checkpoint(tmp_path / "saved.ckpt")
    fit(Net(), tmp_path, [TapCallback(tmp_path / "run")], resume=str(tmp_path / "saved.ckpt"))
    run = tensortap.open(tmp_path / "run")
    assert run.steps == [0, 1]
    assert any("step 0 of this run is step 2 of the training" in notice for notice in run.notices)


def test_an_exception_closes_the_run_as_failed(tmp_path: Path) -> None:
    from tensortap.integrations.lightning import TapCallback

    model = Net()
    model.bad = 2
    with pytest.raises(ValueError, match="a bad batch"):
        fit(model, tmp_path, [TapCallback(tmp_path / "run")])
    run = tensortap.open(tmp_path / "run")
    assert not run.finished and any("ValueError: a bad batch" in notice for notice in run.notices)
    assert not model.encoder._forward_hooks
