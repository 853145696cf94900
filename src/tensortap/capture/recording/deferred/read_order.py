"""Finds tensors that stay unchanged for a while after they are seen, so that a device may read several in one launch.

This is measured, not assumed. In the first recorded step that reaches a slot, its tensors are read at once and again
later. Reads are deferred only if both agree, usually two steps later, and never longer than in the trial. Every
slot is tried again after at most `_RETRIED_AFTER` recorded steps, and after twice as many each time that nothing had
changed. A tensor whose framework has counted a change since is not read: no record is better than one of another
tensor.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Literal

from tensortap.capture.recording.slots import RecordSlot
from tensortap.core.records import display_name

__all__ = ["AT_ONCE", "ReadOrder", "ReadSlot", "SnapshotRead"]

_RETRIED_AFTER = 1024
"""Recorded steps over which the second trials of all slots are spread. A trial takes as long as ten deferred reads, so
there must be few of them in a step: a model of 200 modules has 1,000 slots."""
_MOST_DOUBLED = 2
"""Doublings of that number."""
_MOST_TRIED = 64
"""Tensors of a slot that are read twice in one step. A step that never ends need not try all of them."""
_MOST_SLOTS = 100_000

When = Literal["now", "twice", "later"]


class ReadSlot:
    """An input, output or gradient of one call of a module, which occurs in every step."""

    __slots__ = (
        "_deferred",
        "_doubled",
        "_first",
        "_latest",
        "_name",
        "_next_trial",
        "_notices",
        "_previous",
        "_tried",
        "_trying",
        "_unchanged",
        "changed",
        "later_until",
        "retired",
        "safe_delay",
    )

    def __init__(self, name: str, number: int, now: int, step: int, notices: deque[str]) -> None:
        self._name = name
        self._notices = notices
        self._first = self._trying = now
        self._next_trial = now + 2 + number % _RETRIED_AFTER
        """The recorded step from which the slot is tried again."""
        self._doubled = 0
        self._tried = 0
        self._deferred = False
        self._previous, self._latest = step, step
        """The steps of the last two trials."""
        # Both are only ever set, so that no thread undoes what another found.
        self._unchanged = False
        self.changed = False
        """Whether the slot's tensors change, or may change: they are then always read at once."""
        self.later_until = 0
        """The recorded step before which `when` is known to return "later", unless `changed` is set."""
        self.safe_delay = sys.maxsize
        """See `frameworks.device_reader.DeferralBound`."""
        self.retired = False
        """Whether another one has taken its place."""

    @property
    def decided(self) -> bool:
        """Whether a trial has shown how its tensors behave."""
        return self._unchanged or self.changed

    def when(self, now: int, step: int) -> When:
        """Return when to read a tensor; `now` counts the recorded steps. See `ReadOrder.when`."""
        # The result is usually known two steps later, recorded or not, so that two runs behave alike. Otherwise the
        # trial was cut off.
        steady = self._unchanged and not self.changed
        undecided = not self._unchanged and not self.changed and now >= self._trying + 2
        if undecided or (steady and now >= self._next_trial):
            self._trying, self._next_trial, self._tried = now, now + (_RETRIED_AFTER << self._doubled), 0
            self._doubled = min(self._doubled + steady, _MOST_DOUBLED)
            self._previous, self._latest = self._latest, step
        if self._trying == now:
            self._tried += 1
            return "twice" if self._tried <= _MOST_TRIED else "now"
        if not steady or (now < self._first + 2 and step < self._latest + 2):
            return "now"
        self._deferred = True
        self.later_until = self._next_trial
        return "later"

    def report_delay(self, others: int, changed: bool) -> None:
        """Record the result of a trial whose second read came after `others` more tensors."""
        self.safe_delay = min(self.safe_delay, others)
        self.changed |= changed

    def report_cut_off(self) -> None:
        """Stop deferring this slot: a second read came too late to be compared.

        The rows of half a step were sent meanwhile, and would be in the next trial. Other tensors of this slot that
        stayed unchanged say nothing about this one.
        """
        self.changed = True

    def report_changed(self) -> None:
        """Stop deferring this slot: a tensor changed before its deferred read."""
        self.changed = True
        self._notices.append(
            f"{self._name} was changed in place before it was read together with others: in that step it is missing, "
            "here and wherever else it was seen meanwhile, and from now on it is read at once (gather=False reads "
            "every tensor at once)"
        )

    def report_comparison(self, same: bool) -> None:
        """Record whether the first and the second read of a trial agree."""
        if same:
            self._unchanged = True
            return
        if self._deferred and not self.changed:
            self._notices.append(
                f"{self._name} was changed without its framework knowing before it was read together with others: its "
                f"summaries since step {self._previous} may be of changed values; from now on it is read at once"
            )
        self.changed = True


class _ReadAtOnce:
    """A slot whose tensors are always read at once: a CUDA graph reuses memory, and no version counts that."""

    later_until, changed, retired = 0, True, False

    def when(self, now: int, step: int) -> When:
        return "now"


AT_ONCE = _ReadAtOnce()


class SnapshotRead:
    """Parameters and buffers while all of them are read: nothing else runs meanwhile, so they may be read together."""

    safe_delay = sys.maxsize

    def __init__(self, notices: deque[str]) -> None:
        self._notices = notices

    def report_changed(self) -> None:
        self._notices.append("a parameter or buffer is missing: another thread changed it while it was read")


class ReadOrder:
    """All slots of a run. Trials may be evaluated on another thread."""

    __slots__ = ("_recorded", "_slots", "_step", "notices", "snapshot")

    def __init__(self) -> None:
        self._slots: dict[tuple[Any, ...], ReadSlot] = {}
        self._step = -1
        self._recorded = -1
        self.notices: deque[str] = deque()
        """Reports on tensors that changed although their reads were deferred."""
        self.snapshot = SnapshotRead(self.notices)

    def when(self, slot: RecordSlot, step: int) -> tuple[ReadSlot | None, When]:
        """Return when to read a tensor: at once, at once and again later (a trial), or later."""
        if step != self._step:
            self._step = step
            self._recorded += 1
        read: ReadSlot | None = slot.read
        if read is not None and self._recorded < read.later_until and not read.changed:  # the usual case
            return read, "later"
        if read is None or read.retired:
            where = slot.module, slot.call, slot.kind, slot.path  # the same in all micro steps
            read = self._slots.get(where)
            if read is None:
                if len(self._slots) == _MOST_SLOTS:
                    return None, "now"
                name = f"{display_name(slot.module)}: {slot.kind} {slot.path}"
                read = ReadSlot(name, len(self._slots), self._recorded, step, self.notices)
                self._slots[where] = read
            slot.read = read
        return read, read.when(self._recorded, step)

    def restart(self) -> None:
        """Try every slot anew, as if it came for the first time."""
        for read in self._slots.values():
            read.later_until, read.retired = 0, True
        self._slots.clear()
