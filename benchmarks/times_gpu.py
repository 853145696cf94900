"""Check on a GPU that the device times of all modules add up to the time of all kernels.

    python benchmarks/times_gpu.py
    python benchmarks/times_gpu.py --model llama-small --checkpoint --html times.html

Trains the Llama of `tensortap bench` for a few steps under torch's profiler, and transformers' Llama if it is
installed. Reads the profile twice: live, and from the exported trace. Exits with 1 if the sums differ by more than a
thousandth, if a kernel has no launch, or if modules have no device time in forward or backward.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from tensortap.bench.model import SIZES, Llama
from tensortap.model.profile.module_times import ModuleTimes

STEPS = 3
ALLOWED = 1e-3
Step = Callable[[], torch.Tensor]


def main() -> None:
    arguments = _arguments()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.manual_seed(0)
    good = check("tensortap's Llama", *_own_llama(arguments.model, arguments.checkpoint), arguments.html)
    try:
        model, step = _transformers_llama(arguments.checkpoint)
    except ImportError:
        print("transformers is not installed: skipping its Llama")
    else:
        good = check("transformers' LlamaForCausalLM", model, step, None) and good
    sys.exit(0 if good else 1)


def check(name: str, model: nn.Module, loss: Step, html: str | None) -> bool:
    """Profile a few steps, print both sums, and return whether they agree."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    with tt.annotate(model):
        step()
        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            for _ in range(STEPS):
                step()
                prof.step()
            torch.cuda.synchronize()
    kernels = sum(
        event.time_range.elapsed_us()
        for event in prof.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    print(f"\n{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")
    good = _report("live profile  ", tt.module_times(prof), kernels)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        prof.export_chrome_trace(str(path))
        times = tt.module_times(path)
    good = _report("exported trace", times, kernels) and good
    print(_table(times))
    if html is not None:
        _write_page(times, html)
    return good


def _report(name: str, times: ModuleTimes, kernels: float) -> bool:
    own = sum(row.device_own for row in times.rows)
    host = sum(row.own for row in times.rows)
    ledger = times.ledger
    span = ledger.span / 1000
    modules = [row for row in times.rows if not row.module.startswith("(")]
    whole = own or 1.0
    phases = {phase: sum(getattr(row, phase).device_own for row in modules) for phase in ("forward", "backward")}
    print(
        f"{name}: device own {own / 1e3:9.3f} ms, kernels {kernels / 1e3:9.3f} ms, ratio {own / (kernels or 1.0):.6f}; "
        f"host own / span {host / span:.4f}; {ledger.kernels} kernels, {ledger.unlinked} without a launch; "
        f"in modules: forward {phases['forward'] / whole:.1%}, backward {phases['backward'] / whole:.1%}"
    )
    return kernels > 0 and abs(own / kernels - 1) < ALLOWED and not ledger.unlinked and all(phases.values())


def _table(times: ModuleTimes) -> str:
    rows = times.table(by="class", sort="device_own", top=12).rows
    lines = [f"{'class':<26} {'phase':<10} {'calls':>6} {'device own':>12} {'share':>7} {'CPU own':>12}"]
    for row in rows:
        name = row.module or row.cls
        lines.append(
            f"{name:<26} {row.phase:<10} {row.calls:>6} {row.device_own / 1e3:>9.3f} ms {row.device_own_share:>7.1%} "
            f"{row.own / 1e3:>9.3f} ms"
        )
    return "\n".join(lines)


def _write_page(times: ModuleTimes, html: str) -> None:
    from tensortap.report.html import times as times_html
    from tensortap.times.icicle import icicle_of

    with Path(html).open("wb") as file:
        times_html.write(times.as_dict(), icicle_of(times.ledger), file)


def _own_llama(name: str, checkpointed: bool) -> tuple[nn.Module, Step]:
    size = SIZES[name]
    model = Llama(size).to("cuda", getattr(torch, size.dtype))
    if checkpointed:
        for layer in model.layers:
            layer.forward = _checkpointed(layer.forward)
    words = torch.randint(0, size.words, (size.batch, size.length), device="cuda")

    def loss() -> torch.Tensor:
        guessed = model(words)
        return nn.functional.cross_entropy(guessed[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())

    return model, loss


def _checkpointed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments: checkpoint(forward, *arguments, use_reentrant=False)


def _transformers_llama(checkpointed: bool) -> tuple[nn.Module, Step]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    words = torch.randint(0, config.vocab_size, (4, 512), device="cuda")
    return model, lambda: model(input_ids=words, labels=words, use_cache=False).loss


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(SIZES), default="llama-small")
    parser.add_argument("--checkpoint", action="store_true", help="with activation checkpointing")
    parser.add_argument("--html", help="write the icicle of the first model to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
