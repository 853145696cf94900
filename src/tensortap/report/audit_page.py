"""An audit on the terminal: what became of every parameter and buffer, and what happened in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from tensortap.report import table
from tensortap.report.wording import clean, count, middle, plural, rough, wrap

__all__ = ["ORDER", "AuditFacts", "Event", "Happening", "render", "render_timeline"]

# Status → its words, its style. What needs a look comes with a colour; the order is that of the page.
ORDER: dict[str, tuple[str, str]] = {
    "loaded": ("loaded and changed", "green"),
    "identical": ("loaded, but identical", "yellow"),
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
_HAPPENINGS = 12


@dataclass(frozen=True)
class Event:
    """What happened to one tensor."""

    what: str
    """initialised | loaded | missing | mismatch | stepped | forward | changed"""
    step: int
    """Optimizer steps that were over by then."""
    where: str
    """The user's line; for `changed` the line where it was noticed."""
    changed: bool = False
    rel_l2: float = float("nan")
    """|new - old| / |old|; of several in a row the largest."""
    detail: str = ""
    times: int = 1
    last_step: int = 0

    def as_dict(self) -> dict[str, Any]:
        finite = math.isfinite(self.rel_l2)
        return {
            "what": self.what,
            "step": self.step,
            "last_step": self.last_step,
            "times": self.times,
            "where": self.where,
            "changed": self.changed,
            "rel_l2": self.rel_l2 if finite else None,
            "detail": self.detail,
        }


@dataclass
class Happening:
    """What happened to the model: one load, a run of steps, a change found."""

    what: str
    where: str
    step: int
    last_step: int
    tensors: int
    largest: float = float("nan")
    times: int = 1

    def as_dict(self) -> dict[str, Any]:
        largest = self.largest if math.isfinite(self.largest) else None
        return {
            "what": self.what,
            "where": self.where,
            "step": self.step,
            "last_step": self.last_step,
            "times": self.times,
            "tensors": self.tensors,
            "largest_rel_l2": largest,
        }


@dataclass(frozen=True)
class AuditFacts:
    """What the page starts from."""

    model: str
    parameters: int
    buffers: int
    steps: int
    names: Mapping[str, Sequence[tuple[str, str]]]
    """Status → (name, what to add to it)."""
    happenings: Sequence[Happening]
    notes: Sequence[str] = field(default_factory=tuple)
    loads: Sequence[tuple[str, int]] = field(default_factory=tuple)
    """Where each load was, and how many tensors it gave a value."""


def render(facts: AuditFacts, width: int) -> list[Text]:
    """The page as lines, none longer than `width`."""
    what = f"{plural(facts.parameters, 'parameter')}, {plural(facts.buffers, 'buffer')}"
    rest = f" · {what} · {plural(facts.steps, 'step')}"
    lines = [Text.assemble((middle(clean(facts.model), max(8, width - len(rest))), "bold"), rest)]
    lines += [Text(part) for part in wrap(_sentence(facts), width)]
    lines.append(Text())
    label = max(len(words) for words, _ in ORDER.values()) + 2
    for status, (words, style) in ORDER.items():
        found = facts.names.get(status, ())
        if not found:
            continue
        number = count(len(found)).rjust(5)
        room = width - label - 9
        names = wrap(_some([clean(n + (f" ({extra})" if extra else "")) for n, extra in found], 2 * room), room)[:3]
        lines.append(Text.assemble("  ", (words.ljust(label), style), number, "  ", names[0]))
        lines += [Text(" " * (label + 9) + more) for more in names[1:]]
    lines += [Text(), *_happenings(facts.happenings, width)]
    for note in facts.notes:
        lines += [Text(part, "yellow") for part in wrap(f"! {clean(note)}", width)]
    return lines


def render_timeline(name: str, events: Sequence[Event], width: int) -> list[Text]:
    """The life of one tensor."""
    columns = [
        table.Column("step", [_steps(event.step, event.last_step) for event in events]),
        table.Column("what", [_said(event) for event in events], left=True, least=24),
        table.Column("change", [_change(event) for event in events]),
        table.Column("where", [clean(event.where) for event in events], left=True, least=16),
    ]
    return [Text(middle(clean(name), width), "bold"), *table.lines(columns, width, indent=2)]


def _sentence(facts: AuditFacts) -> str:
    """The answer to the question that the audit was started for."""
    counts = {status: len(found) for status, found in facts.names.items()}
    total = facts.parameters + facts.buffers
    loaded = sum(counts.get(status, 0) for status in ("loaded", "identical", "overwritten"))
    if not facts.loads:
        return f"No checkpoint was loaded: all {count(total)} tensors come from their initialisation, or were set."
    first = next((where for where, given in facts.loads if given), None)
    if first is None:
        several = len(facts.loads) > 1
        who = f"none of {count(len(facts.loads))} loads, the last" if several else "the load"
        gave = ", gave one a value" if several else " gave none a value"
        return f"None of {count(total)} tensors comes from a checkpoint: {who} at {clean(facts.loads[-1][0])}{gave}."
    text = f"{count(loaded)} of {count(total)} tensors come from a checkpoint, loaded first at {clean(first)}."
    random = counts.get("missing", 0) + counts.get("mismatch", 0) + counts.get("untouched", 0)
    random += counts.get("trained", 0)
    if random:
        text += f" {count(random)} did not get a value from it and started from initial values."
    return text


def _happenings(happenings: Sequence[Happening], width: int) -> list[Text]:
    left = max(0, len(happenings) - _HAPPENINGS)
    # The first ones say how the model came to be, the last ones what it is now.
    shown = [*happenings[: _HAPPENINGS // 2], *happenings[-_HAPPENINGS // 2 :]] if left else list(happenings)
    columns = [
        table.Column("step", [_steps(h.step, h.last_step) for h in shown]),
        table.Column("what happened", [clean(_repeated(h.what, h.times)) for h in shown], left=True, least=37),
        table.Column("changed", [count(h.tensors) for h in shown]),
        table.Column("largest", [_rel(h.largest) for h in shown]),
        table.Column("where", [clean(h.where) for h in shown], left=True, least=14),
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
    return _rel(event.rel_l2) if event.changed else ""


def _rel(value: float) -> str:
    return "from 0" if math.isinf(value) else "" if math.isnan(value) else rough(value)


def _some(names: Sequence[str], room: int) -> str:
    """As many names as fit; the first of them always."""
    text = ""
    for at, name in enumerate(names):
        rest = len(names) - at - 1
        longer = f"{text}, {name}" if text else name
        if text and len(longer) + (len(f" and {rest:,} more") if rest else 0) > room:
            return f"{text} and {count(rest + 1)} more"
        text = longer
    return text
