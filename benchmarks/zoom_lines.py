"""Zoom: how many lines of planted mistakes are named, and what it costs beside the module itself.

    python benchmarks/zoom_lines.py
    python benchmarks/zoom_lines.py --width 1024 --tokens 512
    python benchmarks/zoom_lines.py --held-out

Prints each mistake whose line is not named, the share that is, and the ratio of a zoom to one forward and backward of
both modules, in CPU time, on a block of the given width. `--held-out` has other families of models, and other ways to
write the same, which must have no line.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from zoom import held_out, planted
from zoom.planted import Mistake, Source, build, changed_lines
from zoom.test_zoom import rewritten, zoomed

import tensortap as tt

_SCALED = """import torch, torch.nn as nn, torch.nn.functional as F

class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear({width}, 3 * {width})
        self.o = nn.Linear({width}, {width})
        self.up = nn.Linear({width}, 4 * {width})
        self.down = nn.Linear(4 * {width}, {width})
        self.norm = nn.LayerNorm({width})

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-2, -1) * {width} ** -0.5).softmax(-1)
        x = x + self.o(weights @ v)
        return x + self.down(F.gelu(self.up(x)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--only-cost", action="store_true")
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.held_out:
            _lines(held_out.MISTAKES, held_out.SOURCES, Path(folder))
            false = sum(_is_false(name, Path(folder)) for name in held_out.RIGHT)
            print(f"false lines: {false} of {len(held_out.RIGHT)}")
            return
        if not options.only_cost:
            _lines(planted.MISTAKES, planted.SOURCES, Path(folder))
        scaled = f"q @ k.transpose(-2, -1) * {options.width} ** -0.5"
        for what, old, new in (
            ("a mistake in the forward", scaled, "q @ k.transpose(-2, -1)"),
            ("another way to compute the same", scaled, f"q * {options.width} ** -0.5 @ k.transpose(-2, -1)"),
            ("a gradient cut off", "weights @ v", "weights @ v.detach()"),
            ("a wrong backward near the outputs", "F.gelu(self.up(x))", "Half.apply(F.gelu(self.up(x)))"),
            ("a wrong backward near the inputs", "self.norm(x)).chunk", "Half.apply(self.norm(x))).chunk"),
        ):
            print(f"{what}: {_cost(Path(folder), options.width, options.tokens, old, new)}")


def _lines(mistakes: Sequence[Mistake], sources: Mapping[str, Source], folder: Path) -> None:
    named = sum(_is_named(mistake, sources, folder) for mistake in mistakes)
    print(f"lines named: {named} of {len(mistakes)}")


def _is_false(name: str, folder: Path) -> bool:
    source, changes = held_out.RIGHT[name]
    result = rewritten(held_out.SOURCES[source], changes, folder)
    if result.verdict != "match":
        print(f"  {name}: {result}")
    return bool(result.verdict != "match")


def _is_named(mistake: Mistake, sources: Mapping[str, Source], folder: Path) -> bool:
    result, lines = zoomed(mistake, folder, sources)
    line = None if result.first is None else result.first.reference_line if mistake.or_reference else result.line
    found = line is not None and line.line in lines
    if not found:
        print(f"  {mistake.name}: expected {lines}; {result}")
    return found


def _cost(folder: Path, width: int, tokens: int, old: str, new: str) -> str:
    text = _SCALED.format(width=width)
    wrong, _ = changed_lines(text, old, new)
    theirs, ours = build(folder, "cost_reference", text).Block(), build(folder, "cost_candidate", wrong).Block()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, tokens, width, requires_grad=True)

    def plain() -> None:
        for module in (theirs, ours):
            module(x).sum().backward()

    plain()
    own, zooms, small = [], [], []
    for _ in range(5):
        own.append(_seconds(plain))
        zooms.append(_seconds(lambda: tt.zoom(theirs, ours, x)))
        small.append(_seconds(lambda: tt.zoom(theirs, ours, x[:1, :2])))
    median = [sorted(each)[len(each) // 2] for each in (own, zooms, small)]
    ratio = (median[1] - median[2]) / median[0]
    return f"both modules {median[0]:.3f} s, zoom {median[1]:.3f} s, of which constant {median[2]:.3f} s: {ratio:.2f}x"


def _seconds(work: object) -> float:
    start = time.process_time()  # other programs do not count
    work()  # type: ignore[operator]
    return time.process_time() - start


if __name__ == "__main__":
    main()
