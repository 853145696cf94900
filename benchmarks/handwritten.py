"""Right pairs and mistakes of tests/handwritten: small models as people write them, which follow no library.

    python benchmarks/handwritten.py                                # what rules may be tuned on
    python benchmarks/handwritten.py --held-out                     # the rest
    python benchmarks/handwritten.py --models gpt rotary --way summary --only autocast
    python benchmarks/handwritten.py --no-mistakes --json right.json --resume
    python benchmarks/handwritten.py --no-right --against before.json -v
    python benchmarks/handwritten.py --ported --no-mistakes --no-right  # torch to paddle

Mistakes are made alone, and beside other right code of the reference. Ways: from tensors, from summaries, isolated.
"exact": the first module named is the one to fix, and isolated, no other is named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from handwritten.kinds import Planted
from handwritten.measuring import SETTINGS, Bench, ways_of
from handwritten.models import MISTAKES, MODELS
from handwritten.ported import PORTED
from handwritten.right import pairs_of

from field.bench.measuring import OUTCOMES, WAYS, Outcome, print_changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="only these")
    parser.add_argument("--held-out", action="store_true", help="the models on which no rule is tuned")
    parser.add_argument("--all", action="store_true", help="those and all others")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--only", default="", help="only pairs and mistakes whose name contains this")
    parser.add_argument("--mistakes", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--right", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ported", action="store_true", help="torch to paddle")
    parser.add_argument("--json", type=Path, help="write all outcomes, after each model")
    parser.add_argument("--resume", action="store_true", help="go on from the outcomes that this file already has")
    parser.add_argument("--against", type=Path, help="outcomes of an earlier run: print what changed")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every sentence that is not right")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    outcomes = measured(options)
    print_tables(outcomes, options.verbose)
    if options.against:
        print_changes(json.loads(options.against.read_text()), outcomes)


def measured(options: argparse.Namespace) -> list[Outcome]:
    """All outcomes. They are written after each model, so that a run that was stopped can be resumed."""
    outcomes: list[Outcome] = []
    if options.resume and options.json.exists():
        entries = json.loads(options.json.read_text())
        outcomes = [Outcome(**{k: tuple(v) if isinstance(v, list) else v for k, v in each.items()}) for each in entries]
    done = {outcome.family for outcome in outcomes}
    wanted = options.models or [name for name in MODELS if options.all or MODELS[name].held_out == options.held_out]
    for name in wanted:
        if name in done:
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="tensortap-handwritten-") as folder:
            found = list(outcomes_of(name, Bench(Path(folder)), options))
        outcomes += found
        alarms = sum(outcome.outcome == "false alarm" for outcome in found)
        took = time.perf_counter() - started
        print(f"{name}: {len(found)} in {took:.0f} s, {alarms} alarms", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps([outcome.as_json() for outcome in outcomes], indent=1))
    return outcomes


def outcomes_of(name: str, bench: Bench, options: argparse.Namespace) -> Iterator[Outcome]:
    if options.right:
        for pair in pairs_of(name):
            for way in ways_of(pair):
                if options.only in pair.name and way in options.way:
                    try:
                        yield bench.right(pair, way)
                    except Exception as error:  # an error is an outcome, too
                        yield _failed(pair.name, name, pair.name, way, "right", pair.held_out, error)
            bench.forget()
    if options.mistakes:
        for mistake in [mistake for mistake in MISTAKES if mistake.family == name and options.only in mistake.name]:
            for setting in SETTINGS:
                for way in options.way:
                    yield _guarded(mistake, bench, setting, way)
    if options.ported:
        for ported in PORTED:
            if ported.model == name:
                for way in set(options.way) & {"tensors", "summary"}:
                    yield ported.judged(bench.folder, way)


def _guarded(mistake: Planted, bench: Bench, setting: str, way: str) -> Outcome:
    try:
        return bench.mistake(mistake, setting, way)
    except Exception as error:  # an error is an outcome, too
        return _failed(mistake.name, mistake.family, setting, way, mistake.kind, mistake.held_out, error)


def _failed(name: str, model: str, setting: str, way: str, kind: str, held_out: bool, error: Exception) -> Outcome:
    where = traceback.extract_tb(error.__traceback__)[-1]
    sentence = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    return Outcome(name, model, setting, way, kind, held_out, (), "error", sentence=sentence)


def print_tables(outcomes: Sequence[Outcome], verbose: bool) -> None:
    right = [outcome for outcome in outcomes if outcome.kind == "right"]
    mistakes = [outcome for outcome in outcomes if outcome.kind != "right"]
    if right:
        print(f"\n{'right pairs':12} {'compared':>9} {'false alarms':>13} {'cannot tell':>12} {'errors':>7}")
    for way in WAYS:
        cell = Counter(outcome.outcome for outcome in right if outcome.way == way)
        if total := sum(cell.values()):
            print(f"{way:12} {total:>9} {cell['false alarm']:>13} {cell['cannot tell']:>12} {cell['error']:>7}")
    if mistakes:
        print(f"\n{'mistakes':12} {'way':10} {'':>6}" + "".join(f"{title:>13}" for title in (*OUTCOMES, "error")))
    for setting in SETTINGS:
        for way in WAYS:
            cell = Counter(o.outcome for o in mistakes if o.setting == setting and o.way == way)
            if total := sum(cell.values()):
                share = f"{cell['exact']} ({cell['exact'] / total:.1%})"
                print(
                    f"{setting:12} {way:10} {total:>6}{share:>13}"
                    + "".join(f"{cell[t]:>13}" for t in (*OUTCOMES[1:], "error"))
                )
    for outcome in outcomes:
        if outcome.outcome in ("false alarm", "error") or (verbose and outcome.outcome not in ("right", "exact")):
            print(outcome)


if __name__ == "__main__":
    main()
