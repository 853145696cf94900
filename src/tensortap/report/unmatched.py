"""Records of one side alone, grouped by name: hundreds of them usually have one reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import pyarrow.compute as pc

from tensortap.core.records import Comparison, Unmatched, display_name
from tensortap.report.wording import clean, numbers_in_short, plural

__all__ = ["UnmatchedGroup", "groups", "unlisted", "words"]

_MOST = 6  # groups of a side; more of them are merged by shorter prefixes


@dataclass(frozen=True)
class UnmatchedGroup:
    """Records of one side whose modules have similar names."""

    side: str
    name: str
    """A module, or the common part of several: "layers.*.attn.q_norm", "encoder.…"."""
    modules: int
    tensors: int
    steps: Sequence[int] = ()
    """Empty if all compared steps have them."""
    ranks: Sequence[int] = ()
    """Empty if all compared ranks have them."""


def groups(comparison: Comparison) -> list[UnmatchedGroup]:
    """Return groups in alternation of sides, largest first, so that the first few cover both sides."""
    compared = {name: set(pc.unique(comparison.table.column(name)).to_pylist()) for name in ("step", "rank")}
    found: list[list[UnmatchedGroup]] = []
    for side in ("reference", "candidate"):
        records = [each for each in comparison.unmatched if each.side == side]
        alike = _alike({each.key.module for each in records})
        label = {module: name for name, modules in alike.items() for module in modules}
        by_name: dict[str, list[Unmatched]] = {}
        for each in records:
            by_name.setdefault(label[each.key.module], []).append(each)
        of_side = [_group(side, name, here, compared) for name, here in by_name.items()]
        found.append(sorted(of_side, key=lambda group: -group.tensors))
    return [group for turn in zip_longest(*found) for group in turn if group is not None]


def _group(side: str, name: str, records: Sequence[Unmatched], compared: Mapping[str, set[int]]) -> UnmatchedGroup:
    steps, ranks = {each.key.step for each in records}, {each.rank for each in records}
    modules = len({each.key.module for each in records})
    return UnmatchedGroup(
        side,
        name,
        modules,
        len(records),
        sorted(steps) if steps != compared["step"] else (),
        sorted(ranks) if ranks != compared["rank"] else (),
    )


def _alike(names: Collection[str]) -> dict[str, list[str]]:
    """Group names by common parts: first without layer numbers, then by shorter prefixes, until few groups remain."""
    parts = {name: ["*" if part.isdecimal() else part for part in name.split(".")] for name in sorted(names)}

    def grouped(depth: int) -> dict[tuple[str, ...], list[str]]:
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, split in parts.items():
            groups.setdefault(tuple(split[:depth]), []).append(name)
        return groups

    # A lower depth never gives more groups, so bisection finds the greatest depth with few of them.
    depths = range(1, max(map(len, parts.values()), default=0) + 1)
    deepest = max(1, bisect_left(depths, True, key=lambda depth: len(grouped(depth)) > _MOST))
    found: dict[str, list[str]] = {}
    for prefix, members in grouped(deepest).items():
        cut = any(len(parts[name]) > len(prefix) for name in members)
        label = display_name(members[0]) if len(members) == 1 else ".".join(prefix) + ".…" * cut
        found.setdefault(clean(label), []).extend(members)
    return found


def unlisted(comparison: Comparison) -> str:
    """Return a line about records that are counted but not listed, and so are in no group; "" if there are none."""
    total, listed = comparison.counts.get("unmatched", 0), len(comparison.unmatched)
    return f"the groups cover the first {listed:,} of {total:,} records" if listed < total else ""


def words(group: UnmatchedGroup) -> str:
    """Describe the group: "∅ reference only: layers.*.attn.q_norm (24 tensors)"."""
    said = plural(group.tensors, "tensor")
    for name, numbers in (("step", group.steps), ("rank", group.ranks)):
        if numbers:
            said += f", {name}{'s' * (len(numbers) > 1)} {numbers_in_short(numbers)}"
    return f"∅ {group.side} only: {group.name} ({said})"
