"""Walks the spans of one thread and finds out to which of them each moment belongs.

The hooks of `tensortap.annotate` run inside the module that makes a call, and their cost is not its work. So each of
them leaves a mark: BEFORE right before the module's span begins, and AFTER right after it has ended. The time from the
start of BEFORE to the span, and from the span to the end of AFTER, is annotating. So is the way into and out of the
hooks; a calibration in the same profile shows its length.

In backward the spans of all enclosing modules are opened around each graph node. All but the innermost are only links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tensortap.times.marks import Kind, Meaning

__all__ = ["ANNOTATION", "NOBODY", "Calibration", "Owner", "Span", "Sweep", "calibration_of"]

NOBODY = -1
ANNOTATION = -2
Span = tuple[int, int, Meaning]
"""Start, end, meaning."""


@dataclass(slots=True)
class Owner:
    """A span that moments belong to."""

    meaning: Meaning
    parent: int
    """Number of the enclosing owner, or NOBODY."""
    link: bool = False
    """A backward span that only encloses the span of a part."""
    node: int = NOBODY
    """For a backward span, the graph node that it stands around."""
    inside: int = NOBODY
    """For a graph node, the innermost module's span around its work: that of the module that has made it."""
    makers: tuple[Meaning, ...] = ()
    """For a graph node without such a span, the modules that made it, from the outermost to the innermost."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What annotating a call costs beyond its marks, in nanoseconds."""

    outside: int = 0
    """The way into the hook before the call, and out of the hook after it."""
    inside: int = 0
    """The way from the start of the module's span to its forward, and from there to the span's end."""


def calibration_of(spans: Sequence[Span]) -> Calibration | None:
    """Return what the calibration among these spans shows; they are in the order of their start."""
    inside: list[int] = []
    outside: list[int] = []
    until, last = NOBODY, NOBODY
    for start, end, meaning in spans:
        if meaning.kind is Kind.CALIBRATION:
            until, last = end, NOBODY
        elif start >= until:
            continue
        elif meaning.kind is Kind.IDLE:
            inside.append(end - start)
        elif meaning.kind is Kind.AFTER:
            last = end
        elif meaning.kind is Kind.BEFORE and last != NOBODY:
            outside.append(start - last)
    return Calibration(int(median(outside)), int(median(inside))) if inside and outside else None


class Sweep:
    """The result: from `at[i]` to `at[i + 1]`, host time belongs to `host[i]`, and what is launched to `work[i]`.

    Both are numbers in `owners`, or NOBODY or ANNOTATION.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        calibration: Calibration,
        marked: bool,
        makers: Mapping[int, tuple[Meaning, ...]] | None = None,
    ) -> None:
        self.at: list[int] = []
        self.host: list[int] = []
        self.work: list[int] = []
        self.owners: list[Owner] = []
        self._spans = spans
        self._makers = makers or {}
        """Of graph nodes, by the index of the span."""
        self._calibration = calibration
        self._marked = marked
        """Whether a module's span counts only next to a mark: any other is a user's own, of a similar name."""
        self._open: list[tuple[int, int, Kind]] = []
        """End, owner and kind of the spans that are open."""
        self._latest = NOBODY
        """The owner that the span before this one has opened, if it is that of a module."""
        self._after_mark = False
        """Whether the span before this one was the mark BEFORE."""
        self._ignore_until = NOBODY
        for index in range(len(spans)):
            self._take(index)
        self._close_until(None)

    def _take(self, index: int) -> None:
        start, end, meaning = self._spans[index]
        if start < self._ignore_until:
            return
        kind = meaning.kind
        closed = self._close_until(start)
        if self._open:
            end = min(end, self._open[-1][0])  # rounded numbers may stick out
        latest, after_mark = self._latest, self._after_mark
        self._latest, self._after_mark = NOBODY, False
        if kind is Kind.MODULE:
            self._take_module(index, start, end, latest, after_mark)
        elif kind is Kind.BEFORE:
            if not self._in_node() and self.at:
                self._say(max(start - self._calibration.outside // 2, self.at[-1]), ANNOTATION, self._top())
            self._annotating(start, end, kind)
            self._after_mark = True
        elif kind is Kind.AFTER:
            if closed is Kind.MODULE:
                self.host[-1] = ANNOTATION  # since the module's span has ended
            self._annotating(start, end, kind)
        elif kind in (Kind.CALIBRATION, Kind.BEGINS, Kind.ENDS):
            self._annotating(start, end, kind)
            self._ignore_until = end if kind is Kind.CALIBRATION else NOBODY
        elif kind in (Kind.NODE, Kind.NAMED, Kind.BACKWARD):
            self._enter(start, end, Owner(meaning, self._top(), makers=self._makers.get(index, ())))

    def _take_module(self, index: int, start: int, end: int, latest: int, after_mark: bool) -> None:
        meaning = self._spans[index][2]
        top = self._top()
        link = not after_mark and latest != NOBODY and latest == top and meaning.phase == "backward"
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
            self.host[-1] = ANNOTATION  # since the mark has ended
        number = len(self.owners)
        if owner.node != NOBODY:
            self.owners[owner.node].inside = number
        self._say(start, ANNOTATION, number)
        following = self._spans[index + 1][0] if index + 1 < len(self._spans) else end
        self._enter(min(start + self._calibration.inside // 2, following, end), end, owner)
        self._latest = number

    def _enter(self, start: int, end: int, owner: Owner) -> None:
        number = len(self.owners)
        self.owners.append(owner)
        self._open.append((end, number, owner.meaning.kind))
        self._say(start, number, number)

    def _annotating(self, start: int, end: int, kind: Kind) -> None:
        self._open.append((end, self._top(), kind))
        self._say(start, ANNOTATION, self._top())

    def _close_until(self, start: int | None) -> Kind | None:
        """Close what ends by `start`, or everything; return the kind of the last span that was closed."""
        closed = None
        while self._open and (start is None or self._open[-1][0] <= start):
            end, number, closed = self._open.pop()
            if closed is Kind.MODULE:
                self._say(max(end - self._calibration.inside // 2, self.at[-1]), ANNOTATION, number)
            elif closed is Kind.AFTER and not self._in_node():
                self._say(end, ANNOTATION, self._top())
                bounds = [bound for bound in (start, *(until for until, _, _ in self._open[-1:])) if bound is not None]
                end = min(end + self._calibration.outside // 2, *(bounds or [end]))
            self._say(end, self._top(), self._top())
        return closed

    def _top(self) -> int:
        return self._open[-1][1] if self._open else NOBODY

    def _in_node(self) -> bool:
        return bool(self._open) and self._open[-1][2] is Kind.NODE

    def _say(self, at: int, host: int, work: int) -> None:
        if self.at and self.at[-1] == at:
            self.host[-1], self.work[-1] = host, work
        else:
            self.at.append(at)
            self.host.append(host)
            self.work.append(work)
