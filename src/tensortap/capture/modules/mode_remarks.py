"""Remarks on modules that depend on their mode: a fused path in evaluation, for example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site
from tensortap.capture.modules.unchanged import WatchedItems, changed_items
from tensortap.frameworks.base import Framework

__all__ = ["ModeRemarks"]

_MODE = "training"


class ModeRemarks:
    """Collects the remarks of modules whose mode has changed."""

    def __init__(self, framework: Framework, book: CoverageBook) -> None:
        self._framework = framework
        self._book = book
        self._sites: Sequence[Site] = ()
        self._modes: dict[str, Any] = {}
        """Mode of each module when its remarks were last collected."""
        self._watched: list[WatchedItems] | None = None
        """The modes in a form that shows quickly that none has changed; None if that is unknown."""

    def choose(self, sites: Sequence[Site]) -> None:
        """Collect the remarks of these modules from now on."""
        self._sites, self._watched = list(sites), None

    def collect(self) -> None:
        """Collect remarks, after a forward.

        At each call it would take far longer, and at the start of a forward a device may wait for it.
        """
        if self._watched is not None and not changed_items(self._watched):
            return
        watched = []
        for site in self._sites:
            mode = getattr(site.owner, _MODE, None)
            if self._modes.get(site.name, self) is not mode:
                self._modes[site.name] = mode
                self._book.remark(site.name, self._framework.remarks(site.owner))
            own = getattr(site.owner, "__dict__", {})
            if own.get(_MODE, self) is mode:  # else it is a property
                watched.append(WatchedItems(site.owner, own, -1, (_MODE,), (mode,)))
        self._watched = watched if len(watched) == len(self._sites) else None
