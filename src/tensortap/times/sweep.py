"""Sweep over the spans of one thread: find the span that owns each moment.

The hooks of `tensortap.annotate` run inside the calling module, but their cost is not its work. Each hook therefore
leaves a mark: BEFORE right before the module's span begins, AFTER right after it ends. The time from the start of
BEFORE to the span, and from the span to the end of AFTER, counts as annotation. Entering and leaving the hooks counts
as annotation, too; a calibration in the same profile measures it.

In backward, each graph node opens the spans of all enclosing modules. All but the innermost are only links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tensortap.times.marks import SpanKind, SpanMeaning

__all__ = ["ANNOTATION", "NO_OWNER", "Calibration", "Owner", "Sweep", "TimedSpan", "calibration_of"]

NO_OWNER = -1
ANNOTATION = -2
TimedSpan = tuple[int, int, SpanMeaning]
"""Start, end, meaning."""


@dataclass(slots=True)
class Owner:
    """A span that owns moments."""

    meaning: SpanMeaning
    parent: int
    """Number of the enclosing owner, or NO_OWNER."""
    link: bool = False
    """Whether this is a backward span that only encloses the span of a submodule."""
    node: int = NO_OWNER
    """For a backward span, the graph node that it is opened for."""
    inside: int = NO_OWNER
    """For a graph node, the innermost module span inside it: the span of the module that created the node."""
    makers: tuple[SpanMeaning, ...] = ()
    """For a graph node without such a span, the modules that created it, outermost first."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Cost of annotating a call beyond its marks, in nanoseconds."""

    outside: int = 0
    """Time to enter the hook before the call and to leave the hook after it."""
    inside: int = 0
    """Time from the start of the module's span to its forward, and from the forward to the span's end."""


def calibration_of(spans: Sequence[TimedSpan]) -> Calibration | None:
    """Return the calibration measured among these spans, which are sorted by start; None if there is none."""
    inside: list[int] = []
    outside: list[int] = []
    until, last = NO_OWNER, NO_OWNER
    for start, end, meaning in spans:
        if meaning.kind is SpanKind.CALIBRATION:
            until, last = end, NO_OWNER
        elif start >= until:
            continue
        elif meaning.kind is SpanKind.IDLE:
            inside.append(end - start)
        elif meaning.kind is SpanKind.AFTER:
            last = end
        elif meaning.kind is SpanKind.BEFORE and last != NO_OWNER:
            outside.append(start - last)
    return Calibration(int(median(outside)), int(median(inside))) if inside and outside else None


