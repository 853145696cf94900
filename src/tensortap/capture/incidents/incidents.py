"""Reactions of a tap to incidents: a NaN is born, the loss jumps, an exception ends the block.

With `on_nonfinite="stop"`, a birth is raised at the end of a step, after the run is written. With a ring, the tensors
of the last steps are kept for good. Results from a device arrive one step late: those of step 7 are known at the end of
step 8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tensortap.capture.incidents.alarm import Alarm, NonfiniteRecord, birth_among, may_be_scaling, parse_loss
from tensortap.capture.incidents.ring import Ring
from tensortap.capture.incidents.spikes import LossSpikes
from tensortap.capture.messages import say
from tensortap.core.arguments import written
from tensortap.errors import NonfiniteError, UsageError
from tensortap.store.writer.rank_writer import RankWriter

__all__ = ["IncidentOptions", "Incidents", "ringed"]

_MOST_KEPT = 8
"""Upper bound on how often a NaN or a loss keeps tensors: a training that stays broken must not fill the disk."""


@dataclass(frozen=True)
class IncidentOptions:
    """The options of `capture` about incidents."""

    on_nonfinite: str | None = None
    ring: int | None = None
    loss: str | None = None
    rotates: bool = False
    """Whether the run forgets steps that leave the ring. Otherwise their summaries stay."""

    def __post_init__(self) -> None:
        if self.on_nonfinite not in ("stop", "keep", None):
            raise UsageError(f'on_nonfinite: {self.on_nonfinite!r} is neither "stop" nor "keep" nor None')
        if self.ring is not None and (type(self.ring) is not int or self.ring < 1):
            raise UsageError(f"ring: {self.ring!r} is not a number of steps, 1 or more")
        if self.loss is not None:
            parse_loss(self.loss)

    @property
    def needs_alarm(self) -> bool:
        """Whether every summary must be checked."""
        return self.on_nonfinite is not None or self.loss is not None

    @property
    def ring_size(self) -> int | None:
        """Number of steps held before the step of an incident; None without a ring."""
        return 0 if self.ring is None and self.on_nonfinite == "keep" else self.ring


class Incidents:
    """Watches one recording. `broken(modules)` returns whether parameters of these modules have a NaN or Inf now."""

    def __init__(
        self,
        options: IncidentOptions,
        writer: RankWriter,
        broken: Callable[[set[str]], bool],
    ) -> None:
        self._options = options
        self._writer = writer
        self._broken = broken
        self._ring: Ring | None = None
        if options.ring_size is not None:
            drop = writer.drop if options.rotates else lambda step: None
            self._ring = Ring(options.ring_size, writer.release, drop)
        self._spikes = LossSpikes()
        self._kept = 0
        self._notices: list[str] = []
        self._last: int | None = None
        self._was_nonfinite = False
        self._ends: deque[tuple[int, int]] = deque()
        """The last steps, and how many rows there were when each ended."""
        self._stop: NonfiniteError | None = None
        self.alarm = Alarm(None if options.loss is None else parse_loss(options.loss))

    def end_step(self, step: int, on_device: bool) -> None:
        """Examine the summaries and losses that are known by the end of a step."""
        self._last = step
        if self._ring is not None:
            self._ring.end_step(step)
        self._ends.append((step, self._writer.appended))
        if not on_device or not self._options.needs_alarm:
            self._ends.clear()
            self._examine(step)
        elif len(self._ends) > 1:
            step, rows = self._ends.popleft()
            self._writer.wait_for_rows(rows)
            self._examine(step)

    def keep(self, step: int, reason: str) -> None:
        """Keep the tensors of the ring, and those of the step in progress."""
        if self._ring is None:
            raise UsageError("keep() needs a ring: capture(..., ring=4)")
        self._keep(step, reason, in_progress=True)

    def take_notices(self) -> list[str]:
        """Return new notices for the run since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def take_stop(self) -> NonfiniteError | None:
        """Return the error that is to end the training, once."""
        stop, self._stop = self._stop, None
        return stop

    def close(self, failure: str) -> None:
        """Examine the last steps. Keep the ring if the recording ends with a failure, else release it."""
        if self._ends:
            self._writer.wait_for_rows(self._ends[-1][1])
            self._examine(self._ends[-1][0])
        elif self._last is not None:  # its loss may have come after its end
            self._examine(self._last)
        if self._ring is None:
            return
        if failure and self._last is not None:
            self._keep(self._last, failure)
        self._ring.close()

    def _examine(self, step: int) -> None:
        bad = sorted(self.alarm.take(step), key=lambda each: each.key.step)
        for _, some in groupby(bad, lambda each: each.key.step):
            self._examine_step(list(some))
        if not any(each.counts for each in bad):
            self._was_nonfinite = False
        for at, loss in self.alarm.take_losses(step).items():
            self._writer.loop_fact(at, "loss", "", written([("value", loss)], lambda _: None))
            if (text := self._spikes.add(loss)) and self._ring is not None:
                self._keep_bounded(at, f"in step {at} {text}")

    def _examine_step(self, records: list[NonfiniteRecord]) -> None:
        birth = birth_among(records)
        records = [each for each in records if each.counts]
        if birth is None or self._was_nonfinite or self._options.on_nonfinite is None:
            return
        if may_be_scaling(records, birth) and not self._broken({r.key.module for r in records}):
            return
        self._was_nonfinite = True
        self._notices.append(str(birth))
        say(str(birth))
        if self._ring is not None:
            self._keep_bounded(birth.key.step, "NaN or Inf is born there")
        if self._options.on_nonfinite == "stop":
            self._stop = NonfiniteError(f"{birth}. Training was stopped after the step, as on_nonfinite asks.")

    def _keep_bounded(self, step: int, reason: str) -> None:
        self._kept += 1
        if self._kept <= _MOST_KEPT:
            self._keep(step, reason)
        elif self._kept == _MOST_KEPT + 1:
            self._notices.append(f"tensors were kept {_MOST_KEPT} times; later incidents keep none")

    def _keep(self, step: int, reason: str, in_progress: bool = False) -> None:
        assert self._ring is not None
        if chosen := self._ring.keep(step, in_progress):
            steps = f"step {chosen[0]}" if len(chosen) == 1 else f"steps {chosen[0]} to {chosen[-1]}"
            self._notices.append(f"the ring's tensors of {steps} are kept: {reason}")


def ringed(keep: Any, options: IncidentOptions) -> tuple[Any, bool]:
    """Return `keep` with "ring" in place of "summary", unless it names modules for the ring itself.

    Also return whether the run forgets steps that leave the ring: with `ring=`, unless `keep` asks for summaries or
    tensors.
    """
    if keep is None or isinstance(keep, str):
        rules = {"*": keep or "summary"}
    elif hasattr(keep, "items"):
        rules = dict(keep)
    else:
        return keep, False  # the selection reports what is wrong
    rotates = options.ring is not None and (keep is None or set(rules.values()) == {"ring"})
    if "ring" in rules.values():
        if options.ring_size is None:
            raise UsageError('keep= has "ring" but there is no ring: give ring=4, the number of steps to hold')
    elif options.ring_size is not None:
        rules.setdefault("*", "summary")
        rules = {pattern: "ring" if kept == "summary" else kept for pattern, kept in rules.items()}
    return rules["*"] if rules.keys() == {"*"} else rules, rotates
