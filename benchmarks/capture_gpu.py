"""Cost of a tap on a GPU, or on a CPU: a Llama's training step plain, tapped, and with np.save in hooks.

    python benchmarks/capture_gpu.py [--quick] [--device auto] [--out DIR] [--json FILE]

All ways take turns in one process; medians and ratios are printed with their targets, and the same run measures the
limits of the machine. `tensortap bench` does the same on a user's machine, without the leak test and np.save.

    python benchmarks/capture_gpu.py --model hf-llama [--rounds 3] [--steps 20]

times transformers' own Llama of the same size with the settings a user gets without asking, with leaf modules, with all
kinds, in every tenth step, and with gradient checkpointing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import host
import torch
from rich.text import Text

from tensortap.bench import BenchOptions, measure
from tensortap.report.terminal import table
from tensortap.report.terminal.bench import bench_page, rate, signed
from tensortap.report.terminal.times import duration

HF_WAYS = ("default", "placed", "leaves", "all kinds", "every tenth")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--model", help="llama-0.95b, llama-small, llama-tiny or hf-llama")
    parser.add_argument("--keep", default="summary,tensors")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="steps in a row that are timed together")
    parser.add_argument("--tensor-steps", type=int, default=2, help="the same with keep=tensors")
    parser.add_argument("--leak-steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=240, help="no further round begins after this time")
    parser.add_argument("--no-np-save", action="store_true", help="skip np.save")
    parser.add_argument("--quick", action="store_true", help="two rounds, no np.save, 40 steps for the leak")
    parser.add_argument("--out", type=Path, help="where runs are written and removed again")
    parser.add_argument("--json", type=Path, help="all figures")
    given = parser.parse_args()
    if given.model == "hf-llama":
        device = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
        host.compare_ways("hf-llama-0.95b", device, HF_WAYS, given.rounds, given.steps)
        host.compare_ways("hf-llama-0.95b-checkpointed", device, ["default"], given.rounds, given.steps)
        return
    options = BenchOptions(
        device=given.device,
        model=given.model,
        keep=tuple(given.keep.split(",")),
        rounds=min(given.rounds, 2) if given.quick else given.rounds,
        steps=given.steps,
        tensor_steps=given.tensor_steps,
        out=given.out,
        np_save=not (given.no_np_save or given.quick),
        leak_steps=min(given.leak_steps, 40) if given.quick else given.leak_steps,
        kernel=True,
        seconds=min(given.seconds, 90) if given.quick else given.seconds,
    )
    facts = measure(options, lambda doing, share: print(f"{share:4.0%}  {doing}", file=sys.stderr, flush=True))
    lines = [*bench_page(facts, None), Text(), *targets(facts)]
    for name, way in facts["ways"].items():
        if way["stats"]:
            lines.append(Text(f"tap.stats() of {name}, {way['steps']} steps: {way['stats']}"))
    print("\n".join(line.plain for line in lines))
    if given.json is not None:
        given.json.write_text(json.dumps(facts, indent=2) + "\n")


def targets(facts: dict[str, Any]) -> list[Text]:
    """Return figures with the targets for one H200 and llama-0.95b in bf16; elsewhere the figures alone."""
    ways, limits, cuda = facts["ways"], facts["limits"], facts["machine"]["device"] == "cuda"
    rows: list[tuple[str, str, str]] = []
    if summary := ways.get("summary"):
        rows.append(("summary: ratio to the plain step", f"{summary['ratio']:.3f}×", "at most 1.06×, better 1.035×"))
        if cuda:
            rows.append(("summary: the same, each step waited for", f"{summary['ratio_waited']:.3f}×", ""))
            share = summary["memory"]["allocated"] / ways["plain"]["memory_peak"]["allocated"]
            rows.append(("summary: GPU memory over plain", f"{share:.1%}", "under 2 %"))
    if kernel := facts["kernel"]:
        share = kernel["bytes_per_second"] / limits["device_read"]
        said = f"{rate(kernel['bytes_per_second'])}, {share:.0%} of a read-only pass"
        rows.append(("summary: kernel alone", said, "85 %"))
        rows.append(("summary: a small tensor", duration(kernel["seconds_a_small_tensor"] * 1e6), ""))
    if tensors := ways.get("tensors"):
        rows.append(("tensors: ratio to the plain step", f"{tensors['ratio']:.2f}×", "at most 8×"))
        speed = tensors["bytes_per_second"]
        rows.append(("tensors: bytes a second", rate(speed), ""))
        for name, key in (("PCIe", "device_to_host"), ("the page cache", "page_cache_write_many")):
            if limits[key]:
                rows.append((f"tensors: of {name}", f"{speed / limits[key]:.0%} of {rate(limits[key])}", ""))
        if cuda:
            rows.append(("tensors: GPU memory over plain", signed(tensors["memory"]["allocated"]), "under 2 GiB"))
    if saving := ways.get("np.save"):
        done, all_of_it = saving["stats"]["bytes"], saving["stats"]["bytes_of_all"]
        source = f", extrapolated from {signed(done)} of {signed(all_of_it)}" if done < all_of_it else ""
        rows.append(("np.save in hooks: ratio to the plain step", f"{saving['ratio']:.1f}×{source}", ""))
        if tensors:
            times = saving["seconds"] / tensors["seconds"]
            rows.append(("np.save in hooks: ratio to tensors", f"{times:.1f}×", ""))
    if leak := facts["leak"]:
        span = f"steps {leak['from_step']}–{leak['steps']}"
        rows.append((f"leak on the host, {span}", signed(leak["host"]), "none"))
        if cuda:
            rows.append((f"leak on the GPU, {span}", signed(leak["device_allocated"]), "none"))
    columns = [
        table.Column("figure", [row[0] for row in rows], left=True),
        table.Column("measured", [row[1] for row in rows], left=True),
    ]
    if cuda and facts["model"]["name"] == "llama-0.95b":
        columns.append(table.Column("target", [row[2] for row in rows], left=True))
    return [*table.lines(columns, None), Text()]


if __name__ == "__main__":
    main()
