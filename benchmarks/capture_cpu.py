"""Cost of a tap on a CPU: a transformer's training step plain, tapped, and with np.save in a hook.

    python benchmarks/capture_cpu.py [--rounds 7] [--threads 2]

All ways take turns in one process, so that other load disturbs them equally; medians and ratios are printed. A tapped
step is timed until its last byte is with the operating system.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tensortap as tt

LAYERS, WIDTH, HEADS, BATCH, LENGTH, WORDS = 6, 512, 8, 8, 256, 1000


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], HEADS, -1).transpose(1, 2)

        y = nn.functional.scaled_dot_product_attention(
            heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), is_causal=True
        )
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.act, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1))

    def step(self) -> None:
        logits = self.model(self.tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def peak_memory(reset: bool = False) -> int:
    """Return the peak resident bytes of this process since the last reset. Linux only."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def warm_page_cache(folder: Path, gigabytes: int = 4) -> None:
    """Write and delete a file: a virtual machine gets memory from its host at the first touch, ten times slower than
    later, which would count against the first way."""
    block = np.random.default_rng(0).bytes(16 << 20)
    with (folder / "warm").open("wb") as file:
        for _ in range(64 * gigabytes):
            file.write(block)
    (folder / "warm").unlink()


def plain(trainer: Trainer, folder: Path, steps: int) -> dict[str, float]:
    started = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    return {"seconds": (time.perf_counter() - started) / steps}


def tapped(keep: str) -> Callable[[Trainer, Path, int], dict[str, float]]:
    def measure(trainer: Trainer, folder: Path, steps: int) -> dict[str, float]:
        with tt.capture(trainer.model, folder, keep=keep) as tap:
            started = time.perf_counter()
            for _ in range(steps):
                trainer.step()
                tap.step()
            tap.flush()
            seconds = (time.perf_counter() - started) / steps
            stats = tap.stats()
        run = tt.open(folder)
        seen = sum(r.summary.elements * (r.dtype == "float32") * 4 for r in run) / steps
        read_bytes = sum({r.tensor: r.summary.elements * 4 for r in run if r.dtype == "float32"}.values()) / steps
        return {
            "seconds": seconds,
            "seen": seen,
            "read_bytes": read_bytes,
            "hooks": stats["seconds_in_hooks"] / steps,
        } | kept(folder, steps)

    return measure


def saved(trainer: Trainer, folder: Path, steps: int) -> dict[str, float]:
    """Run steps with np.save of each leaf module's output in a forward hook."""
    folder.mkdir()
    handles = [
        module.register_forward_hook(lambda m, a, out, n=name: np.save(folder / f"{n}.npy", out.detach().numpy()))
        for name, module in trainer.model.named_modules()
        if not list(module.children())
    ]
    started = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    seconds = (time.perf_counter() - started) / steps
    for handle in handles:
        handle.remove()
    return {"seconds": seconds} | kept(folder, 1)


def kept(folder: Path, steps: int) -> dict[str, float]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {"bytes": sum(path.stat().st_size for path in files) / steps, "files": len(files)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps in a row that are timed together")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ways = {"plain": plain, "summary": tapped("summary"), "tensors": tapped("tensors"), "np.save": saved}
    trainer = Trainer()
    scratch = Path(tempfile.mkdtemp(prefix="tensortap-"))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    try:
        warm_page_cache(scratch)
        for turn in range(options.rounds + 1):
            for name, way in ways.items():
                before = peak_memory(reset=True)
                result = way(trainer, scratch / "run", options.steps)
                result["memory"] = peak_memory() - before
                shutil.rmtree(scratch / "run", ignore_errors=True)
                if turn:  # the first round warms up
                    found[name].append(result)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report(found)


def report(found: dict[str, list[dict[str, float]]]) -> None:
    def median(name: str, what: str) -> float:
        return statistics.median(result.get(what, 0.0) for result in found[name])

    # The ways of a round run one after the other, so ratios are taken within a round.
    base = [result["seconds"] for result in found["plain"]]
    memory = median("plain", "memory")
    line = "{:10}{:>9}{:>8}{:>9}{:>7}{:>15}{:>18}".format
    print(line("way", "s/step", "ratio", "GB kept", "files", "extra peak MB", "s over plain/GB"))
    for name, results in found.items():
        ratio = statistics.median(r["seconds"] / b for r, b in zip(results, base, strict=True))
        over = median(name, "seconds") - median("plain", "seconds")
        gigabytes = median(name, "bytes") / 1e9
        numbers = (
            f"{median(name, 'seconds'):.3f}",
            f"{ratio:.3f}",
            f"{gigabytes:.3f}",
            f"{median(name, 'files'):.0f}",
            f"{(median(name, 'memory') - memory) / 1e6:.0f}",
            f"{over / gigabytes:.2f}" if gigabytes > 0.1 else "-",
        )
        print(line(name, *numbers))
    read_bytes, seen = median("summary", "read_bytes"), median("summary", "seen")
    print(
        f"summary: {seen / 1e9:.2f} GB of tensors seen a step, {read_bytes / 1e9:.2f} GB of them read "
        f"({1 - read_bytes / seen:.0%} seen before), {median('summary', 'hooks'):.3f} s in hooks "
        f"= {read_bytes / 1e9 / median('summary', 'hooks'):.1f} GB/s"
    )


if __name__ == "__main__":
    main()
