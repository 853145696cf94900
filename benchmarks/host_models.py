"""The host's cost of a record in small models of several kinds, on a CPU.

    python benchmarks/host_models.py [--pairs 200] [--models mamba whisper] [--every 10]

Each model exists twice, once tapped with the default kinds. The two take turns, step by step, so that a machine that is
not steady slows both. Medians of the training thread's CPU time are printed, and the CPU time of the threads that
summarise and write. With `--every 10`, every tenth step is recorded, and the medians are those of the other steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from host import hf_llama, tiny
from torch import nn

import tensortap as tt

Step = Callable[[], None]
_TEXT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
_SIDES = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
_SIDES |= {"vocab_size": 64, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
_WHISPER = {**_SIDES, "max_source_positions": 16, "num_mel_bins": 8, "max_target_positions": 16}
_WHISPER |= {"pad_token_id": 0, "bos_token_id": 1}
_TOKENS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2}),
    "bert": ("BertForMaskedLM", {**_TEXT, "max_position_embeddings": 32}),
    "qwen3": ("Qwen3ForCausalLM", {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", {**_TEXT, "num_key_value_heads": 1, "num_local_experts": 4}),
    "mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "decoder_start_token_id": 0},
    ),
    "pegasus": ("PegasusForConditionalGeneration", {**_SIDES, "max_position_embeddings": 32}),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_experts": 4}
        | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0},
    ),
}
"""Models that are given tokens alone: their classes and configurations."""


def of_transformers(name: str, options: dict[str, Any], inputs: dict[str, Any]) -> tuple[nn.Module, Step]:
    import transformers

    cls = getattr(transformers, name)
    model = cls(cls.config_class(**options))
    return trained(model.train(), lambda: model(**inputs).loss)


def trained(model: nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[nn.Module, Step]:
    """Return a model with its training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def given_tokens(name: str) -> tuple[nn.Module, Step]:
    tokens = torch.randint(3, 60, (2, 8))
    return of_transformers(*_TOKENS[name], {"input_ids": tokens, "labels": tokens})


def vit() -> tuple[nn.Module, Step]:
    options = {**_TEXT, "image_size": 16, "patch_size": 8}
    del options["vocab_size"]
    images = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return of_transformers("ViTForImageClassification", options, images)


def resnet() -> tuple[nn.Module, Step]:
    options = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    images = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return of_transformers("ResNetForImageClassification", options, images)


def whisper() -> tuple[nn.Module, Step]:
    options = {**_WHISPER, "eos_token_id": 2, "decoder_start_token_id": 1}
    sounds = {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 60, (2, 8))}
    return of_transformers("WhisperForConditionalGeneration", options, sounds)


def transformer() -> tuple[nn.Module, Step]:
    model, x = nn.Transformer(16, 2, 2, 2, 32, batch_first=True), torch.randn(2, 8, 16)
    return trained(model, lambda: model(x, x).square().mean())


def in_place() -> tuple[nn.Module, Step]:
    """Return a model of layers that change what they are given."""
    layers = [each for _ in range(10) for each in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))]
    model, x = nn.Sequential(*layers), torch.randn(8, 16)
    return trained(model, lambda: model(x).square().mean())


MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "tiny": lambda: tiny("cpu"),
    "llama": lambda: hf_llama("cpu"),
    "llama, checkpointed": lambda: hf_llama("cpu", checkpointed=True),
    **{name: lambda name=name: given_tokens(name) for name in _TOKENS},  # type: ignore[misc]
    "vit": vit,
    "resnet": resnet,
    "whisper": whisper,
    "torch.nn.Transformer": transformer,
    "in place": in_place,
}


def measure(build: Callable[[], tuple[nn.Module, Step]], pairs: int, every: int) -> list[str]:
    """Let a tapped and an untapped copy of a model take turns, and return the columns of its line."""
    (_, plain), (model, step) = build(), build()
    without: list[float] = []
    tapped: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        tt.capture(model, Path(folder) / "run", steps=range(0, 1 << 40, every)) as tap,
    ):
        for _ in range(3 * every):  # the first steps learn
            plain()
            step()
            tap.step()
        tap.flush()
        records, others = tap.stats()["records"], time.process_time() - time.thread_time()
        for number in range(pairs):
            started = time.thread_time()
            plain()
            between = time.thread_time()
            step()
            tap.step()
            if every == 1 or number % every:
                without.append(between - started)
                tapped.append(time.thread_time() - between)
        tap.flush()
        records = (tap.stats()["records"] - records) / pairs
        others = (time.process_time() - time.thread_time() - others) / pairs
    base, more = statistics.median(without), statistics.median(tapped) - statistics.median(without)
    line = [f"{1e3 * base:.2f}", f"{1e3 * more:.2f}", f"{1 + more / base:.3f}", f"{records:.0f}"]
    return [*line, f"{1e6 * more / records:.1f}", f"{1e6 * others / records:.1f}"] if every == 1 else line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=200, help="steps of each of the two copies")
    parser.add_argument("--every", type=int, default=1, help="record every n-th step, and time the others")
    given = parser.parse_args()
    torch.set_num_threads(1)
    line = "{:22}{:>10}{:>10}{:>8}{:>9}{:>12}{:>15}".format
    print(line("model", "plain ms", "more ms", "ratio", "records", "µs/record", "others, µs"))
    for name in given.models:
        torch.manual_seed(0)
        columns = measure(MODELS[name], given.pairs, given.every)
        print(line(name, *columns, *[""] * (6 - len(columns))), flush=True)


if __name__ == "__main__":
    main()
