"""A comparison as JUnit XML, for CI: one case per module, because one per tensor would be a hundred times as many.

A case fails if any pair of its module failed, and describes the first of them, or if a gradient of the module is a
finding because only one side has it. It is skipped if none of its pairs could be judged, or if only one side has the
module. A case that describes a birth has the property "cause", a value of `core.causes.Cause`. A rank without a
counterpart adds a skipped case. Runs with too little in common add an error, because skipped cases alone would look
like success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from xml.etree import ElementTree

from tensortap.core.causes import CAUSES
from tensortap.core.records import Comparison, Finding, Key, display_name
from tensortap.report import pairs
from tensortap.report.terminal.assertion import describe_pair
from tensortap.report.wording import born_in, clean, plural

__all__ = ["ModuleCase", "cases", "write"]

_SUITE = "tensortap compare"


@dataclass
class ModuleCase:
    """The result of one module."""

    module: str
    pairs: int = 0
    failed: list[int] = field(default_factory=list)
    """Row numbers."""
    unjudged: int = 0
    side: str = ""
    """The only side that has it."""
    first: Finding | None = None
    """The first finding among its records. Gradients that only one side has are findings without a row."""

    @property
    def has_failed(self) -> bool:
        return bool(self.failed) or self.first is not None

    @property
    def skipped(self) -> str:
        """The reason if the case is skipped, else empty."""
        if self.side:
            return f"only the {self.side} has this module"
        return "no pair could be judged" if self.unjudged == self.pairs else ""


def cases(comparison: Comparison) -> list[ModuleCase]:
    """Return the cases in execution order; modules of one side alone come last."""
    found: dict[str, ModuleCase] = {}
    columns = (comparison.table.column(name).to_pylist() for name in ("module", "status"))
    for at, (module, status) in enumerate(zip(*columns, strict=True)):
        case = found.setdefault(module, ModuleCase(module))
        case.pairs += 1
        case.unjudged += status == "unjudged"
        if status in pairs.WRONG_STATUSES:
            case.failed.append(at)
    for each in comparison.unmatched:
        found.setdefault(each.key.module, ModuleCase(each.key.module, side=each.side))
    for birth in comparison.births:
        case = found.setdefault(birth.key.module, ModuleCase(birth.key.module))
        case.first = case.first or birth
    return list(found.values())


def write(comparison: Comparison, file: BinaryIO) -> None:
    all_cases = cases(comparison)
    failed = [case for case in all_cases if case.has_failed]
    lost = comparison.verdict == "incomparable" or (
        comparison.verdict == "diverged" and not any(case.failed for case in failed)
    )
    unpaired = [(rank, side) for side, ranks in comparison.unpaired_ranks.items() for rank in ranks]
    counts = {"tests": len(all_cases) + len(unpaired) + lost, "failures": len(failed), "errors": int(lost)}
    counts["skipped"] = sum(bool(case.skipped) and not case.has_failed for case in all_cases) + len(unpaired)
    said = {name: str(n) for name, n in counts.items()}
    root = ElementTree.Element("testsuites", {"name": _SUITE, **said})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _SUITE, **said, "time": "0"})
    properties = ElementTree.SubElement(suite, "properties")
    for name in ("reference", "candidate", "verdict", "sentence", "policy"):
        text = clean(getattr(comparison, name))
        ElementTree.SubElement(properties, "property", {"name": name, "value": text})
    if lost:
        error = {"message": clean(comparison.sentence), "type": comparison.verdict}
        ElementTree.SubElement(_case(suite, "the two runs"), "error", error)
    for rank, side in unpaired:
        skipped = {"message": f"only the {side} has this rank: its records were not compared"}
        ElementTree.SubElement(_case(suite, f"rank {rank} of the {side}"), "skipped", skipped)
    rows = iter(pairs.rows_of(comparison, [case.failed[0] for case in failed if case.failed]))
    for case in all_cases:
        element = _case(suite, display_name(case.module))
        row = next(rows) if case.failed else None
        if case.first is not None and (case.first.row is None or row is None):
            _fail_by_finding(element, case.first)
        elif row is not None:
            _fail(element, case, row)
        elif case.skipped:
            ElementTree.SubElement(element, "skipped", {"message": case.skipped})
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)
    file.write(b"\n")


def _case(suite: ElementTree.Element, name: str) -> ElementTree.Element:
    about = {"classname": "tensortap.compare", "name": clean(name), "time": "0"}
    return ElementTree.SubElement(suite, "testcase", about)


def _fail_by_finding(element: ElementTree.Element, finding: Finding) -> None:
    _add_cause(element, finding.cause.value)
    label, module = CAUSES[finding.cause].label, clean(display_name(finding.key.module))
    failure = ElementTree.SubElement(
        element, "failure", {"message": f"{module}: {label}, born here", "type": finding.status}
    )
    where = f", {born_in(finding.cause, finding.container)}" if finding.container is not None else ""
    failure.text = f"{clean(finding.key)} · rank {finding.rank}\n{label.capitalize()}{where}"


def _fail(element: ElementTree.Element, case: ModuleCase, row: Mapping[str, Any]) -> None:
    if row["cause"] is not None:
        _add_cause(element, row["cause"])
    key = Key(*(row[name] for name in Key._fields))
    how = "born here" if row["birth"] else "propagated from an earlier record"
    message = f"{clean(display_name(case.module))}: {len(case.failed)} of {plural(case.pairs, 'pair')} failed, {how}"
    failure = ElementTree.SubElement(element, "failure", {"message": message, "type": clean(row["status"])})
    failure.text = "\n".join([f"{clean(key)} · rank {row['rank']}", *describe_pair(row)])


def _add_cause(element: ElementTree.Element, cause: str) -> None:
    properties = ElementTree.SubElement(element, "properties")
    ElementTree.SubElement(properties, "property", {"name": "cause", "value": cause})
