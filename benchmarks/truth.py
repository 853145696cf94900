"""Gradients against float64: backward passes that round too much, and right ones, in models of transformers.

    python benchmarks/truth.py                        # eight families, about 4 minutes
    python benchmarks/truth.py --models llama gpt2 -v
    python benchmarks/truth.py --held-out             # families on which no bound was chosen
    python benchmarks/truth.py --paddle               # paddle.nn.TransformerEncoder and models of paddle.vision

Everything is in bfloat16. A mistake computes the gradients of one module in bfloat16 throughout; the right pairs
compute them by hand in float32, sum products in other orders, run other kernels, or recompute. "named": the first
module named is that one, and no other. "equal": the change leaves the gradients as they are, bit for bit. Paddle has no
arithmetic in bfloat16 on a CPU: there, models are in float32, a mistake rounds to bfloat16, and the sentence must say
that the candidate is the one that loses precision.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

import tensortap as tt
from field.bench.backward_precision import (
    changes_of,
    fused_attention_in_short,
    fused_rms_norm,
    is_rms_norm,
    short_floats,
    use_attention,
)
from field.bench.measuring import WITH_TRUTH, Bench
from field.bench.settings import all_linear, linear_in_chunks, linear_summed_in_two
from field.kit.mistake import nothing
from field.kit.patches import Apply, both, does, trains
from field.kit.running import training_of
from field.kit.wrong import checkpointed
from field.sets import EVERY

TUNED = ("llama", "gpt2", "bert", "t5", "qwen2", "mistral", "vit", "opt")
KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")
ONCE_MORE = "two halves"
"""The batch in two halves, one after the other: autograd adds two weight gradients, and rounds their sum once more."""
HELD_OUT = ("qwen3", "phi", "gpt_neox", "roberta", "olmo2", "stablelm", "whisper", "glm4", "starcoder2", "distilbert")


@dataclass(frozen=True)
class Pair:
    """Two trainings that differ in how a gradient is computed."""

    name: str
    candidate: Apply
    place: str | None = None
    """The module to name; None if both are right."""
    attention: str = "eager"
    common: Apply = short_floats


def _pairs(family: str) -> Iterator[Pair]:
    for change, place in changes_of(family):
        yield Pair(change.name, change.apply(place, torch.bfloat16), place)
        yield Pair(f"{change.name} in float32", change.apply(place, torch.float32))
    yield Pair("sums in two", all_linear(linear_summed_in_two(1 / 2)))
    yield Pair(ONCE_MORE, all_linear(linear_in_chunks))
    yield Pair("two threads", trains(threads=2))
    model = training_of(family).model
    if norms := [name for name, module in model.named_modules() if is_rms_norm(module)]:
        yield Pair("fused norms", both(*(does(name, fused_rms_norm) for name in norms)))
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    if layers and not EVERY[family].dropout:
        yield Pair("recomputed", checkpointed(f"{layers[0]}.0"))
    if EVERY[family].attention:
        yield Pair("fused attention", nothing, attention="sdpa")
        yield Pair("attention that is not fused", use_attention("eager"), common=fused_attention_in_short)


def judged(bench: Bench, family: str, verbose: bool) -> Iterator[tuple[str, str]]:
    for pair in _pairs(family):
        training = training_of(family, pair.attention)
        pair.common(training)
        pair.candidate(training)
        result = bench.compared(family, pair.common, training, WITH_TRUTH)
        named = list(dict.fromkeys(birth.module for birth in result.births))
        if pair.name == ONCE_MORE:
            roundings = [birth.truth.roundings for birth in result.births if birth.truth is not None]
            kind, outcome = ONCE_MORE, "named" if result.verdict == "imprecise" and max(roundings) < 4 else "missed"
        elif pair.place is None:
            kind, outcome = "right pairs", "alarm" if named or result.verdict != "match" else "right"
        elif not named and not _gradients_differ(result):
            kind, outcome = "mistakes", "equal"
        else:
            kind, outcome = "mistakes", "named" if named == [pair.place] else "wrong" if named else "missed"
        if verbose or outcome in ("alarm", "wrong", "missed"):
            print(f"  {outcome}: {family}, {pair.name} at {pair.place!r}: {named[:3]}, {result.verdict}")
            print(*(f"    {line}" for line in (result.sentence, *result.notes)), sep="\n")
        yield kind, outcome


def _gradients_differ(result: Any) -> bool:
    return any(row["kind"].startswith(("grad", "param_grad")) and row["status"] != "equal" for row in result.rows)


def judged_in_paddle(folder: Path, name: str, verbose: bool) -> Iterator[tuple[str, str]]:
    from field.bench import paddle_precision as zoo

    model = zoo.built(name)
    with tt.capture(model, folder / name, keep="tensors", kinds=KINDS):
        zoo.step(name, model)
    cases = [("right pairs", word, [*_of_class(model, kind)], change) for word, (kind, change) in zoo.RIGHT.items()]
    for place in zoo.places(model):
        cases += [("mistakes", word, [place], change) for word, change in zoo.MISTAKES.items()]
    for kind, word, layers, change in cases:
        if not layers:
            continue
        model = zoo.built(name)
        for layer in layers:
            change(zoo.layer_of(model, layer))
        with tt.check(model, folder / name, truth="float64") as checked:
            zoo.step(name, model)
        result = checked.result
        named = list(dict.fromkeys(birth.module for birth in result.births))
        if kind == "right pairs":
            outcome = "right" if result.verdict == "match" else "alarm"
        else:
            says = any(words in result.sentence for words in ("loses precision", "less exact"))
            outcome = "named" if named == layers and says else "wrong" if named else "missed"
        if verbose or outcome in ("alarm", "wrong", "missed"):
            print(f"  {outcome}: {name}, {word} at {layers[:3]}: {named[:3]}, {result.verdict}\n    {result.sentence}")
        yield kind, outcome


def _of_class(model: Any, kind: type) -> Iterator[str]:
    return (name for name, layer in model.named_sublayers() if type(layer) is kind)


def _parts(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, Iterator[tuple[str, str]]]]:
    if options.paddle:
        from field.bench.paddle_precision import MODELS

        for name in MODELS:
            yield name, judged_in_paddle(folder, name, options.verbose)
        return
    for family in options.models or (HELD_OUT if options.held_out else TUNED):
        bench = Bench(folder)
        yield family, judged(bench, family, options.verbose)
        bench.forget()


def print_counts(title: str, counts: Counter[tuple[str, str]]) -> None:
    counted = (f"{kind} {outcome} {count}" for (kind, outcome), count in sorted(counts.items()))
    print(f"{title}:", ", ".join(counted), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=EVERY)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--paddle", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    total: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for title, outcomes in _parts(Path(folder), options):
            counted = Counter(outcomes)
            total += counted
            print_counts(title, counted)
    print_counts("all", total)


if __name__ == "__main__":
    main()
