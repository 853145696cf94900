"""An audit on the terminal: the fate of every parameter and buffer, and the events in order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.text import Text

from tensortap.report.terminal import table
from tensortap.report.wording import clean, count, middle, percent, plural, rough, wrap

__all__ = ["ORDER", "AuditFacts", "Event", "ModelEvent", "UndoneFacts", "render", "render_timeline"]

# Status → text and style, in the order of the page. A colour marks what needs attention.
ORDER: dict[str, tuple[str, str]] = {
    "loaded": ("loaded and changed", "green"),
    "identical": ("loaded, but identical", "yellow"),
    "undone": ("undone after loading", "bold red"),
    "overwritten": ("overwritten after loading", "bold red"),
    "missing": ("missing: initial values", "bold red"),
    "mismatch": ("shape mismatch, not loaded", "bold red"),
    "set": ("set without load_state_dict", "yellow"),
    "trained": ("never loaded, only trained", "yellow"),
    "untouched": ("never touched", "yellow"),
    "unexpected": ("unexpected in the checkpoint", "yellow"),
}
_WORDS = {
    "initialised": "initialised",
    "loaded": "loaded",
    "missing": "missing in the checkpoint",
    "mismatch": "not loaded",
    "stepped": "stepped by the optimizer",
    "forward": "changed by a forward",
    "changed": "changed by something else",
}
_MOST_EVENTS = 12


@dataclass(frozen=True)
class Event:
    """One event in the life of a tensor."""

    what: str
    """initialised | loaded | missing | mismatch | stepped | forward | changed"""
    step: int
    """Optimizer steps completed before it."""
    where: str
    """The user's line; for `changed` the line where it was noticed."""
    changed: bool = False
    rel_l2: float = math.nan
    """|new - old| / |old|; the largest of several in a row. NaN if the old values were all zero."""
    detail: str = ""
    times: int = 1
    last_step: int = 0
    l2: float = math.nan
    """|new - old|; the largest of several in a row."""
    undone: bool = False
    """It undid a load: earlier values are back."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "step": self.step,
            "last_step": self.last_step,
            "times": self.times,
            "where": self.where,
            "changed": self.changed,
            "rel_l2": _finite(self.rel_l2),
            "l2": _finite(self.l2),
            "undone": self.undone,
            "detail": self.detail,
        }


@dataclass
class ModelEvent:
    """An event of the model: one load, a series of steps, a detected change."""

    what: str
    where: str
    step: int
    last_step: int
    tensors: int
    largest: float = math.nan
    """The largest relative change among the tensors that have one."""
    times: int = 1
    largest_l2: float = math.nan
    """The largest absolute change among tensors that were all zero before, and so have no relative change."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "where": self.where,
            "step": self.step,
            "last_step": self.last_step,
            "times": self.times,
            "tensors": self.tensors,
            "largest_rel_l2": _finite(self.largest),
            "largest_l2_from_zero": _finite(self.largest_l2),
        }


@dataclass(frozen=True)
class UndoneFacts:
    """One event that undid loads."""

    step: int
    by: str
    """optimizer | forward | something else"""
    where: str
    values: str
    """The values that are back, in words."""
    shares: Sequence[float]
    """The share that is back, for each tensor."""


@dataclass(frozen=True)
class AuditFacts:
    """The plain data of the page."""

    model: str
    parameters: int
    buffers: int
    steps: int
    names: Mapping[str, Sequence[tuple[str, str]]]
    """Status → (name, remark)."""
    happenings: Sequence[ModelEvent]
    notes: Sequence[str] = field(default_factory=tuple)
    loads: Sequence[tuple[str, int]] = field(default_factory=tuple)
    """The line of each load, and the number of tensors that it set."""
    statistics: int = 0
    """Parameters that hold running statistics, as paddle registers them."""
    unsaved: int = 0
    """Buffers that no checkpoint holds and that were not set."""
    undone: Sequence[UndoneFacts] = field(default_factory=tuple)


def render(facts: AuditFacts, width: int) -> list[Text]:
    """Return the page as lines, none longer than `width`."""
    what = f"{plural(facts.parameters, 'parameter')}, {plural(facts.buffers, 'buffer')}"
    rest = f" · {what} · {plural(facts.steps, 'step')}"
    lines = [Text.assemble((middle(clean(facts.model), max(8, width - len(rest))), "bold"), rest)]
    lines += [Text(part) for part in wrap(_sentence(facts), width)]
    if facts.statistics:
        remark = f"{count(facts.statistics)} of the parameters hold running statistics and play the role of buffers."
        lines += [Text(part) for part in wrap(remark, width)]
    lines.append(Text())
    label = max(len(words) for words, _ in ORDER.values()) + 2
    for status, (words, style) in ORDER.items():
        found = facts.names.get(status, ())
        if not found:
            continue
        number = count(len(found)).rjust(5)
        room = width - label - 9
        entries = [middle(clean(name), room) + (f" ({clean(extra)})" if extra else "") for name, extra in found]
        names = wrap(_some(entries, 2 * room), room)[:3]
        lines.append(Text.assemble("  ", (words.ljust(label), style), number, "  ", names[0]))
        lines += [Text(" " * (label + 9) + more) for more in names[1:]]
    lines += [Text(), *_event_lines(facts.happenings, width)]
    for note in facts.notes:
        lines += [Text(part, "yellow") for part in wrap(f"! {clean(note)}", width)]
    return lines


