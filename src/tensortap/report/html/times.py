"""The page about time by module: an icicle, and the rows without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

from tensortap.report.files.output import encoded
from tensortap.report.html import static
from tensortap.report.html.data.blocks import json_block
from tensortap.report.html.markup import element, join, text
from tensortap.report.html.page import Page
from tensortap.report.terminal.times import duration
from tensortap.report.wording import clean, count, percent, plural

__all__ = ["page", "write"]

_MOST_ROWS = 500
_DEFINITIONS = {
    "own": "Time in a module's own code, without its submodules and without the cost of annotating.",
    "total": "Time including submodules. Recomputation is a separate phase and not part of backward.",
    "CPU": "Wall-clock time of the threads that call the model and run backward.",
    "device": "Time of the kernels that the module launched, each in full even if some overlap.",
    "recompute": "Forward that activation checkpointing runs again during backward.",
    "(annotating)": "The cost of tensortap.annotate itself while the profiler records.",
    "(AccumulateGrad)": "Accumulation of gradients into .grad, which belongs to no module.",
    "(no module)": "Everything else: the loss, idle time, code of the training loop.",
}


def write(facts: Mapping[str, Any], icicle: Mapping[str, Any], file: BinaryIO) -> None:
    """Write the page from the results of `facts_of` and `icicle_of`."""
    file.writelines(encoded(page(facts, icicle).parts()))


def page(facts: Mapping[str, Any], icicle: Mapping[str, Any]) -> Page:
    """Build the page."""
    trace = clean(facts.get("trace", ""))
    nodes = [{**node, "module": clean(node["module"]), "label": clean(node["label"])} for node in icicle["nodes"]]
    return Page(
        "times",
        f"times: {trace}" if trace else "times",
        before=_header(facts, trace),
        after=join([_rows(facts), static.definitions(_DEFINITIONS)]),
        head=json_block("head", {**icicle, "nodes": nodes, "per_step": bool(facts.get("per_step"))}),
        blocks=(),
        entry="times",
    )


def _header(facts: Mapping[str, Any], trace: str) -> str:
    device = facts["device"]
    step = " a step" if facts.get("per_step") else ""
    counts = [plural(facts["steps"], "step"), f"{duration(facts['span'])} on the CPU{step}"]
    if device["kernels"]:
        counts += [
            f"{plural(device['kernels'], 'kernel')} of {duration(device['time'])}",
            f"device busy {duration(device['busy'])}",
        ]
    unlinked = device["unlinked"]
    note = f"The launch of {plural(unlinked, 'kernel')} is not in the profile." if unlinked else ""
    runs = [("trace", trace, facts["framework"])]
    return static.header("tensortap: where the time goes", runs, [text(each) for each in counts], note)


def _rows(facts: Mapping[str, Any]) -> str:
    device = bool(facts["device"]["kernels"])
    titles = ["module", "class", "phase", "calls", "CPU own", "CPU own %", "CPU total"]
    titles += ["device own", "device own %", "device total"] if device else []
    head = element("tr", *(element("th", text(title), scope="col") for title in titles))
    body = (_row(row, device) for row in facts["rows"][:_MOST_ROWS])
    left = len(facts["rows"]) - _MOST_ROWS + facts["rows_left_out"]
    more = element("p", f"and {count(left)} more") if left > 0 else ""
    table = element("table", element("thead", head), element("tbody", *body))
    return element("section", element("h2", "Rows"), element("div", table, class_="rows-scroll"), more, id="rows")


def _row(row: Mapping[str, Any], device: bool) -> str:
    names = [element("th", text(row["module"] or row["class"]), scope="row")]
    names += [element("td", text(row[key])) for key in ("class", "phase")]
    numbers = [count(row["calls"]) if row["calls"] else "–"]
    for side in ("cpu", "device") if device else ("cpu",):
        share = row[f"{side}_own_share"]
        numbers += [duration(row[f"{side}_own"]), percent(share) if share else "–", duration(row[f"{side}_total"])]
    return element("tr", *names, *(element("td", text(number), class_="number") for number in numbers))
