"""Cost of the report page: its size, time to draw, and time to filter and sort, in a real browser.

    python benchmarks/report.py --pairs 100000 1000000 --siblings 50000

The comparisons are synthetic: a decoder of 80 layers on four ranks, and a model with many sibling modules on one
rank. Errors and statistics are random, so that they compress as badly as measured ones. Needs Debian's chromium (or
--browser) and Playwright.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from playwright.sync_api import Browser, Page, sync_playwright

from tensortap.compare.say.columns import SCHEMA
from tensortap.core.causes import Cause
from tensortap.core.records import Comparison, Difference, Finding, Key
from tensortap.report.html import comparison as comparison_html

RANKS = 4
LAYERS = 80
PARTS = ("norm1", "attention.qkv", "attention.core", "attention.out", "attention", "norm2", "mlp.up", "mlp.down", "mlp")
DECODER = [f"layers.{layer}.{part}" for layer in range(LAYERS) for part in PARTS]
SWITCHES = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
# From the key to the frame that shows its effect.
FILTER = """async (words) => {
  const input = document.getElementById("filter");
  const before = document.querySelector(".table-panel output").textContent;
  const started = performance.now();
  input.value = words;
  input.dispatchEvent(new Event("input"));
  while (document.querySelector(".table-panel output").textContent === before) await new Promise(requestAnimationFrame);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - started;
}"""
SORT = """async () => {
  const started = performance.now();
  [...document.querySelectorAll(".grid-head button")].find((each) => each.textContent === "rel. error").click();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - started;
}"""
KEY = """async (key) => {
  const module = document.querySelector(".tree [tabindex='0']");
  module.focus();
  const started = performance.now();
  module.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - started;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--siblings", type=int, nargs="*", default=[50_000], help="modules side by side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path, help="keep the pages in this folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = given.out or Path(scratch)
        for pairs in given.pairs:
            path = written(folder / f"report-{pairs}.html", f"{pairs:,} pairs", made(pairs, DECODER))
            measured(playwright, given, path, in_table)
        for many in given.siblings:
            siblings = made(3 * many, [f"experts.expert_{number}" for number in range(many)])
            path = written(folder / f"siblings-{many}.html", f"{many:,} modules side by side", siblings)
            measured(playwright, given, path, in_tree)


def written(path: Path, what: str, comparison: Comparison) -> Path:
    ready = time.perf_counter()
    with path.open("wb") as file:
        comparison_html.write(comparison, file)
    wrote = time.perf_counter() - ready
    print(f"{what}: {path.stat().st_size / 1e6:.2f} MB, written in {wrote:.2f} s")
    return path


def measured(playwright: Any, given: argparse.Namespace, path: Path, more: Callable[[Page], dict[str, float]]) -> None:
    """Print medians over all rounds."""
    browser = playwright.chromium.launch(executable_path=given.browser, args=SWITCHES.split())
    rounds = [opened(browser, path, more) for _ in range(given.rounds)]
    browser.close()
    for what in rounds[0]:
        print(f"  {what:42} {statistics.median(each[what] for each in rounds):8.0f} ms")


def opened(browser: Browser, path: Path, more: Callable[[Page], dict[str, float]]) -> dict[str, float]:
    """Open the page in a new profile; return milliseconds from the start of the navigation, or from the key press."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    page.goto(f"{path.resolve().as_uri()}#step=all&rank=all")
    page.wait_for_selector("body[data-ready]", timeout=120_000)
    marks = page.evaluate("Object.fromEntries(performance.getEntries().map((each) => [each.name, each.startTime]))")
    found = {
        "banner painted": marks["first-contentful-paint"],
        "plot, tree and table painted": marks["tensortap-painted"],
        "all columns decoded": marks["tensortap-complete"],
        **more(page),
    }
    context.close()
    return found


def in_table(page: Page) -> dict[str, float]:
    return {
        "filter by two words": page.evaluate(FILTER, "mlp grad"),
        "filter by nothing": page.evaluate(FILTER, ""),
        "sort by error": page.evaluate(SORT),
    }


def in_tree(page: Page) -> dict[str, float]:
    return {
        "to the last module": page.evaluate(KEY, "End"),
        "to the one above": page.evaluate(KEY, "ArrowUp"),
        "choose it": page.evaluate(KEY, "Enter"),
    }


def made(pairs: int, modules: Sequence[str]) -> Comparison:
    """Return a comparison of `pairs` pairs, one of them a birth half-way through the modules, on rank 2 if possible."""
    random = np.random.default_rng(0)
    identities, place = list(_identities(modules)), modules[len(modules) // 2]
    cls = place.rpartition(".")[2].capitalize()
    steps = -(-pairs // (RANKS * len(identities)))
    size = RANKS * steps * len(identities)
    rank = np.repeat(np.arange(RANKS, dtype=np.int32), steps * len(identities))[:pairs]
    step = np.tile(np.repeat(np.arange(steps), len(identities)), RANKS)[:pairs]
    which = np.tile(np.arange(len(identities)), RANKS * steps)[:pairs]
    born = next(at for at, (module, _, kind, _) in enumerate(identities) if (module, kind) == (place, "output"))
    first = int(np.flatnonzero((rank == min(2, rank[-1])) & (which == born))[0])
    wrong = (step > step[first]) | ((rank == rank[first]) & (which >= born))
    error = np.where(wrong, 10 ** random.normal(-3, 0.5, pairs), 10 ** random.normal(-6.5, 0.3, pairs))
    columns: dict[str, Any] = {name: pa.nulls(pairs, SCHEMA.field(name).type) for name in SCHEMA.names}
    for name, words in zip(("module", "cls", "kind", "phase"), zip(*identities, strict=True), strict=True):
        columns[name] = pa.DictionaryArray.from_arrays(which, list(words)).cast(pa.string())
    shape = pa.array([[8, 1024, 4096]] * pairs, pa.list_(pa.int64()))
    same = {"path": "0", "dtype_reference": "bfloat16", "dtype_candidate": "bfloat16", "rule": "rounding of its dtype"}
    columns |= {name: pa.array([words]).take(np.zeros(pairs, int)) for name, words in same.items()}
    columns |= {name: pa.array(np.zeros(pairs), SCHEMA.field(name).type) for name in ("micro", "call", "rel_l2_bar")}
    columns |= {"rank": rank, "step": step, "seq": np.arange(size)[:pairs], "exact": np.ones(pairs, bool)}
    columns |= {"shape_reference": shape, "shape_candidate": shape, "birth": np.arange(pairs) == first}
    columns |= {"status": np.where(wrong, "diverged", "close"), "tolerance": np.full(pairs, 1e-5), "rel_l2": error}
    columns |= {"cosine": 1 - error**2 / 2, "max_abs": error * 10 ** random.normal(0.5, 0.2, pairs)}
    columns |= {"max_ulp": np.round(error * 2e5), "mismatched": np.clip(error * random.random(pairs), 0, 1)}
    columns |= {"row_rel_l2": error * 10 ** random.normal(0.5, 0.2, pairs), "row_tolerance": np.full(pairs, 3.2e-4)}
    for name in ("mean", "std", "l2"):
        values = random.normal(size=pairs)
        columns |= {f"{name}_reference": values, f"{name}_candidate": values * (1 + error * random.normal(size=pairs))}
    counts = ("nan_reference", "nan_candidate", "inf_reference", "inf_candidate")
    columns |= {name: np.zeros(pairs, int) for name in counts}
    table = pa.table([_arrow(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)
    birth = Finding(
        key=Key(int(step[first]), 0, "forward", place, 0, "output", "0"),
        rank=int(rank[first]),
        cls=cls,
        status="diverged",
        cause=Cause.OUTPUT,
        row=first,
        difference=Difference(8 * 1024 * 4096, False, True, float(error[first]), 0.0, 1.0, 1.0),
        tolerance=1e-5,
        rule="rounding of its dtype",
        inputs_matched=True,
    )
    return Comparison(
        reference="runs/a",
        candidate="runs/b",
        verdict="diverged",
        sentence=f"The runs part in {place} ({cls}).",
        first=birth,
        births=[birth],
        counts={"close": int((~wrong).sum()), "diverged": int(wrong.sum())},
        unmatched=[],
        table=table,
        policy="relative error up to 1e-5",
    )


def _arrow(values: Any, kind: Any) -> Any:
    return values if isinstance(values, pa.Array) else pa.array(values, kind)


def _identities(modules: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield (module, class, kind, phase) of a step, in execution order."""
    for module in modules:
        cls = module.rpartition(".")[2].capitalize()
        yield module, cls, "input", "forward"
        yield module, cls, "output", "forward"
    for module in reversed(modules):
        yield module, module.rpartition(".")[2].capitalize(), "grad_output", "backward"


if __name__ == "__main__":
    main()
