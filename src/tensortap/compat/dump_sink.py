"""What capture reports one tensor at a time, gathered into the groups of a dump.

A forward group is written when the call has returned, its inputs as they were before the module ran. A backward group
is begun when the first gradient reaches the module and is added to as the others come: modules that hold each other
are in backward at the same time, and holding their gradients back would fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.flatten import open_arguments, open_value
from tensortap.capture.selection import Keep
from tensortap.capture.tree import Site
from tensortap.compat.dump_file import Array, DumpFile, Seen
from tensortap.core.records import Key
from tensortap.frameworks.base import Framework

__all__ = ["DumpSink"]

CallId = tuple[int, str, int]
Guard = Callable[[Callable[..., None]], Callable[..., None]]


@dataclass(eq=False)
class _Call:
    """One call of a module, from its inputs to its outputs. Paths are those of all tensors and Nones, in order."""

    site: Site
    takes: list[str] | None = None
    again: dict[str, str] = field(default_factory=dict)
    """Path → path of the first place, where a tensor was given in several."""
    replay: bool = False
    key: Key | None = None
    inputs: dict[str, tuple[Array, int]] = field(default_factory=dict)
    returns: list[str] = field(default_factory=list)
    single: bool = True
    expected: int = 0
    outputs: dict[str, tuple[Array, int]] = field(default_factory=dict)


@dataclass(eq=False)
class _Backward:
    group: Any
    seen: set[tuple[str, str]] = field(default_factory=set)


class DumpSink:
    """A sink that writes a dump. It also watches the calls itself: what capture hands on has no None in it, and does
    not tell one tensor from a tuple of one."""

    def __init__(self, framework: Framework, sites: Sequence[Site], guard: Guard, file: DumpFile) -> None:
        self.where = str(file.path)
        self.file = file
        self._framework = framework
        self._running: list[_Call] = []
        self._returned: _Call | None = None
        self._layouts: dict[CallId, dict[str, list[str]]] = {}
        self._again: dict[CallId, dict[str, str]] = {}
        self._backward: dict[CallId, _Backward] = {}
        with ExitStack() as undo:
            undo.callback(file.close, False, "the hooks could not be placed")
            for site in sites:
                entered, left = partial(guard(self._entered), site), partial(guard(self._left), site)
                undo.callback(framework.on_call(site.module, entered, left))
            self._undo = undo.pop_all()

    # --- what capture hands on ---------------------------------------------------------------------------------
    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        array = self._framework.host(tensor)
        if key.phase == "backward":
            self._gradient(array, key, site)
        elif key.kind == "input":
            call = self._running[-1] if self._running else None
            if call is None or call.site is not site or call.key not in (None, key._replace(path=_any(call))):
                call = _Call(site)  # around a module compiled in place, capture's hook comes before ours
                self._running.append(call)
            call.key = call.key or key
            call.inputs[key.path] = array.copy(), self.file.tick()  # the module may change it in place
        elif (call := self._returned) is not None:
            call.key = call.key or key
            call.outputs[key.path] = array if call.expected == 1 else array.copy(), self.file.tick()
            if len(call.outputs) == call.expected:
                self._settle()

    def end_step(self, step: int, book: CoverageBook) -> None:
        self._settle()

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        complete = False
        try:
            self._settle()
            for call in self._running:  # something flew past their hooks
                self._write(call, returned=False)
            for number in list(self._backward):
                self._finish(number)
            complete = status == "finished"
        finally:
            self.file.close(complete, reason)
            self._undo.close()

    # --- forward -----------------------------------------------------------------------------------------------
    def _leaf(self, value: Any) -> bool:
        return value is None or self._framework.is_tensor(value)

    def _entered(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._settle()
        given = open_arguments(args, kwargs, self._leaf).tensors
        if not (self._running and self._running[-1].site is site and self._running[-1].takes is None):
            self._running.append(_Call(site, replay=self._framework.recomputing()))
        self._running[-1].takes = [path for path, _ in given]
        self._running[-1].again = _again(given)

    def _left(self, site: Site, output: Any) -> None:
        self._settle()
        while self._running:
            call = self._running.pop()
            if call.site is site:
                break
            self._write(call, returned=False)  # it never came to its end
        else:
            return
        leaves = open_value(output, self._leaf).tensors
        call.returns = [path for path, _ in leaves]
        call.single = self._leaf(output)
        call.expected = sum(value is not None for _, value in leaves)
        self._returned = call
        if not call.expected:
            self._settle()

    def _settle(self) -> None:
        """All outputs that will come have come: it is someone else's turn."""
        call, self._returned = self._returned, None
        if call is not None:
            self._write(call)

    def _write(self, call: _Call, returned: bool = True) -> None:
        if call.replay and call.key is None:  # a recomputation, already written when it ran first
            return
        takes = call.takes if call.takes is not None else list(call.inputs)
        datasets = [self._seen(f"feat_input{place}", path, call.inputs) for place, path in enumerate(takes)]
        for place, path in enumerate(call.returns):
            name = "feat_output" if call.single else f"feat_output{place}"
            datasets.append(self._seen(name, path, call.outputs))
        attributes = {"module": call.site.name, "phase": "forward", "returned": returned}
        if call.key is not None:
            attributes |= {"micro": call.key.micro, "call": call.key.call}
            self._layouts[_id(call.key)] = {"grad_input": takes, "grad_output": call.returns}
            self._again[_id(call.key)] = call.again
        self.file.group(call.site.cls, attributes, datasets)

    def _seen(self, name: str, path: str, arrays: Mapping[str, tuple[Array, int]]) -> Seen:
        array, seq = arrays[path] if path in arrays else (None, self.file.tick())
        return Seen(name, path, array, seq)

    # --- backward ----------------------------------------------------------------------------------------------
    def _gradient(self, array: Array, key: Key, site: Site) -> None:
        self._settle()
        number, mark = _id(key), (key.kind, key.path)
        name = f"{key.kind}{self._place(number, key.kind, key.path)}"
        seen = Seen(name, key.path, array, self.file.tick())
        open_one = self._backward.get(number)
        if open_one is not None and mark in open_one.seen:  # a second backward through the same graph
            self._finish(number)
            open_one = None
        if open_one is None:
            attributes = {"module": site.name, "phase": "backward", "micro": key.micro, "call": key.call}
            open_one = _Backward(self.file.group(site.cls, attributes, [seen]))
            self._backward[number] = open_one
        else:
            self.file.add(open_one.group, [seen])
        open_one.seen.add(mark)

    def _place(self, number: CallId, kind: str, path: str) -> int:
        """Gradients have the numbers of the tensors that they belong to."""
        paths = self._layouts.setdefault(number, {}).setdefault(kind, [])
        if path not in paths:
            paths.append(path)
        return paths.index(path)

    def _finish(self, number: CallId) -> None:
        """What has not come by now has no gradient, or none of its own."""
        done = self._backward.pop(number)
        missing = [
            Seen(f"{kind}{place}", path, None, self.file.tick(), self._same_as(number, kind, path, done))
            for kind in ("grad_output", "grad_input")
            for place, path in enumerate(self._layouts[number].get(kind, ()))
            if (kind, path) not in done.seen
        ]
        self.file.add(done.group, missing)

    def _same_as(self, number: CallId, kind: str, path: str, done: _Backward) -> str:
        """A tensor that was given in several places has one gradient, which came for the first of them."""
        first = self._again.get(number, {}).get(path)
        if kind != "grad_input" or first is None or (kind, first) not in done.seen:
            return ""
        return f"{kind}{self._layouts[number][kind].index(first)}"


def _again(given: Sequence[tuple[str, Any]]) -> dict[str, str]:
    first: dict[int, str] = {}
    for path, tensor in given:
        first.setdefault(id(tensor), path)
    return {p: first[id(tensor)] for p, tensor in given if tensor is not None and first[id(tensor)] != p}


def _id(key: Key) -> CallId:
    return key.micro, key.module, key.call


def _any(call: _Call) -> str:
    return "" if call.key is None else call.key.path
