"""The values of all modules of one peek, within a memory bound."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tensortap.capture.modules.tree import Tree
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.model.peek.calls import PeekedCall, PeekedModule

__all__ = ["PeekedValues"]

Array = npt.NDArray[Any]


class PeekedValues:
    """The values of all modules of one peek, within a memory bound.

    To make room, the oldest call is dropped; a call that is the latest of its module is dropped only if no other is
    left. A tensor that still does not fit is skipped.
    """

    def __init__(self, tree: Tree, kinds: Sequence[str], max_memory: int) -> None:
        self.modules: dict[str, PeekedModule] = {}
        self.why_not_here = ""
        """Why this process has no values; empty if it has."""
        self._names: Collection[str] = [site.name for site in tree.sites]
        self._aliases: Mapping[str, str] = {alias.name: alias.first for alias in tree.aliases}
        self._kinds = kinds
        self._max_memory = max_memory
        self._calls: list[PeekedCall] = []
        """Calls with values, in the order in which they began."""
        self._latest: dict[str, PeekedCall] = {}
        self._lock = threading.Lock()
        self.nbytes = 0
        self.dropped = 0
        """Number of calls dropped and tensors skipped."""

    def add_module(self, name: str, cls: str, remark: str = "") -> None:
        self.modules[name] = PeekedModule(name, cls, self._kinds, self._max_memory, remark=remark)

    def add(self, module: str, number: int, kind: str, path: str, array: Array) -> None:
        """Keep a copy of an array, if there is room. Thread-safe."""
        with self._lock:
            call = self._call(module, number)
            if call.dropped:
                return
            if not self._make_room(array.nbytes, call):
                call.skip(kind, path, array.nbytes)
                self.dropped += 1
                return
            call.add(kind, path, array.copy())  # the model may change the tensor in place right after
            self.nbytes += array.nbytes

    def __getitem__(self, name: str) -> PeekedModule:
        if self.why_not_here:
            raise UsageError(self.why_not_here)
        resolved = self._resolve(name)
        if (found := self.modules.get(resolved)) is not None:
            return found
        peeked = ", ".join(map(display_name, list(self.modules)[:8])) or "none"
        if resolved in self._names:
            raise UsageError(f"{display_name(resolved)} was not chosen for this peek; it has {peeked}")
        near = difflib.get_close_matches(str(name), [*self._names, *self._aliases], n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(map(display_name, near))}?" if near else f"this peek has {peeked}"
        raise UsageError(f"the model has no module {name!r}; {hint}")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._resolve(name) in self.modules

    def _resolve(self, name: str) -> str:
        name = "" if name == "(root)" else name
        return self._aliases.get(name, name)

    def _call(self, module: str, number: int) -> PeekedCall:
        calls = self.modules[module].calls
        while len(calls) < number:
            calls.append(PeekedCall(self.modules[module], len(calls) + 1))
            self._calls.append(calls[-1])
        self._latest[module] = calls[-1]
        return calls[number - 1]

    def _make_room(self, size: int, current: PeekedCall) -> bool:
        if size > self._max_memory:
            return False
        while self.nbytes + size > self._max_memory:
            newest = set(map(id, self._latest.values()))
            others = [call for call in self._calls if call is not current and call.nbytes]
            victim = next((call for call in others if id(call) not in newest), others[0] if others else None)
            if victim is None:
                return False
            self._calls.remove(victim)
            self.nbytes -= victim.drop()
            self.dropped += 1
        return True
