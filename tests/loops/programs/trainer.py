"""Hugging Face Trainer: gradient accumulation, activation checkpointing and evaluation.

usage: trainer.py RESULT [mistake]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main(result: str, mistake: str = "") -> None:
    set_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False))
    if mistake:
        model.transformer.h[1].ln_2.eps = 1e-2
    tokens = torch.randint(0, 32, (24, 8))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=4,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                gradient_checkpointing=True,
                eval_strategy="steps",
                eval_steps=2,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=data[:16],
            eval_dataset=data[16:],
        )
        trainer.train()
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    Path(result).write_bytes(repr(losses).encode() + parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])
