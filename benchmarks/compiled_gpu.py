"""What taps inside compiled graphs cost on a GPU: python benchmarks/compiled_gpu.py [--layers 16] [--steps 20]

A LlamaForCausalLM of transformers with 0.95 B parameters in bfloat16, batch 4 x 2048, compiled whole and layer by
layer. Taps at the outputs of all leaf modules and their gradients. Prints the time of a training step without a tap,
with one that records at the boundary, and with one inside, as medians of one run, and ratios to the first. The aim is
1.08. "host" is the part of a step until everything is launched: if it is close to the whole, the host is the limit.
Untapped and tapped steps are also profiled: how long the device is busy, and the part of that in the tap's own kernels.

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


def seconds(
    step: Callable[[], None], options: argparse.Namespace, after: Callable[[], None] = lambda: None
) -> tuple[float, str]:
    """Return the median time of a step, between synchronisations of the device, and it in words with what it is."""
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    times, launches = [], []
    for number in range(options.warmup + options.steps):
        wait()
        started = time.perf_counter()
        step()
        after()
        launched = time.perf_counter()
        wait()
        if number >= options.warmup:
            times.append(time.perf_counter() - started)
            launches.append(launched - started)
    took = statistics.median(times)
    words = f"{1e3 * took:8.1f} ms (host {1e3 * statistics.median(launches):6.1f})"
    return took, words + (profiled(step, after) if options.profile and options.device == "cuda" else "")


def profiled(step: Callable[[], None], after: Callable[[], None], steps: int = 3) -> str:
    """Return how long the device is busy in a step, and with what."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
            after()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            own = event.name in ("summarize", "finish")
            kind = (
                event.name if own or event.name.startswith("Mem") else "triton" if "triton" in event.name else "other"
            )
            found = sums.setdefault(kind.split(" ")[0], [0, 0])
            found[0] += event.device_time / steps / 1e3
            found[1] += 1 / steps
    parts = ", ".join(f"{kind} {ms:.1f} ms in {count:.0f}" for kind, (ms, count) in sorted(sums.items()))
    return f" [device {sum(ms for ms, _ in sums.values()):.1f}: {parts}]"


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

    plain, words = seconds(step, options)
    print(f"{how:7} {'untapped':24} {words}", flush=True)
    for where in options.where or ("boundary", "inside", "inside, casts emulated"):
        with tempfile.TemporaryDirectory() as folder:
            choice = {
                "compiled": where.split(",")[0],
                "emulate_casts": "casts" in where,
                "gather": "alone" not in where,
            }
            with tt.capture(model, Path(folder) / "run", kinds=KINDS, modules=leaf, on_error="raise", **choice) as tap:
                took, words = seconds(step, options, tap.step)
            steps = {record.key.step for record in tt.open(Path(folder) / "run")}
            records = len(tt.open(Path(folder) / "run")) / max(1, len(steps))
        print(f"{how:7} {where:24} {took / plain:.3f}x {words}  {records:.0f} records a step", flush=True)
    again, words = seconds(step, options)
    print(f"{how:7} {'untapped again':24} {again / plain:.3f}x {words}", flush=True)


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
    parser.add_argument("--where", action="append", help='"inside", with ", casts" or ", alone" (read one by one)')
    parser.add_argument("--profile", action="store_true")
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
