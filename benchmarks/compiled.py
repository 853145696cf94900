"""Checks taps inside compiled graphs on many models: python benchmarks/compiled.py [--backend aot_eager] [MODEL ...]

For each model, compiled whole and layer by layer, with and without activation checkpointing: whether a run with
`compiled="inside"` has the identities of the eager run, each once; whether the graph was broken; and whether the tapped
training gives the same bits as the untapped one. With --mistakes N, whether comparisons of compiled runs name the same
module as comparisons of eager runs, for every N-th planted mistake of tests/mistakes.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import tensortap as tt
from tensortap.core.records import display_name

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


from mistakes.models import MODELS
from mistakes.running import train_under, training_of
from mistakes.zoo import MISTAKES

from support.compiling import compile_layers, compile_whole, differences, train, untapped_gradients

WORDS, LENGTH = 64, 16


@dataclass(frozen=True)
class Case:
    """A model and its step."""

    name: str
    build: Callable[[], nn.Module]
    step: Callable[[Any], torch.Tensor]


def zoo_cases() -> Iterator[Case]:
    """Yield the models of tests/mistakes."""
    for name in MODELS:
        training = training_of(name)
        batch = training.batches[0][0]

        def step(model: Any, loss: Any = training.loss, batch: Any = batch) -> torch.Tensor:
            found: torch.Tensor = loss(model(batch.inputs).float().flatten(0, -2), batch.target.flatten())
            return found

        yield Case(name, lambda name=name: training_of(name).model, step)


def transformers_cases() -> Iterator[Case]:
    """Yield five tiny models of transformers."""
    import transformers as hf

    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS, (2, LENGTH), generator=random)
    mask = torch.ones_like(tokens)
    mask[1, 10:] = 0  # compiled, transformers makes a mask for attention in any case
    pixels = torch.randn(2, 3, 16, 16, generator=random)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    decoder = {"vocab_size": WORDS, "use_cache": False}  # otherwise checkpointing logs a line, and breaks the graph

    def language(model: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        return found

    def masked(model: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        return found

    def vision(model: Any) -> torch.Tensor:
        found: torch.Tensor = model(pixel_values=pixels, labels=torch.tensor([1, 2])).loss
        return found

    llama = hf.LlamaConfig(num_key_value_heads=1, **decoder, **small)
    qwen = hf.Qwen2Config(num_key_value_heads=1, **decoder, **small)
    gpt2 = hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, loss_type="ForCausalLM", **decoder)
    bert = hf.BertConfig(max_position_embeddings=32, **decoder, **small)
    vit = hf.ViTConfig(image_size=16, patch_size=4, num_labels=4, **small)
    yield Case("LlamaForCausalLM", lambda: hf.LlamaForCausalLM(llama), language)
    yield Case("Qwen2ForCausalLM", lambda: hf.Qwen2ForCausalLM(qwen), language)
    yield Case("GPT2LMHeadModel", lambda: hf.GPT2LMHeadModel(gpt2), language)
    yield Case("BertForMaskedLM", lambda: hf.BertForMaskedLM(bert), masked)
    yield Case("ViTForImageClassification", lambda: hf.ViTForImageClassification(vit), vision)


def built(case: Case, checkpointed: bool, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = case.build().to(dtype)
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def compiled(model: nn.Module, how: str, backend: str) -> Any:
    return (compile_whole if how == "whole" else compile_layers)(model, backend=backend)


def seeded(step: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    def run(model: Any) -> torch.Tensor:
        torch.manual_seed(7)
        return step(model)

    return run


def check(case: Case, how: str, checkpointed: bool, backend: str, dtype: torch.dtype) -> str:
    """Return one line about a model."""
    step, started = seeded(case.step), time.perf_counter()
    torch._dynamo.reset()
    eager = train(built(case, checkpointed, dtype), step)
    emulated = {"emulate_casts": True} if backend == "inductor" else {}
    with torch._inductor.config.patch(emulate_precision_casts=bool(emulated)):
        plain = untapped_gradients(compiled(built(case, checkpointed, dtype), how, backend), step)
    torch._dynamo.reset()
    counters.clear()
    model = compiled(built(case, checkpointed, dtype), how, backend)
    inside = train(model, step, steps=1, compiled="inside", **emulated)
    breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
    tapped = [p.grad for p in model.parameters() if p.grad is not None]
    equal = len(plain) - 1 == len(tapped) and all(map(torch.equal, plain[1:], tapped))
    eager = train(built(case, checkpointed, dtype), step, steps=1)
    found = differences(eager, inside)
    words = (
        f"{len(found['missing'])} missing, {len(found['extra'])} extra" if found["missing"] or found["extra"] else ""
    )
    return (
        f"{case.name:26} {how:7} {'checkpointed' if checkpointed else '':13} {len(list(eager.run)):5} records "
        f"{words or 'all there, each once':26} {breaks} breaks {graphs} graphs  "
        f"{'tapped = untapped' if equal else 'TAPPED DIFFERS':18} {time.perf_counter() - started:5.1f} s"
    )


def check_mistakes(names: list[str], backend: str, every: int) -> None:
    """Print the planted mistakes that comparisons of compiled runs name, and those that eager runs name."""
    named = {"eager": 0, "inside": 0}
    references: dict[Any, Any] = {}
    chosen = [mistake for mistake in MISTAKES if not names or mistake.model in names][::every]
    for mistake in chosen:
        found = {}
        for how in named:

            def run(training: Any, how: str = how, kinds: Any = mistake.kinds) -> Any:
                torch._dynamo.reset()
                training.compiled = backend if how == "inside" else None
                options = {"keep": "tensors", "kinds": kinds, "on_error": "raise"}
                where = "inside" if how == "inside" else "boundary"
                return train_under(training, lambda model: tt.capture(model, None, compiled=where, **options)).run

            if (spot := (mistake.model, how, mistake.kinds)) not in references:
                references[spot] = run(training_of(mistake.model))
            wrong = training_of(mistake.model)
            mistake.apply(wrong)
            result = tt.compare(references[spot], run(wrong))
            first = None if result.first is None else result.first.module
            found[how] = "nothing" if first is None else display_name(first)
            named[how] += result.verdict == "diverged" and first in mistake.places
        same = "" if len(set(found.values())) == 1 else "  OTHER"
        print(f"{mistake.name:40} eager {found['eager']:26} inside {found['inside']:26}{same}", flush=True)
    print(f"of {len(chosen)} mistakes, eager runs name {named['eager']}, runs inside {named['inside']}")


def cases(names: list[str]) -> Iterator[Case]:
    for case in (*zoo_cases(), *transformers_cases()):
        if not names or case.name in names:
            yield case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--mistakes", type=int, metavar="N", help="try every N-th planted mistake instead")
    parser.add_argument("models", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.mistakes:
        check_mistakes(options.models, options.backend, options.mistakes)
        return
    for case in cases(options.models):
        for how in ("whole", "layers"):
            if how == "layers" and not any(isinstance(each, nn.ModuleList) for each in case.build().modules()):
                continue
            for checkpointed in (False, True) if hasattr(case.build(), "gradient_checkpointing_enable") else (False,):
                print(check(case, how, checkpointed, options.backend, getattr(torch, options.dtype)), flush=True)


if __name__ == "__main__":
    main()
