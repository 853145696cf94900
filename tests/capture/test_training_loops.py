"""Real trainers with evaluation, accumulation and compilation in between, tapped by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.tapping import everything

pytestmark = pytest.mark.filterwarnings("ignore")


def language_model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=17, n_positions=8, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # the loader of an evaluation draws numbers, too
    return transformers.GPT2LMHeadModel(config)


def trained_by_trainer(folder: Path, evaluates: bool, compiles: bool = False, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch._dynamo.reset()
    model = language_model()
    data = [{"input_ids": (torch.arange(8) + row) % 17, "labels": torch.arange(8)} for row in range(8)]
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=1,
        eval_on_start=evaluates,
        torch_compile=compiles,
        torch_compile_backend="eager" if compiles else None,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2])
    optimizer = trainer.create_optimizer()
    with tt.capture(model, optimizer=optimizer, on_error="raise", **options) as tap:
        trainer.train()
    return tap


def counted(run: Any, phase: str) -> set[tuple[int, int]]:
    return {(record.key.step, record.key.micro) for record in run.records(phase=phase)}


BOTH_STEPS = {(step, micro) for step in (0, 1) for micro in (0, 1)}


def test_a_trainer_with_and_without_evaluation_matches(tmp_path: Path) -> None:
    plain = trained_by_trainer(tmp_path, evaluates=False)
    evaluated = trained_by_trainer(tmp_path, evaluates=True)
    assert everything(plain.run) == everything(evaluated.run)
    assert counted(plain.run, "forward") == BOTH_STEPS and plain.run.steps == [0, 1]
    assert tt.compare(plain.run, evaluated.run).verdict == "match"
    assert any("3 forwards of an evaluation" in notice for notice in evaluated.notices)


def test_a_trainer_that_compiles_is_seen_at_the_boundary(tmp_path: Path) -> None:
    run = trained_by_trainer(tmp_path, evaluates=False, compiles=True).run
    assert counted(run, "forward") == counted(run, "backward") == BOTH_STEPS
    assert {record.key.module for record in run.records(kind="output")} == {""}
    assert len({record.key.module for record in run.records(kind="param_grad")}) > 5


def test_generate_is_recorded_whole() -> None:
    model = language_model().eval()
    with tt.capture(model, kinds="output") as tap:
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False)
    assert {record.key.phase for record in tap.run} == {"forward"}
    assert {record.key.micro for record in tap.run} == {0, 1, 2, 3} and not tap.notices


@pytest.mark.parametrize("evaluates", [False, True])
def test_lightning_counts_micro_steps_of_a_training_step_that_bypasses_forward(evaluates: bool) -> None:
    lightning = pytest.importorskip("lightning")

    class Autoencoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return (self.decoder(self.encoder(batch)) - batch).square().mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.training_step(batch, 0)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class CountSteps(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step > tap.stats()["steps"]:
                tap.step()

    torch.manual_seed(0)
    model = Autoencoder()
    batches = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        num_sanity_val_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CountSteps()],
    )
    with tt.capture(model, on_error="raise", evaluation=True) as tap:
        trainer.fit(model, batches, batches if evaluates else None)
    assert {key.call for key in everything(tap.run) if key.phase != "eval"} == {0}
    assert counted(tap.run, "forward") == counted(tap.run, "backward") == BOTH_STEPS
    assert bool(counted(tap.run, "eval")) == evaluates  # the sanity check among them
