"""Operators of runs: whether recording them changes a verdict, and how often the line of a mistake is named.

    python benchmarks/operator_lines.py

Each held-out mistake of `zoom` is recorded on both sides with all operators, and compared with and without them. A
mistake in a view, or in the arguments of a call, shows at the next operator: its line is then another one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from zoom import held_out
from zoom.planted import build, changed_lines

import tensortap as tt
from tensortap.core.operator_paths import parse_operator
from tensortap.core.records import MODULE_KINDS, Comparison


def main() -> None:
    unchanged = named = exact = count = 0
    with tempfile.TemporaryDirectory() as folder:
        for mistake in held_out.MISTAKES:
            source = held_out.SOURCES[mistake.source]
            text = source.text()
            for old, new in mistake.more.items():
                text, _ = changed_lines(text, old, new)
            wrong, lines = changed_lines(text, mistake.old, mistake.new)
            try:
                with_operators, alone = _compared(source, wrong, mistake.dtype, Path(folder))
            except RuntimeError as error:  # autograd refuses some in-place changes
                print(f"  {mistake.name}: not run: {str(error)[:60]}")
                continue
            count += 1
            same = with_operators.verdict == alone.verdict and _key(with_operators) == _key(alone)
            unchanged += same
            found = _lines_named(with_operators)
            named += bool(found)
            exact += bool(found & set(lines))
            if not same or not found & set(lines):
                print(f"  {mistake.name}: expected {lines}, named {sorted(found)}{'' if same else '; VERDICT CHANGED'}")
        print(f"{count} mistakes: verdict unchanged {unchanged}, operator named {named}, on the changed line {exact}")
        matching = 0
        for name, changes in held_out.RIGHT.values():
            source = held_out.SOURCES[name]
            text = source.text()
            for old, new in changes.items():
                text, _ = changed_lines(text, old, new)
            matching += _compared(source, text, torch.float32, Path(folder))[0].verdict == "match"
        print(f"{len(held_out.RIGHT)} other ways to write the same: {matching} match")


def _compared(source: Any, text: str, dtype: torch.dtype, folder: Path) -> tuple[Comparison, Comparison]:
    reference, candidate = build(folder, "reference", source.text()), build(folder, "candidate", text)
    theirs, ours = source.make(reference, dtype), source.make(candidate, dtype)
    ours.load_state_dict(theirs.state_dict())
    runs = [_recorded(module, *source.inputs(reference, dtype)) for module in (theirs, ours)]
    return tt.compare(*runs), tt.compare(*runs, kinds=MODULE_KINDS)


def _recorded(module: torch.nn.Module, args: Any, keywords: Any) -> Any:
    with tt.capture(module, operators="*", on_error="raise") as tap:
        output = module(*map(_fresh, args), **{name: _fresh(value) for name, value in keywords.items()})
        outputs = [each for each in (output if isinstance(output, tuple) else (output,)) if each is not None]
        loss = sum((each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in outputs)
        loss.backward()
    return tap.run


def _fresh(value: Any) -> Any:
    """Return a copy that takes part in autograd, and may be changed in place."""
    if isinstance(value, tuple):
        return tuple(map(_fresh, value))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_() * 1


def _key(comparison: Comparison) -> Any:
    return None if comparison.first is None else comparison.first.key


def _lines_named(comparison: Comparison) -> set[int]:
    place = None if comparison.first is None else comparison.first.operator
    if place is None:
        return set()
    paths = [each for each in (place.reference, place.candidate, *place.missing, *place.added) if each]
    places = [parse_operator(path).place for path in paths]
    return {int(each.rpartition(":")[2]) for each in places if each}


if __name__ == "__main__":
    main()
