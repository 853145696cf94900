"""Checks taps inside compiled graphs on many models.

    python benchmarks/compiled.py --backend inductor,aot_eager --known cases.jsonl --jobs 8
    python benchmarks/compiled.py --backend aot_eager decoder LlamaForCausalLM
    python benchmarks/compiled.py --mistakes 1 --backend inductor --known mistakes.jsonl

For each model, compiled whole and layer by layer, with and without activation checkpointing: whether a run with
`compiled="inside"` has the identities of the eager run, each once; how many graph breaks the tap adds; and whether
the tapped training gives the same bits as the untapped one. With --mistakes N, whether comparisons of compiled runs
name the same module as comparisons of eager runs, for every N-th planted mistake of tests/mistakes. With --known, a
run that was interrupted goes on where it ended. With --jobs N, N processes share the cases.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch._dynamo.utils import counters

import tensortap as tt
from tensortap.core.records import display_name

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


from mistakes.models import MODELS
from mistakes.running import train_under, training_of
from mistakes.zoo import MISTAKES, Mistake

from support.compiling import (
    checkpoint_layers,
    compile_layers,
    compile_whole,
    differences,
    graph_breaks,
    graphs,
    train,
    untapped_gradients,
)

WORDS, LENGTH = 64, 16


@dataclass(frozen=True)
class Case:
    """A model and its step."""

    name: str
    build: Callable[[], nn.Module]
    step: Callable[[Any], torch.Tensor]


def in_dtype_of(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return the inputs in the dtype of the model's parameters, unless they are integers."""
    return inputs.to(next(model.parameters()).dtype) if inputs.is_floating_point() else inputs


def zoo_cases() -> Iterator[Case]:
    """Yield the models of tests/mistakes."""
    for name in MODELS:
        training = training_of(name)
        batch = training.batches[0][0]

        def step(model: Any, loss: Any = training.loss, batch: Any = batch) -> torch.Tensor:
            output = model(in_dtype_of(model, batch.inputs))
            found: torch.Tensor = loss(output.float().flatten(0, -2), batch.target.flatten())
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
        found: torch.Tensor = model(pixel_values=in_dtype_of(model, pixels), labels=torch.tensor([1, 2])).loss
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


@dataclass(frozen=True)
class Setting:
    """How a model is compiled and checked."""

    how: str
    checkpointed: bool
    backend: str
    dtype: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        checkpointed = "checkpointed" if self.checkpointed else ""
        return f"{self.how:7}{checkpointed:13}{self.backend:10}{self.dtype:9}{dict(self.options) or ''}"

    def build(self, case: Case) -> nn.Module:
        torch.manual_seed(0)
        model = case.build().to(getattr(torch, self.dtype))
        if self.checkpointed and hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif self.checkpointed:
            checkpoint_layers(model)
        return model

    def compile(self, case: Case) -> Any:
        compiling = compile_whole if self.how == "whole" else compile_layers
        return compiling(self.build(case), backend=self.backend, **dict(self.options))


def seeded(step: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    def run(model: Any) -> torch.Tensor:
        torch.manual_seed(7)
        return step(model)

    return run


def check_named(name: str, setting: Setting) -> dict[str, Any]:
    """Return what taps inside a model see and change, or the error."""
    (case,) = cases([name])
    try:
        return check(case, setting)
    except Exception as error:  # the other cases are still tried
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}


def check(case: Case, setting: Setting) -> dict[str, Any]:
    """Return what taps inside a model see and change."""
    step, started = seeded(case.step), time.process_time()
    emulated = {"emulate_casts": True} if setting.backend == "inductor" else {}
    fresh_compiler()
    with torch._inductor.config.patch(emulate_precision_casts=bool(emulated)):
        plain = untapped_gradients(setting.compile(case), step)
    breaks = graph_breaks()
    fresh_compiler()
    model = setting.compile(case)
    inside = train(model, step, steps=1, compiled="inside", **emulated)
    added, graphs_made = graph_breaks() - breaks, graphs()
    tapped = [p.grad for p in model.parameters() if p.grad is not None]
    eager = train(setting.build(case), step, steps=1)
    found = differences(eager, inside)
    return {
        "records": len(list(eager.run)),
        "missing": found["missing"],
        "extra": found["extra"],
        "breaks": breaks,
        "added breaks": added,
        "graphs": graphs_made,
        "unequal": unequal(plain[1:], tapped),
        "other bits": len(found["other"]),
        "seconds": time.process_time() - started,
    }


