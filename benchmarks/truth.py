"""Gradients against float64: backward passes that round too much, and right ones, in models of transformers.

    python benchmarks/truth.py                        # ten families, about 10 minutes
    python benchmarks/truth.py --models llama gpt2 -v
    python benchmarks/truth.py --held-out             # families on which no bound was chosen

Everything is in bfloat16. A mistake computes the gradients of one module in bfloat16 throughout; the right pairs compute
them by hand in float32, sum products in other orders, run other kernels, or recompute. "named": the first module named
is that one, and no other. A pair in which the change leaves the gradients as they are, bit for bit, is not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from field.backward_precision import changes_of
from field.further import EVERY
from field.measuring import WITH_TRUTH, Bench
from field.mistake import nothing
from field.patches import Apply, trains
from field.running import Training, training_of
from field.settings import all_linear, linear_in_chunks, linear_summed_in_two

TUNED = ("llama", "gpt2", "bert", "t5", "qwen2", "mistral", "vit", "opt")
ONCE_MORE = "two halves"
"""The batch in two halves, one after the other: autograd adds two weight gradients, and rounds their sum once more."""
HELD_OUT = ("qwen3", "phi", "gpt_neox", "roberta", "olmo2", "stablelm", "whisper", "glm4", "starcoder2", "distilbert")


def _short(training: Training) -> None:
    training.model.to(torch.bfloat16)


def _pairs(family: str) -> Iterator[tuple[str, str | None, Apply, str]]:
    """Yield name, module to name (None for a right pair), change and attention of the candidate."""
    for change, place in changes_of(family):
        yield change.name, place, change.apply(place, torch.bfloat16), "eager"
        yield f"{change.name} in float32", None, change.apply(place, torch.float32), "eager"
    yield "sums in two", None, all_linear(linear_summed_in_two(1 / 2)), "eager"
    yield ONCE_MORE, None, all_linear(linear_in_chunks), "eager"
    yield "two threads", None, trains(threads=2), "eager"
    if EVERY[family].attention:
        yield "fused attention", None, nothing, "sdpa"


def judged(bench: Bench, family: str, verbose: bool) -> Iterator[tuple[str, str]]:
    for name, place, apply, attention in _pairs(family):
        training = training_of(family, attention)
        _short(training)
        apply(training)
        result = bench.compared(family, _short, training, WITH_TRUTH)
        named = list(dict.fromkeys(birth.module for birth in result.births))
        if name == ONCE_MORE:
            roundings = [birth.truth.roundings for birth in result.births if birth.truth is not None]
            outcome = "named" if result.verdict == "imprecise" and max(roundings) < 4 else "missed"
        elif place is None:
            outcome = "alarm" if named or result.verdict not in ("match",) else "right"
        elif not named and not _gradients_differ(result):
            outcome = "equal"
        else:
            outcome = "named" if named == [place] else "wrong" if named else "missed"
        if verbose or outcome in ("alarm", "wrong", "missed"):
            print(f"  {outcome:6} {family} {name} at {place!r}: {named[:3]} {result.verdict}\n         {result.sentence}")
        yield (name if name == ONCE_MORE else "right pairs" if place is None else "mistakes"), outcome


def _gradients_differ(result: Any) -> bool:
    return any(row["kind"].startswith(("grad", "param_grad")) and row["status"] != "equal" for row in result.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=EVERY)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    total: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for family in options.models or (HELD_OUT if options.held_out else TUNED):
            bench = Bench(Path(folder))
            counted = Counter(judged(bench, family, options.verbose))
            bench.forget()
            total += counted
            print(family, {f"{kind} {outcome}": count for (kind, outcome), count in sorted(counted.items())}, flush=True)
    print("all", {f"{kind} {outcome}": count for (kind, outcome), count in sorted(total.items())})


if __name__ == "__main__":
    main()