def render_timeline(name: str, events: Sequence[Event], width: int) -> list[Text]:
    """Return the events of one tensor as lines."""
    columns = [
        table.TableColumn("step", [_steps(event.step, event.last_step) for event in events]),
        table.TableColumn("what", [_said(event) for event in events], left=True, least=24),
        table.TableColumn("change", [_change(event) for event in events]),
        table.TableColumn("where", [clean(event.where) for event in events], left=True, least=16),
    ]
    return [Text(middle(clean(name), width), "bold"), *table.lines(columns, width, indent=2)]


def _sentence(facts: AuditFacts) -> str:
    """Summarise how many tensors come from a checkpoint."""
    counts = {status: len(found) for status, found in facts.names.items()}
    total = facts.parameters + facts.buffers
    loaded = sum(counts.get(status, 0) for status in ("loaded", "identical", "undone", "overwritten"))
    if not facts.loads:
        text = f"No checkpoint was loaded: all {count(total)} tensors come from their initialisation, or were set."
        return " ".join((text, *_undone(facts.undone)))
    first = next((where for where, given in facts.loads if given), None)
    if first is None:
        several = len(facts.loads) > 1
        who = f"none of {count(len(facts.loads))} loads, the last" if several else "the load"
        gave = ", gave one a value" if several else " gave none a value"
        return f"None of {count(total)} tensors comes from a checkpoint: {who} at {clean(facts.loads[-1][0])}{gave}."
    undone = facts.names.get("undone", ())
    came = "were loaded from a checkpoint, first" if undone else "come from a checkpoint, loaded first"
    text = " ".join((f"{count(loaded)} of {count(total)} tensors {came} at {clean(first)}.", *_undone(facts.undone)))
    random = sum(counts.get(status, 0) for status in ("missing", "mismatch", "untouched", "trained")) - facts.unsaved
    if random:
        text += f" {count(random)} did not get a value from it and started from initial values."
    if facts.unsaved:
        text += f" {plural(facts.unsaved, 'buffer')} {'is' if facts.unsaved == 1 else 'are'} never in a checkpoint."
    return text


def _undone(found: Sequence[UndoneFacts]) -> Iterator[str]:
    """Return a sentence for each event that undid loads."""
    who = {
        "optimizer": "The optimizer",
        "forward": "A forward",
        "something else": "Something other than a load, a forward or the optimizer",
    }
    for undone in found:
        unseen = undone.by == "something else"
        when = f"before step {undone.step}, noticed" if unseen else f"at step {undone.step},"
        share = median(undone.shares)
        back = f"the {clean(undone.values)} are back" + ("" if share > 0.8 else f", by about {percent(share)}")
        tensors = plural(len(undone.shares), "tensor")
        yield f"{who[undone.by]} undid the load of {tensors} {when} at {clean(undone.where)}: {back}."


def _event_lines(happenings: Sequence[ModelEvent], width: int) -> list[Text]:
    left = max(0, len(happenings) - _MOST_EVENTS)
    # The first events show the origin of the model, the last ones its current state.
    shown = [*happenings[: _MOST_EVENTS // 2], *happenings[-_MOST_EVENTS // 2 :]] if left else list(happenings)
    columns = [
        table.TableColumn("step", [_steps(h.step, h.last_step) for h in shown]),
        table.TableColumn("what happened", [clean(_repeated(h.what, h.times)) for h in shown], left=True, least=37),
        table.TableColumn("changed", [count(h.tensors) for h in shown]),
        table.TableColumn("largest", [_size(h.largest, h.largest_l2) for h in shown]),
        table.TableColumn("where", [clean(h.where) for h in shown], left=True, least=14),
    ]
    lines = table.lines(columns, width, indent=2)
    return [*lines, Text(f"  and {plural(left, 'event')} between them", "dim")] if left else lines


def _said(event: Event) -> str:
    words = _WORDS[event.what]
    if event.what == "loaded" and not event.changed:
        words += ", identical"
    words = _repeated(words, event.times)
    return clean(f"{words}: {event.detail}" if event.detail else words)


def _repeated(words: str, times: int) -> str:
    return f"{words}, {count(times)} times" if times > 1 else words


def _steps(first: int, last: int) -> str:
    return str(first) if last <= first else f"{first}–{last}"


def _change(event: Event) -> str:
    return _size(event.rel_l2, event.l2) if event.changed else ""


def _size(relative: float, absolute: float) -> str:
    """Return the relative change, or the absolute one, marked, if the old values were all zero."""
    if not math.isnan(relative):
        return rough(relative)
    return "" if math.isnan(absolute) else f"{rough(absolute)} abs"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _some(names: Sequence[str], room: int) -> str:
    """Return as many names as fit, the first one in any case."""
    text = ""
    for at, name in enumerate(names):
        rest = len(names) - at - 1
        longer = f"{text}, {name}" if text else name
        if text and len(longer) + (len(f" and {rest:,} more") if rest else 0) > room:
            return f"{text} and {count(rest + 1)} more"
        text = longer
    return text
