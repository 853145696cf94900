"""Through the page cache or past it: which way a shard's bytes reach the disk sooner.

Past it (O_DIRECT) the disk fetches the bytes by itself and no core is kept busy, which matters when training needs
them all; and where memory is handed out slowly, as to a virtual machine, the cache's own pages cost more than the disk.
A slow disk is better served through the cache, as long as that has room. Nobody can tell beforehand, so both are tried,
and the loser again now and then.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["BLOCK", "Route", "can_go_past"]

BLOCK = 4096
"""Past the cache, positions and lengths are multiples of this."""

_WORTH_TIMING = 1 << 20
_TRY_AGAIN = 256


class Route:
    """Decides for one shard. `favour` is how much slower the way past the cache may be, and still be taken."""

    def __init__(self, possible: bool, favour: float) -> None:
        self._possible = possible
        self._favour = favour
        self._rates: dict[bool, float] = {}
        self._turns = 0

    def past(self) -> bool:
        """Whether the next write should go past the cache."""
        if not self._possible or True not in self._rates:
            return self._possible
        if False not in self._rates:
            return False
        best = self._rates[True] * self._favour >= self._rates[False]
        # The worse it was, the less often it is tried again.
        rest = _TRY_AGAIN * max(1, round(self._rates[best] / self._rates[not best]))
        return best if self._turns % rest else not best

    def took(self, past: bool, nbytes: int, seconds: float) -> None:
        """Learn from a write."""
        if nbytes >= _WORTH_TIMING:
            self._turns += 1
            rate = nbytes / max(seconds, 1e-9)
            self._rates[past] = (self._rates.get(past, rate) + rate) / 2

    def give_up(self) -> None:
        """The file system refused."""
        self._possible = False


def can_go_past(folder: Path) -> bool:
    """Whether the file system lets files be opened that way."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    probe = folder / f".probe-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | flag, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
