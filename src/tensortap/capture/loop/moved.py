"""Notes whose parameters change between the forwards of a step, where their values are not recorded.

LBFGS, SAM, the further steps of a critic, and weights that a functional call puts in place of the parameters do that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensortap.capture.modules.tree import Site
from tensortap.frameworks.base import Framework

__all__ = ["MovedParameters"]

_FIRST, _EVERY = 2, 64
"""The first `_FIRST` recorded steps are checked, then one in `_EVERY`."""


class MovedParameters:
    """Compares identities and versions of the parameters at the beginning of each micro step, in some steps."""

    def __init__(self, framework: Framework, note: Callable[[str, int], None]) -> None:
        """`note` is called once for each module, with the micro step before which its parameters had changed."""
        self._framework = framework
        self._note = note
        self._steps = -1
        self._micro = -1
        self._versions: Sequence[Any] = ()
        self._noted: set[str] = set()

    def step_begins(self) -> None:
        self._steps += 1
        self._micro = -1

    def forward_begins(self, sites: Sequence[Site]) -> None:
        """Take note of a micro step that begins."""
        self._micro += 1
        if self._steps >= _FIRST and self._steps % _EVERY:
            return
        tensors = self._framework.parameters_of([site.owner for site in sites])
        versions = self._framework.versions([tensor for _, _, tensor in tensors])
        before = self._versions if self._micro else ()
        self._versions = [(place, name, id(tensor), versions[id(tensor)]) for place, name, tensor in tensors]
        if len(before) != len(self._versions):  # the first of the step, or the model has changed
            return
        for ours, theirs in zip(before, self._versions, strict=True):
            if ours != theirs and (name := sites[theirs[0]].name) not in self._noted:
                self._noted.add(name)
                self._note(name, self._micro)
