"""The sink of a dump: collect the tensors that capture reports into groups.

A forward group is written when the call returns, with the inputs as they were before the module ran. A backward group
is created when the first gradient reaches the module, and extended as others arrive. Nested modules are in backward at
the same time, and holding back their gradients would fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site
from tensortap.capture.selection import Keep
from tensortap.capture.watching.flatten import open_arguments, open_value
from tensortap.compat.dump_file import Array, DumpedTensor, DumpFile
from tensortap.core.records import Key
from tensortap.frameworks.base import Framework

__all__ = ["DumpSink"]

CallId = tuple[int, str, int]
Guard = Callable[[Callable[..., None]], Callable[..., None]]


@dataclass(eq=False)
class _DumpedCall:
    """One call of a module, from its inputs to its outputs. Paths include those of None values, in order."""

    site: Site
    input_paths: list[str] | None = None
    repeated: dict[str, str] = field(default_factory=dict)
    """Path → first path of the same tensor, for a tensor that was passed several times."""
    recomputation: bool = False
    key: Key | None = None
    inputs: dict[str, tuple[Array, int]] = field(default_factory=dict)
    output_paths: list[str] = field(default_factory=list)
    single: bool = True
    outputs_expected: int = 0
    outputs: dict[str, tuple[Array, int]] = field(default_factory=dict)


@dataclass(eq=False)
class _BackwardGroup:
    group: Any
    seen: set[tuple[str, str]] = field(default_factory=set)


class DumpSink:
    """A sink that writes a dump.

    It also places its own hooks on calls, because capture reports no None values, and does not distinguish one tensor
    from a tuple of one.
    """

    def __init__(self, framework: Framework, sites: Sequence[Site], guard: Guard, file: DumpFile) -> None:
        self.where = str(file.path)
        self.file = file
        self._framework = framework
        self._running: list[_DumpedCall] = []
        self._returned: _DumpedCall | None = None
        self._layouts: dict[CallId, dict[str, list[str]]] = {}
        self._repeated: dict[CallId, dict[str, str]] = {}
        self._backward: dict[CallId, _BackwardGroup] = {}
        with ExitStack() as undo:
            undo.callback(file.close, False, "the hooks could not be placed")
            for site in sites:
                entered, left = partial(guard(self._on_call), site), partial(guard(self._on_return), site)
                undo.callback(framework.on_call(site.module, entered, left))
            self._undo = undo.pop_all()

    # --- the sink's interface ----------------------------------------------------------------------------------
    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        array = self._framework.host(tensor)
        if key.phase == "backward":
            self._add_gradient(array, key, site)
        elif key.kind == "input":
            call = self._running[-1] if self._running else None
            if call is None or call.site is not site or call.key not in (None, key._replace(path=_path_of_key(call))):
                call = _DumpedCall(site)  # around a module compiled in place, capture's hook runs before this one
                self._running.append(call)
            call.key = call.key or key
            call.inputs[key.path] = array.copy(), self.file.tick()  # the module may change it in place
        elif (call := self._returned) is not None:
            call.key = call.key or key
            call.outputs[key.path] = array if call.outputs_expected == 1 else array.copy(), self.file.tick()
            if len(call.outputs) == call.outputs_expected:
                self._write_returned()

    def end_step(self, step: int, book: CoverageBook) -> None:
        self._write_returned()

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        complete = False
        try:
            self._write_returned()
            for call in self._running:  # an exception passed their hooks
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

    def _on_call(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._write_returned()
        given = open_arguments(args, kwargs, self._leaf).tensors
        if not (self._running and self._running[-1].site is site and self._running[-1].input_paths is None):
            self._running.append(_DumpedCall(site, recomputation=self._framework.recomputing()))
        self._running[-1].input_paths = [path for path, _ in given]
        self._running[-1].repeated = _repeated(given)

    def _on_return(self, site: Site, output: Any) -> None:
        self._write_returned()
        while self._running:
            call = self._running.pop()
            if call.site is site:
                break
            self._write(call, returned=False)  # an exception ended it
        else:
            return
        leaves = open_value(output, self._leaf).tensors
        call.output_paths = [path for path, _ in leaves]
        call.single = self._leaf(output)
        call.outputs_expected = sum(value is not None for _, value in leaves)
        self._returned = call
        if not call.outputs_expected:
            self._write_returned()

    def _write_returned(self) -> None:
        """Write the call that returned last: no more of its outputs will arrive."""
        call, self._returned = self._returned, None
        if call is not None:
            self._write(call)

    def _write(self, call: _DumpedCall, returned: bool = True) -> None:
        if call.recomputation and call.key is None:  # a recomputation, which was written when it ran first
            return
        input_paths = call.input_paths if call.input_paths is not None else list(call.inputs)
        datasets = [
            self._make_dataset(f"feat_input{place}", path, call.inputs) for place, path in enumerate(input_paths)
        ]
        for place, path in enumerate(call.output_paths):
            name = "feat_output" if call.single else f"feat_output{place}"
            datasets.append(self._make_dataset(name, path, call.outputs))
        attributes = {"module": call.site.name, "phase": "forward", "returned": returned}
        if call.key is not None:
            attributes |= {"micro": call.key.micro, "call": call.key.call}
            self._layouts[_call_id(call.key)] = {"grad_input": input_paths, "grad_output": call.output_paths}
            self._repeated[_call_id(call.key)] = call.repeated
        self.file.group(call.site.cls, attributes, datasets)

    def _make_dataset(self, name: str, path: str, arrays: Mapping[str, tuple[Array, int]]) -> DumpedTensor:
        array, seq = arrays[path] if path in arrays else (None, self.file.tick())
        return DumpedTensor(name, path, array, seq)

    # --- backward ----------------------------------------------------------------------------------------------
    def _add_gradient(self, array: Array, key: Key, site: Site) -> None:
        self._write_returned()
        number, mark = _call_id(key), (key.kind, key.path)
        name = f"{key.kind}{self._place(number, key.kind, key.path)}"
        seen = DumpedTensor(name, key.path, array, self.file.tick())
        group = self._backward.get(number)
        if group is not None and mark in group.seen:  # a second backward through the same graph
            self._finish(number)
            group = None
        if group is None:
            attributes = {"module": site.name, "phase": "backward", "micro": key.micro, "call": key.call}
            group = _BackwardGroup(self.file.group(site.cls, attributes, [seen]))
            self._backward[number] = group
        else:
            self.file.add(group.group, [seen])
        group.seen.add(mark)

    def _place(self, number: CallId, kind: str, path: str) -> int:
        """Return the number of a gradient: that of the tensor it belongs to."""
        paths = self._layouts.setdefault(number, {}).setdefault(kind, [])
        if path not in paths:
            paths.append(path)
        return paths.index(path)

    def _finish(self, number: CallId) -> None:
        """Complete a backward group: tensors whose gradient has not arrived get an empty dataset."""
        done = self._backward.pop(number)
        missing = [
            DumpedTensor(f"{kind}{place}", path, None, self.file.tick(), self._same_as(number, kind, path, done))
            for kind in ("grad_output", "grad_input")
            for place, path in enumerate(self._layouts[number].get(kind, ()))
            if (kind, path) not in done.seen
        ]
        self.file.add(done.group, missing)

    def _same_as(self, number: CallId, kind: str, path: str, done: _BackwardGroup) -> str:
        """Return the dataset with the gradient of a tensor that was passed several times: that of its first path."""
        first = self._repeated.get(number, {}).get(path)
        if kind != "grad_input" or first is None or (kind, first) not in done.seen:
            return ""
        return f"{kind}{self._layouts[number][kind].index(first)}"


def _repeated(given: Sequence[tuple[str, Any]]) -> dict[str, str]:
    first: dict[int, str] = {}
    for path, tensor in given:
        first.setdefault(id(tensor), path)
    return {p: first[id(tensor)] for p, tensor in given if tensor is not None and first[id(tensor)] != p}


def _call_id(key: Key) -> CallId:
    return key.micro, key.module, key.call


def _path_of_key(call: _DumpedCall) -> str:
    return "" if call.key is None else call.key.path
