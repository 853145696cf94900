"""Mistakes found by a check with isolation, and by a free-running comparison.

    python benchmarks/isolation.py                 # ZOO_SEED=1 for other weights and data
    python benchmarks/isolation.py --pairs 100 -v

The mistakes and the right pairs are those of tests/mistakes, in bfloat16 under autocast, with a noise floor by
perturbation. The model with a mistake also computes the sums of its linear layers in two parts, as another kernel
would. "named": all planted modules are among the named ones. "exact": no others are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from mistakes.isolated import CLEAN_IN_SHORT, IN_SHORT, Named, References, is_glue, pairs_of
from mistakes.zoo import Mistake


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30, help="number of pairs of mistakes of each kind")
    parser.add_argument("-v", "--verbose", action="store_true", help="name what was missed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="tensortap-isolation-") as folder:
        references = References(Path(folder))
        for model in dict.fromkeys(mistake.model for mistake in IN_SHORT):
            references.of(model)
        print(f"{'':34} {'isolated':>22} {'free-running':>22}")
        print(f"{'':34} {'named':>14} {'exact':>7} {'named':>14} {'exact':>7} {'seconds':>8}")
        alone = row("one mistake", [(mistake,) for mistake in IN_SHORT], references, options.verbose)
        row("one, between modules", [(m,) for m in IN_SHORT if is_glue(m)], references, options.verbose)
        row("two mistakes", list(pairs_of(options.pairs, alone)), references, options.verbose)
        row("two, one between modules", list(pairs_of(options.pairs, alone, is_glue)), references, options.verbose)
        alarms = [pair.name for pair in CLEAN_IN_SHORT if references.clean(pair).births]
        free = [p.name for p in CLEAN_IN_SHORT if references.checked(p.model, p.candidate, isolate=False).births]
        print(f"{'alarms in right pairs':34} {f'{len(alarms)} of {len(CLEAN_IN_SHORT)}':>14} {'':7} {len(free):>14}")
        if options.verbose:
            print("alarms:", alarms, "free-running:", free)


def row(title: str, cases: Sequence[tuple[Mistake, ...]], references: References, verbose: bool) -> list[Named]:
    """Print the figures of some cases; return the isolated outcomes."""
    started = time.perf_counter()
    isolated = [references.named(*case) for case in cases]
    spent = time.perf_counter() - started
    free = [references.named(*case, isolate=False) for case in cases]
    print(f"{title:34} {figures(isolated)} {figures(free)} {spent:8.1f}")
    for outcome in isolated:
        if verbose and not outcome.exact:
            print("   ", outcome)
    return isolated


def figures(outcomes: Sequence[Named]) -> str:
    named = sum(outcome.all_named for outcome in outcomes)
    return f"{f'{named} of {len(outcomes)}':>14} {sum(outcome.exact for outcome in outcomes):>7}"


if __name__ == "__main__":
    main()
