"""Recognises a spike of the loss.

A loss is a spike if it is not finite, or exceeds the median of the last 64 losses by more than 8 robust standard
deviations (1.4826 times the median absolute deviation) and by more than a fifth of the median's size. At least 16
losses must have come before. Only the first loss of a spike counts.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

__all__ = ["LossSpikes"]

_LAST = 64
_FEWEST = 16
_DEVIATIONS = 8.0
_SHARE = 0.2


class LossSpikes:
    """The losses so far."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_LAST)
        self._in_spike = False

    def add(self, loss: float) -> str:
        """Add a loss; return a message if a spike begins with it, else an empty text."""
        usual = median(self._last) if len(self._last) >= _FEWEST else None
        if not math.isfinite(loss):
            spike = True
        elif usual is None:
            spike = False
        else:
            deviation = 1.4826 * median(abs(each - usual) for each in self._last)
            spike = loss - usual > max(_DEVIATIONS * deviation, _SHARE * abs(usual))
        begins, self._in_spike = spike and not self._in_spike, spike
        if math.isfinite(loss):
            self._last.append(loss)
        if not begins:
            return ""
        return f"the loss is {loss:.4g}" + ("" if usual is None else f", usually {usual:.4g}")