class Sweep:
    """Owners of one thread's time: from `at[i]` to `at[i + 1]`, `host[i]` owns host time and `work[i]` owns launches.

    Both are indices into `owners`, or NO_OWNER or ANNOTATION.
    """

    def __init__(
        self,
        spans: Sequence[TimedSpan],
        calibration: Calibration,
        marked: bool,
        makers: Mapping[int, tuple[SpanMeaning, ...]] | None = None,
    ) -> None:
        self.at: list[int] = []
        self.host: list[int] = []
        self.work: list[int] = []
        self.owners: list[Owner] = []
        self._spans = spans
        self._makers = makers or {}
        """Modules that created each graph node, by the index of the node's span."""
        self._calibration = calibration
        self._marked = marked
        """Whether a module's span counts only next to a mark. A span without one is the user's, of a similar name."""
        self._open: list[tuple[int, int, SpanKind]] = []
        """End, owner and kind of the spans that are open."""
        self._latest = NO_OWNER
        """The owner that the previous span opened, if that is a module's span."""
        self._after_mark = False
        """Whether the previous span was the mark BEFORE."""
        self._ignore_until = NO_OWNER
        for index in range(len(spans)):
            self._add(index)
        self._close_until(None)

    def _add(self, index: int) -> None:
        start, end, meaning = self._spans[index]
        if start < self._ignore_until:
            return
        kind = meaning.kind
        closed = self._close_until(start)
        if self._open:
            end = min(end, self._open[-1][0])  # rounding may move the end past that of the enclosing span
        latest, after_mark = self._latest, self._after_mark
        self._latest, self._after_mark = NO_OWNER, False
        if kind is SpanKind.MODULE:
            self._add_module(index, start, end, latest, after_mark)
        elif kind is SpanKind.BEFORE:
            if not self._in_node() and self.at:
                self._set_owner(max(start - self._calibration.outside // 2, self.at[-1]), ANNOTATION, self._top())
            self._add_annotation(start, end, kind)
            self._after_mark = True
        elif kind is SpanKind.AFTER:
            if closed is SpanKind.MODULE:
                self.host[-1] = ANNOTATION  # the time since the end of the module's span
            self._add_annotation(start, end, kind)
        elif kind in (SpanKind.CALIBRATION, SpanKind.BEGINS, SpanKind.ENDS):
            self._add_annotation(start, end, kind)
            self._ignore_until = end if kind is SpanKind.CALIBRATION else NO_OWNER
        elif kind in (SpanKind.NODE, SpanKind.NAMED, SpanKind.BACKWARD):
            self._enter(start, end, Owner(meaning, self._top(), makers=self._makers.get(index, ())))

    def _add_module(self, index: int, start: int, end: int, latest: int, after_mark: bool) -> None:
        meaning = self._spans[index][2]
        top = self._top()
        link = not after_mark and latest != NO_OWNER and latest == top and meaning.phase == "backward"
        link = link and self.owners[top].meaning.phase == "backward"
        if self._marked and not (after_mark or link):
            return
        owner = Owner(meaning, top)
        if link:
            self.owners[top].link = True
            owner.node = self.owners[top].node
        elif meaning.phase == "backward" and self._in_node():
            owner.node = top
        if after_mark:
            self.host[-1] = ANNOTATION  # the time since the end of the mark
        number = len(self.owners)
        if owner.node != NO_OWNER:
            self.owners[owner.node].inside = number
        self._set_owner(start, ANNOTATION, number)
        following = self._spans[index + 1][0] if index + 1 < len(self._spans) else end
        self._enter(min(start + self._calibration.inside // 2, following, end), end, owner)
        self._latest = number

    def _enter(self, start: int, end: int, owner: Owner) -> None:
        number = len(self.owners)
        self.owners.append(owner)
        self._open.append((end, number, owner.meaning.kind))
        self._set_owner(start, number, number)

    def _add_annotation(self, start: int, end: int, kind: SpanKind) -> None:
        self._open.append((end, self._top(), kind))
        self._set_owner(start, ANNOTATION, self._top())

    def _close_until(self, start: int | None) -> SpanKind | None:
        """Close the spans that end by `start`, or all of them if it is None; return the kind of the last one closed."""
        closed = None
        while self._open and (start is None or self._open[-1][0] <= start):
            end, number, closed = self._open.pop()
            if closed is SpanKind.MODULE:
                self._set_owner(max(end - self._calibration.inside // 2, self.at[-1]), ANNOTATION, number)
            elif closed is SpanKind.AFTER and not self._in_node():
                self._set_owner(end, ANNOTATION, self._top())
                bounds = [bound for bound in (start, *(until for until, _, _ in self._open[-1:])) if bound is not None]
                end = min(end + self._calibration.outside // 2, *(bounds or [end]))
            self._set_owner(end, self._top(), self._top())
        return closed

    def _top(self) -> int:
        return self._open[-1][1] if self._open else NO_OWNER

    def _in_node(self) -> bool:
        return bool(self._open) and self._open[-1][2] is SpanKind.NODE

    def _set_owner(self, at: int, host: int, work: int) -> None:
        if self.at and self.at[-1] == at:
            self.host[-1], self.work[-1] = host, work
        else:
            self.at.append(at)
            self.host.append(host)
            self.work.append(work)
