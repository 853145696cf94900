"""The mistakes and right pairs of tests/field: models of transformers, torchvision and timm.

    python benchmarks/field.py                                    # what rules may be tuned on, about 40 minutes
    python benchmarks/field.py --held-out                         # the rest
    python benchmarks/field.py --setting float32 gemm --way summary --models llama gpt2
    python benchmarks/field.py --only mask --setting attention -v # mistakes whose name contains a word
    python benchmarks/field.py --no-mistakes --json right.json    # right pairs alone
    python benchmarks/field.py --further --all                    # right pairs of further families
    python benchmarks/field.py --edits 3 --seed 7 --all           # random edits of the models' code, no right pairs
    python benchmarks/field.py --processes 2 --json after.json --resume --against before.json

Settings: float32; gemm (every sum of the candidate is computed in another order); bf16 (the same in bfloat16, with a
noise floor); attention (the reference's is eager, the candidate's is torch's fused one); and, if asked for, unpadded
(the candidate's attention leaves padding out, in decoders and some encoders). Ways: from tensors, from
summaries, isolated; and, if asked for, isolated with a truth in float64. "exact": the first module named is the one to
fix, and isolated, no other is named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from field.bench.measuring import OUTCOMES, WAYS, WITH_TRUTH, Bench, Outcome, print_changes
from field.bench.ported import PORTED
from field.bench.right import RIGHT, Right
from field.bench.settings import SETTINGS
from field.kit.mistake import Mistake
from field.kit.mutations import mutations
from field.sets import EVERY, FAMILIES, FURTHER
from field.zoo import MISTAKES

USUAL = [name for name in SETTINGS if name != "unpadded"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=USUAL)
    parser.add_argument("--way", nargs="+", choices=(*WAYS, WITH_TRUTH), default=list(WAYS))
    parser.add_argument("--models", nargs="+", choices=EVERY, help="only these families")
    parser.add_argument("--only", default="", help="only mistakes whose name contains this")
    parser.add_argument("--further", action="store_true", help="the families of which only right pairs are tried")
    parser.add_argument("--held-out", action="store_true", help="the families on which no rule is tuned")
    parser.add_argument("--all", action="store_true", help="those and all others")
    parser.add_argument("--mistakes", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--right", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ported", action=argparse.BooleanOptionalAction, default=False, help="torch to paddle")
    parser.add_argument("--edits", type=int, default=0, help="so many random edits of each family's code instead")
    parser.add_argument("--seed", type=int, default=0, help="which edits are drawn")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of mistakes at once, isolated")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all outcomes, after each part")
    parser.add_argument("--resume", action="store_true", help="go on from the outcomes that this file already has")
    parser.add_argument("--against", type=Path, help="outcomes of an earlier run: print what changed")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every sentence that is not right")
    options = parser.parse_args()
    if options.edits:
        options.right = False
    if options.resume and not options.json:
        parser.error("--resume needs --json, the file to go on from")
    outcomes = measured(options)
    print_tables(outcomes)
    if options.verbose:
        for outcome in outcomes:
            if outcome.outcome not in ("exact", "right") and outcome.kind != "right":
                print(outcome)
    if options.against:
        print_changes(json.loads(options.against.read_text()), outcomes)


Part = tuple[str, str]
"""A family, and the setting of its mistakes or "right"."""


def measured(options: argparse.Namespace) -> list[Outcome]:
    """All outcomes. They are written after each part, so that a run that was stopped can be resumed."""
    known = FURTHER if options.further else FAMILIES
    families = [name for name, family in known.items() if options.all or family.held_out == options.held_out]
    # Right pairs take longest, so they come first.
    parts = [(family, setting) for setting in ("right", *options.setting) for family in options.models or families]
    found = _resumed(options) if options.resume else {}
    for part, outcomes in _each([part for part in parts if part not in found], options):
        found[part] = outcomes
        if options.json:
            every = [outcome.as_json() for outcomes in found.values() for outcome in outcomes]
            options.json.write_text(json.dumps(every, indent=1))
    return [outcome for part in sorted(found) for outcome in found[part]]


def _resumed(options: argparse.Namespace) -> dict[Part, list[Outcome]]:
    found: dict[Part, list[Outcome]] = {}
    if options.json.exists():
        for entry in json.loads(options.json.read_text()):
            lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
            outcome = Outcome(**(entry | lists))
            setting = "right" if outcome.kind in ("right", "two") else outcome.setting
            found.setdefault((outcome.family, setting), []).append(outcome)
    return found


def _each(parts: list[Part], options: argparse.Namespace) -> Iterator[tuple[Part, list[Outcome]]]:
    if options.processes == 1:
        for part in parts:
            yield part, part_outcomes(part, options)
        return
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(part_outcomes, part, options): part for part in parts}
        for done in as_completed(running):
            yield running[done], done.result()


def part_outcomes(part: Part, options: argparse.Namespace) -> list[Outcome]:
    warnings.simplefilter("ignore")
    _quiet()
    family, setting = part
    started = time.perf_counter()
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="tensortap-field-") as folder:
        bench = Bench(Path(folder))
        if setting == "right":
            found += [attempt() for attempt in _right_cases(family, options, bench)]
            if options.pairs and "isolated" in options.way:
                for one, other in pairs_of(family, options.pairs):
                    found.append(bench.both_judged(one, other, "float32"))
            if options.ported:
                found += [pair.judged(bench, way) for pair in PORTED if pair.family == family for way in options.way]
        else:
            for way in options.way:
                found += [attempt() for attempt in _cases(family, setting, way, options, bench)]
    print(f"{family}, {setting}: {len(found)} in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return found


def _cases(
    family: str, setting: str, way: str, options: argparse.Namespace, bench: Bench
) -> Iterator[Callable[[], Outcome]]:
    if not options.mistakes or not SETTINGS[setting].suits(family):
        return
    for mistake in mutations(family, options.edits, options.seed) if options.edits else MISTAKES:
        if mistake.family == family and options.only in mistake.name and (setting != "bf16" or mistake.in_short):
            yield lambda mistake=mistake: _guarded(mistake, bench, setting, way)


def _guarded(mistake: Mistake, bench: Bench, setting: str, way: str) -> Outcome:
    """An error of the tool is an outcome, too."""
    try:
        return bench.judged(mistake, setting, way)
    except Exception as error:  # any: the benchmark goes on
        return Outcome(
            mistake.name, mistake.family, setting, way, mistake.kind, mistake.held_out, mistake.places, "wrong",
            sentence=f"{type(error).__name__}: {error}",
        )  # fmt: skip


def _right_cases(family: str, options: argparse.Namespace, bench: Bench) -> Iterator[Callable[[], Outcome]]:
    if options.right:
        for pair in RIGHT:
            if pair.family == family and options.only in pair.name:
                for way in options.way:
                    yield lambda pair=pair, way=way: _guarded_right(pair, bench, way)


def _guarded_right(pair: Right, bench: Bench, way: str) -> Outcome:
    try:
        return pair.judged(bench, way)
    except Exception as error:  # any: the benchmark goes on
        return Outcome(
            pair.name, pair.family, pair.setting, way, "right", pair.held_out, (), "false alarm",
            sentence=f"{type(error).__name__}: {error}",
        )  # fmt: skip


def pairs_of(family: str, count: int) -> Iterator[tuple[Mistake, Mistake]]:
    """Two mistakes of a family at different places, drawn at random. The optimizer's are left out."""
    pool = [m for m in MISTAKES if m.family == family and m.kind != "update" and m.common is MISTAKES[0].common]
    every = [
        (one, other)
        for number, one in enumerate(pool)
        for other in pool[number + 1 :]
        if not set(one.places) & set(other.places)
    ]
    random.Random(0).shuffle(every)
    yield from every[:count]


