"""What taps inside compiled graphs cost on a GPU: python benchmarks/compiled_gpu.py [--layers 16] [--steps 20]

A LlamaForCausalLM of transformers with 0.95 B parameters in bfloat16, batch 4 x 2048, compiled whole and layer by
layer. Taps at the outputs of all leaf modules and their gradients. Prints the time of a training step without a tap,
with one that records at the boundary, and with one inside, as medians of one run, and ratios to the first. The aim is
1.08.

With --cuda-graphs, a small model in mode "reduce-overhead" shows whether taps run in each replay, and are counted
right.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensortap as tt

KINDS = ("output", "grad_output")


def llama(options: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width = options.width
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).to(options.device)


def compiled(model: Any, how: str) -> Any:
    if how == "whole":
        return torch.compile(model)
    for layer in model.model.layers:
        layer.compile()
    return model


def seconds(step: Callable[[], None], options: argparse.Namespace, after: Callable[[], None] = lambda: None) -> float:
    """Return the median time of a step, between synchronisations of the device."""
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    times = []
    for number in range(options.warmup + options.steps):
        wait()
        started = time.perf_counter()
        step()
        after()
        wait()
        if number >= options.warmup:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def leaf(_: str, module: Any) -> bool:
    return not any(module.children())


def measure(how: str, options: argparse.Namespace) -> None:
    torch._dynamo.reset()
    model = compiled(llama(options), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    tokens = torch.randint(0, 32000, (options.batch, options.length), device=options.device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = seconds(step, options)
    print(f"{how:7} untapped  {1e3 * plain:8.1f} ms", flush=True)
    for where in ("boundary", "inside", "inside, casts emulated"):
        with tempfile.TemporaryDirectory() as folder:
            choice = {"compiled": where.split(",")[0], "emulate_casts": "," in where}
            with tt.capture(model, Path(folder) / "run", kinds=KINDS, modules=leaf, on_error="raise", **choice) as tap:
                took = seconds(step, options, tap.step)
            steps = {record.key.step for record in tt.open(Path(folder) / "run")}
            records = len(tt.open(Path(folder) / "run")) / max(1, len(steps))
        print(f"{how:7} {where:24} {1e3 * took:8.1f} ms  {took / plain:.3f}x  {records:.0f} records a step", flush=True)
    again = seconds(step, options)
    print(f"{how:7} untapped again {1e3 * again:8.1f} ms  {again / plain:.3f}x", flush=True)


def cuda_graphs(options: argparse.Namespace) -> None:
    """Show what is recorded of a small model whose graph is replayed."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    model = torch.compile(nn.Sequential(*layers).to(options.device), mode="reduce-overhead")
    batches = [torch.randn(32, 256, device=options.device) for _ in range(8)]

    def run(taps: dict[str, Any]) -> Any:
        with tt.capture(model, None, kinds=KINDS, on_error="raise", **taps) as tap:
            for batch in batches:
                torch.compiler.cudagraph_mark_step_begin()
                model(batch).square().mean().backward()
                model.zero_grad()
                tap.step()
        return tap

    eager, inside = run({"compiled": "eager"}), run({"compiled": "inside"})
    keys = [{record.key for record in tap.run} for tap in (eager, inside)]
    print(f"CUDA graphs: {len(keys[0] & keys[1])} of {len(keys[0])} records inside, {len(keys[1] - keys[0])} too many")
    print(tt.compare(eager.run, inside.run).sentence)
    for text in inside.notices:
        print(f"  {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name, default in (
        ("layers", 16),
        ("width", 2048),
        ("batch", 4),
        ("length", 2048),
        ("steps", 20),
        ("warmup", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--how", choices=("whole", "layers"), action="append")
    parser.add_argument("--cuda-graphs", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.cuda_graphs:
        cuda_graphs(options)
        return
    for how in options.how or ("whole", "layers"):
        measure(how, options)


if __name__ == "__main__":
    main()
