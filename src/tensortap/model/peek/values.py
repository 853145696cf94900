"""The values of all modules of one peek, together within a bound."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tensortap.capture.tree import Tree
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.model.peek.calls import PeekedCall, PeekedModule

__all__ = ["PeekedValues"]

Array = npt.NDArray[Any]


class PeekedValues:
    """The values of all modules of one peek, together within the bound.

    The oldest values go first, and those of a module that has newer ones before all others. A tensor that does not fit
    even so is left out.
    """

    def __init__(self, tree: Tree, kinds: Sequence[str], bound: int) -> None:
        self.modules: dict[str, PeekedModule] = {}
        self.elsewhere = ""
        """Why this process sees nothing, if it does not."""
        self._names: Collection[str] = [site.name for site in tree.sites]
        self._aliases: Mapping[str, str] = {alias.name: alias.first for alias in tree.aliases}
        self._kinds = kinds
        self._bound = bound
        self._calls: list[PeekedCall] = []
        """Those with values, in the order in which they began."""
        self._last: dict[str, PeekedCall] = {}
        self._lock = threading.Lock()
        self.nbytes = 0
        self.dropped = 0
        """How many calls' values were dropped, and tensors left out."""

    def watch(self, name: str, cls: str, remark: str = "") -> None:
        self.modules[name] = PeekedModule(name, cls, self._kinds, self._bound, remark=remark)

    def add(self, module: str, number: int, kind: str, path: str, array: Array) -> None:
        """Keep a copy of an array, if there is room. May be called from any thread."""
        with self._lock:
            call = self._call(module, number)
            if call.dropped:
                return
            if not self._make_room(array.nbytes, call):
                call.leave_out(kind, path, array.nbytes)
                self.dropped += 1
                return
            call.keep(kind, path, array.copy())  # what is seen may be changed right after
            self.nbytes += array.nbytes

    def __getitem__(self, name: str) -> PeekedModule:
        if self.elsewhere:
            raise UsageError(self.elsewhere)
        known = self._known(name)
        if (found := self.modules.get(known)) is not None:
            return found
        peeked = ", ".join(map(display_name, list(self.modules)[:8])) or "none"
        if known in self._names:
            raise UsageError(f"{display_name(known)} was not chosen for this peek; it has {peeked}")
        near = difflib.get_close_matches(str(name), [*self._names, *self._aliases], n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(map(display_name, near))}?" if near else f"this peek has {peeked}"
        raise UsageError(f"the model has no module {name!r}; {hint}")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._known(name) in self.modules

    def _known(self, name: str) -> str:
        name = "" if name == "(root)" else name
        return self._aliases.get(name, name)

    def _call(self, module: str, number: int) -> PeekedCall:
        calls = self.modules[module].calls
        while len(calls) < number:
            calls.append(PeekedCall(self.modules[module], len(calls) + 1))
            self._calls.append(calls[-1])
        self._last[module] = calls[-1]
        return calls[number - 1]

    def _make_room(self, size: int, current: PeekedCall) -> bool:
        if size > self._bound:
            return False
        while self.nbytes + size > self._bound:
            newest = set(map(id, self._last.values()))
            others = [call for call in self._calls if call is not current and call.nbytes]
            victim = next((call for call in others if id(call) not in newest), others[0] if others else None)
            if victim is None:
                return False
            self._calls.remove(victim)
            self.nbytes -= victim.drop()
            self.dropped += 1
        return True
