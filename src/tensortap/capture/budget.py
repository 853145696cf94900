"""Chooses the steps to record so that recording takes at most a given share of the time.

Steps 0 and 4 are recorded. From then on every 2ⁿ-th step is, with the smallest n that keeps the cost below the share.
With powers of two, runs of different speed still record common steps: the steps of the sparser choice are among those
of the denser one. As long as the cost so far, which includes opening the run and a first step that loads or compiles
kernels, exceeds the share, no further step is recorded.

The cost of a step is the larger of two measurements. One is the time that the tap itself takes: hooks, the end of the
step, waits for buffers. The other is the extra duration of a recorded step and of the step after it. It includes
threads that compete for cores and the work of a device. On a device only the second counts, measured between events on
the device's own timeline: host time that the device does not wait for costs nothing.

The tap also takes time in steps that are not recorded: it counts them, and writes the file that shows the progress.
This time counts, too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks.capabilities import DeviceMark

__all__ = ["Budget", "Recent", "check_share"]

_SAMPLES = 64
"""Recorded steps whose cost is averaged."""
_PLAIN_SAMPLES = 256
_FEWEST_PLAIN = 3
"""Minimum number of unrecorded steps with which recorded ones are compared."""
_FEWEST_EXCESS = 4
"""Minimum number of recorded steps whose longer duration counts: a single step may be long by chance."""
_SECOND = 4
"""The second step to record: the first one costs more than others, and some unrecorded ones come before it."""
_LONGEST_INTERVAL = 1 << 20


class Recent:
    """The newest numbers of a series, with their mean. Adding one takes the same time, however many there are."""

    def __init__(self, most: int) -> None:
        self.numbers: deque[float] = deque(maxlen=most)
        self._sum = 0.0

    def add(self, number: float) -> None:
        if len(self.numbers) == self.numbers.maxlen:
            self._sum -= self.numbers[0]
        self.numbers.append(number)
        self._sum += number

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def mean(self) -> float:
        """The mean; 0 without numbers."""
        return max(0.0, self._sum) / len(self.numbers) if self.numbers else 0.0


def check_share(share: Any) -> float:
    """Return the share; raise UsageError if it is not one."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
        raise UsageError(f"budget: {share!r} is not a share of the time between 0 and 1, like 0.02")
    return float(share)


class Budget:
    """Decides for each step whether it is recorded. `mark` returns a point on a device's timeline, or None."""

    def __init__(
        self,
        share: float,
        mark: Callable[[], DeviceMark | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._share = share
        self._mark = mark
        self._clock = clock
        self._opened = self._boundary = clock()
        self._tap_seconds = 0.0
        """Time that the tap itself had taken by the last step boundary."""
        self._first = 0.0
        """Cost of opening the run and of its first step."""
        self._own = Recent(_SAMPLES)
        """Time that the tap took in each recorded step, without the first."""
        self._own_total = 0.0
        self._between = 0.0
        """Time that the tap took in all steps that were not recorded."""
        self._excess: deque[float] = deque(maxlen=_SAMPLES)
        """Extra duration of each recorded step together with the step after it, without the first."""
        self._usual_excess = 0.0
        """The median of `_excess`."""
        self._plain: deque[float] = deque(maxlen=_PLAIN_SAMPLES)
        self._all = Recent(_PLAIN_SAMPLES)
        self._after: list[float] = []
        """Duration of the last recorded step, until that of the step after it is known."""
        self._marks: deque[tuple[bool, DeviceMark]] = deque(maxlen=_PLAIN_SAMPLES)
        self._steps = 0
        self.recorded = 0
        """Number of recorded steps."""
        self._last = -1

    def wants(self, step: int) -> bool:
        """Return whether to record the step that begins."""
        chosen = step % self.interval == 0 and self._is_affordable if step > _SECOND else step in (0, _SECOND)
        if chosen and step != self._last:  # the choice may be asked for again
            self._last = step
            self.recorded += 1
        return chosen

    def end_step(self, was_recorded: bool, tap_seconds: float) -> None:
        """Learn from a step. `tap_seconds` is the time that the tap has taken so far, in all steps."""
        now = self._clock()
        duration, self._boundary = now - self._boundary, now
        own, self._tap_seconds = tap_seconds - self._tap_seconds, tap_seconds
        self._steps += 1
        if self._steps == 1:
            self._first = own
        else:
            self._all.add(duration)
            if was_recorded:
                self._own.add(own)
                self._own_total += own
            else:
                self._between += own
        if self._mark is None:
            if self._steps > 1:
                self._learn(was_recorded, duration)
        elif (mark := self._mark()) is not None:  # the first mark is the end of the first step
            self._marks.append((was_recorded, mark))
            self._read_marks()

    @property
    def interval(self) -> int:
        """The power of two whose multiples are recorded now."""
        usual = self._all.mean
        wanted = self.cost / (self._share * usual) if usual > 0 else 1.0
        return min(_LONGEST_INTERVAL, _power_from(wanted))

    @property
    def _is_affordable(self) -> bool:
        """Whether another recorded step keeps the share. The start of a run has to be paid for first."""
        return self.spent + self.cost <= self._share * self.elapsed

    @property
    def cost(self) -> float:
        """Seconds that recording a step takes."""
        own = self._own.mean if len(self._own) else self._first
        if len(self._excess) < _FEWEST_EXCESS:
            return own
        return self._usual_excess if self._mark is not None else max(own, self._usual_excess)

    @property
    def spent(self) -> float:
        """Seconds that recording has taken so far."""
        recorded = self.cost * max(0, self.recorded - 1)
        if self._mark is not None:
            return self._first + recorded
        return self._first + max(self._own_total, recorded) + self._between

    @property
    def elapsed(self) -> float:
        """Seconds since the tap was opened."""
        return self._clock() - self._opened

    def notice(self) -> str:
        """Return a notice about the run."""
        percent = 100 * self.spent / self.elapsed if self.elapsed else 0.0
        return (
            f"budget={self._share:g}: {self.recorded} of {self._steps} steps recorded, "
            f"at about {percent:.2g} % of the time"
        )

    def _learn(self, was_recorded: bool, duration: float) -> None:
        """Learn from the duration of a step, on the host or on the device."""
        if was_recorded:
            self._settle()  # the step after the last recorded one was recorded, too
            self._after = [duration]
        elif self._after:
            self._after.append(duration)
            self._settle()
        else:
            self._plain.append(duration)

    def _settle(self) -> None:
        if self._after and len(self._plain) >= _FEWEST_PLAIN:
            self._excess.append(sum(self._after) - len(self._after) * median(self._plain))
            self._usual_excess = max(0.0, median(self._excess))
        self._after = []

    def _read_marks(self) -> None:
        """Learn from the steps that the device has completed. Never wait for it."""
        while len(self._marks) > 1:
            seconds = self._marks[0][1].seconds_to(self._marks[1][1])
            if seconds is None:
                return
            self._marks.popleft()
            self._learn(self._marks[0][0], seconds)


def _power_from(number: float) -> int:
    """Return the smallest power of two that is at least `number`.

    >>> [_power_from(number) for number in (0.3, 1, 3, 4, 4.1)]
    [1, 1, 4, 4, 8]
    """
    return 1 << max(0, (int(-(-number // 1)) - 1).bit_length())