def _quiet() -> None:
    try:
        import transformers
    except ImportError:
        return
    transformers.logging.set_verbosity_error()


def print_tables(outcomes: Sequence[Outcome]) -> None:
    mistakes = [outcome for outcome in outcomes if outcome.kind not in ("right", "two")]
    if mistakes:
        print(f"\n{'setting':12} {'way':10} {'mistakes':>8}" + "".join(f"{title:>13}" for title in OUTCOMES))
    for setting in SETTINGS:
        for way in (*WAYS, WITH_TRUTH):
            cell = Counter(o.outcome for o in mistakes if o.setting == setting and o.way == way)
            if total := sum(cell.values()):
                share = f"{cell['exact']} ({cell['exact'] / total:.1%})"
                rest = "".join(f"{cell[title]:>13}" for title in OUTCOMES[1:])
                print(f"{setting:12} {way:10} {total:>8}{share:>13}{rest}")
    right = [outcome for outcome in outcomes if outcome.kind == "right"]
    if right:
        print(f"\n{'right pairs':20} {'way':10} {'pairs':>6} {'false alarms':>13} {'cannot tell':>12}")
    for setting in dict.fromkeys(outcome.setting for outcome in right):
        for way in (*WAYS, WITH_TRUTH):
            cell = Counter(o.outcome for o in right if o.setting == setting and o.way == way)
            if total := sum(cell.values()):
                print(f"{setting:20} {way:10} {total:>6} {cell['false alarm']:>13} {cell['cannot tell']:>12}")
    for outcome in right:
        if outcome.outcome != "right":
            print(outcome)
    if two := [outcome for outcome in outcomes if outcome.kind == "two"]:
        cell = Counter(outcome.outcome for outcome in two)
        print(
            f"\ntwo mistakes at once: {len(two)}, both named {cell['exact'] + cell['named']}, exactly {cell['exact']}"
        )


if __name__ == "__main__":
    main()
