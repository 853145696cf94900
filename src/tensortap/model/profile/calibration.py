"""Shows in a profile what annotating a call costs, so that `module_times` can take it off."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tensortap.capture.tree import Site
from tensortap.frameworks.base import Framework
from tensortap.frameworks.profiling import Profiling
from tensortap.times.marks import CALIBRATION, IDLE

__all__ = ["CalibrationCalls"]

_CALLS = 8


class CalibrationCalls:
    """A few annotated calls of a module that does nothing, once in each profile."""

    def __init__(self, framework: Framework, profiling: Profiling) -> None:
        self._framework = framework
        self._profiling = profiling
        self._recording = False
        self._running = False

    def run_once(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Run them if a profiler has begun to record since the last call of this function."""
        if self._running:
            return
        recording = self._profiling.recording()
        begun, self._recording = recording and not self._recording, recording
        module = self._profiling.idle_module() if begun else None
        if module is None:
            return
        site = Site("(idle)", type(module).__name__, module, module, None, "", True)
        remove = self._framework.on_call(module, partial(before, site, span=IDLE), partial(after, site))
        self._running = True
        try:
            with self._profiling.mark(CALIBRATION):
                for _ in range(_CALLS):
                    module()
        finally:
            self._running = False
            remove()