def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def unequal(plain: list[torch.Tensor], tapped: list[torch.Tensor]) -> float | None:
    """Return the greatest relative difference of gradients; None if they are equal bit for bit."""
    if len(plain) != len(tapped):
        return float("inf")
    if all(map(torch.equal, plain, tapped)):
        return None
    return max(float((a - b).norm() / a.norm()) for a, b in zip(plain, tapped, strict=True))


def line_of(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"FAILED: {found['error']}"
    here = "all there, each once"
    if found["missing"] or found["extra"]:
        here = f"{len(found['missing'])} MISSING, {len(found['extra'])} EXTRA"
    same = "tapped = untapped" if found["unequal"] is None else f"TAPPED DIFFERS {found['unequal']:.1e}"
    return (
        f"{found['records']:5} records {here:21} +{found['added breaks']} breaks {found['graphs']:3} graphs  "
        f"{same:24} {found['seconds']:6.1f} s CPU"
    )


class Outcomes:
    """What is known of each case, also from an earlier run that was interrupted."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known = dict(map(json.loads, lines))

    def get(self, name: str) -> Any:
        return self._known.get(name)

    def add(self, name: str, found: Any) -> None:
        self._known[name] = found
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([name, found]) + "\n")


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, and a line for each case on any output."""
    console = Console(soft_wrap=True, highlight=False)
    with Progress(*Progress.get_default_columns(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("cases", total=total)

        def advance(line: str) -> None:
            console.print(line, markup=False)
            bar.advance(task)

        yield advance


class Mistakes:
    """Compares runs with planted mistakes, eager and inside."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._references: dict[Any, Any] = {}

    def check(self, mistake: Mistake) -> dict[str, Any]:
        """Return which module comparisons of eager and of compiled runs name, and whether that is right."""
        found: dict[str, Any] = {}
        for how in ("eager", "inside"):
            spot = mistake.model, how, mistake.kinds
            if spot not in self._references:
                self._references[spot] = self._run(training_of(mistake.model), how, mistake.kinds)
            wrong = training_of(mistake.model)
            mistake.apply(wrong)
            result = tt.compare(self._references[spot], self._run(wrong, how, mistake.kinds))
            first = None if result.first is None else result.first.module
            right = result.verdict == "diverged" and first in mistake.places
            found[how] = ["nothing" if first is None else display_name(first), right]
        return found

    def _run(self, training: Any, how: str, kinds: tuple[str, ...]) -> Any:
        torch._dynamo.reset()
        training.compiled = self._backend if how == "inside" else None
        options: dict[str, Any] = {"keep": "tensors", "kinds": kinds, "on_error": "raise"}
        if how == "inside":
            # Fused code keeps float32 between operations, so a mistake that rounds to bfloat16 may not exist in it.
            options |= {"compiled": "inside", "emulate_casts": self._backend == "inductor"}
        return train_under(training, lambda model: tt.capture(model, None, **options)).run


def check_mistake(name: str, backend: str) -> dict[str, Any]:
    (mistake,) = (each for each in MISTAKES if each.name == name)
    try:
        return _mistakes(backend).check(mistake)
    except Exception as error:  # the other mistakes are still tried
        failed = f"FAILED: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return {"eager": ["not known", False], "inside": [failed, False]}


@cache
def _mistakes(backend: str) -> Mistakes:
    """Return the one of this process: references are trained once."""
    return Mistakes(backend)


def line_of_mistake(found: dict[str, Any]) -> str:
    (eager, _), (inside, _) = found["eager"], found["inside"]
    return f"eager {eager:26} inside {inside:26}{'' if eager == inside else '  OTHER'}"


def summary_of_mistakes(outcomes: list[dict[str, Any]]) -> str:
    eager, inside = (sum(found[how][1] for found in outcomes) for how in ("eager", "inside"))
    return f"of {len(outcomes)} mistakes, eager runs name {eager}, runs inside {inside}"


@dataclass(frozen=True)
class Work:
    """A case by its name, and a function that any process can call to try it."""

    name: str
    function: Callable[[], dict[str, Any]]


def do_all(
    works: Sequence[Work], known: Outcomes, jobs: int, line: Callable[[dict[str, Any]], str]
) -> list[dict[str, Any]]:
    """Return the outcomes, and print a line for each as soon as it is known."""
    outcomes = []
    with progress(len(works)) as advance, executor(jobs) as pool:
        tasks: dict[Future[dict[str, Any]], Work] = {}
        for work in works:
            if (found := known.get(work.name)) is None:
                tasks[pool.submit(work.function)] = work
            else:
                outcomes.append(found)
                advance(f"{work.name} {line(found)}")
        for task in as_completed(tasks):
            found = task.result()
            known.add(tasks[task].name, found)
            outcomes.append(found)
            advance(f"{tasks[task].name} {line(found)}")
    return outcomes


@contextmanager
def executor(jobs: int) -> Iterator[Executor]:
    """Processes that share the work: one thread and one compiler each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=quiet)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def quiet() -> None:
    """Let the compiler report errors only."""
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.ERROR)
    torch.set_num_threads(1)


def summary_of(outcomes: list[dict[str, Any]]) -> str:
    """Count the cases that are as they should be."""
    ran = [found for found in outcomes if "error" not in found]
    complete = sum(not found["missing"] and not found["extra"] for found in ran)
    unbroken = sum(found["added breaks"] <= 0 for found in ran)
    equal = sum(found["unequal"] is None for found in ran)
    return (
        f"of {len(outcomes)} cases, {len(ran)} ran: {complete} have the eager run's records, each once, "
        f"{unbroken} no added break, {equal} tapped = untapped"
    )


def cases(names: list[str]) -> Iterator[Case]:
    """Yield the models of such names, or all."""
    for case in (*zoo_cases(), *transformers_cases()):
        if not names or case.name in names:
            yield case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="aot_eager", help="one or more, separated by commas")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or both, separated by a comma")
    parser.add_argument("--mode", help="mode of torch.compile")
    parser.add_argument("--dynamic", action="store_true", help="compile for any size")
    parser.add_argument("--fullgraph", action="store_true", help="fail where a graph breaks")
    parser.add_argument("--mistakes", type=int, metavar="N", help="try every N-th planted mistake instead")
    parser.add_argument("--known", type=Path, metavar="FILE", help="append outcomes here, and skip those it has")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("models", nargs="*")
    options = parser.parse_args()
    quiet()
    known, backends = Outcomes(options.known), options.backend.split(",")
    if options.mistakes:
        chosen = [each for each in MISTAKES if not options.models or each.model in options.models][:: options.mistakes]
        works = [
            Work(f"{each.model} {each.name} {backend}".ljust(60), partial(check_mistake, each.name, backend))
            for backend in backends
            for each in chosen
        ]
        print(summary_of_mistakes(do_all(works, known, options.jobs, line_of_mistake)))
        return
    further = {"mode": options.mode, "dynamic": options.dynamic or None, "fullgraph": options.fullgraph or None}
    given = tuple((name, value) for name, value in further.items() if value is not None)
    settings = [
        Setting(how, checkpointed, backend, dtype, given)
        for backend in backends
        for dtype in options.dtype.split(",")
        for how in ("whole", "layers")
        for checkpointed in (False, True)
    ]
    works = [
        Work(f"{case.name:26} {setting}", partial(check_named, case.name, setting))
        for case in cases(options.models)
        for setting in settings
    ]
    print(summary_of(do_all(works, known, options.jobs, line_of)))


if __name__ == "__main__":
    main()
