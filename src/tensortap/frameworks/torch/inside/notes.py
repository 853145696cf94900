"""Notes on a graph while it is traced: the calls in it, the paths of their tensors, and which tensors are the same.

The compiler calls the `see_…` functions, which read its own variables. It takes the results of all other functions as
constants. So this file is ordinary code, whatever the compiler understands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch._dynamo.exc import RestartAnalysis
from torch._guards import CompileContext, TracingContext

from tensortap.core.arguments import OpaqueValue, written
from tensortap.frameworks.torch.inside.operator import new_point

__all__ = ["opaque_value", "traced"]

opaque_value: list[Callable[[Any], OpaqueValue | None]] = [lambda _: None]
"""Recognises dtypes and devices; see `core.arguments.written`. One item."""

traced = [0]
"""Number of graphs traced. One item."""

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_TAPS = (torch.ops.tensortap.tap, torch.ops.tensortap.tap.default)
_FROM_OUTSIDE = -1
"""The number of all tensors that the graph gets from its caller."""


@dataclass(slots=True)
class _Tapped:
    """A tensor whose gradient is tapped, and the tensors that shared its memory before."""

    fake: Any
    version: int
    call: int
    path: str
    aliases: Sequence[tuple[Any, int]]

    def disturbed(self) -> bool:
        """Return whether it or another tensor in its memory was changed since: the copy separates the two."""
        if not self.aliases:
            return False
        return self.fake._version != self.version or any(other._version != old for other, old in self.aliases)


@dataclass(slots=True)
class _Call:
    number: int
    inputs: list[tuple[Any, int]] = field(default_factory=list)
    """Each input, and its version when the call began."""
    nodes: list[Any] = field(default_factory=list)
    """The node of each input in the graph."""
    common: dict[str, Any] = field(default_factory=dict)
    """Facts about the call that the tap needs both at its beginning and at its end: compilers may reorder the two."""
    spec: dict[str, Any] = field(default_factory=dict)
    repeated: list[list[str]] = field(default_factory=list)
    """Paths of inputs that are one tensor: the first and the later one."""


class _Notes:
    """The notes on one graph."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: dict[int, tuple[Any, int]] = {}
        self.open: list[_Call] = []
        self.plain: list[Any] = []
        self.tapped: dict[int, _Tapped] = {}
        self.values: dict[tuple[int, int], tuple[Any, int]] = {}
        """By the id and version of a tensor: the tensor, to keep its id, and a number."""
        self.given: dict[Any, int] = {}
        """By graph, the number of its inputs whose memory is known."""
        self.memory: set[int | None] = set()
        """Memory that comes from the caller."""
        self.marks = ""
        self.paths: list[str] = []
        self.leave: dict[str, Any] = {}

    def value(self, fake: Any) -> int:
        """Return a number for the value of a tensor. A change in place makes another value of it."""
        return self.values.setdefault((id(fake), fake._version), (fake, len(self.values)))[1]

    def see_memory(self, graph: Any) -> None:
        """Note the memory that a graph gets from its caller. Inputs are added while it is traced."""
        given = graph.find_nodes(op="placeholder")
        if self.given.get(graph) != len(given):
            self.given[graph] = len(given)
            self.memory.update(_memory(node.meta.get("example_value")) for node in given)

    def made(self, fake: Any) -> bool:
        """Return whether the graph has made a tensor, in memory of its own."""
        return self.value(fake) >= 0 and _memory(fake) not in self.memory

    def count_call(self, module: Any) -> int:
        """Count a call of a module, by the tensor that is its number. Return how many the graph has before."""
        _, before = self.calls.get(id(module), (module, 0))
        self.calls[id(module)] = module, before + 1
        return before

    def check(self) -> None:
        """Trace again without the tap of a gradient, if the tensor was changed in place through another one."""
        for tapped in self.tapped.values():
            if tapped.disturbed():
                _untapped.setdefault(_compile_id(), set()).add((tapped.call, tapped.path))
                raise RestartAnalysis(restart_reason="tensortap: a tapped view is changed in place")


_notes: WeakKeyDictionary[Any, _Notes] = WeakKeyDictionary()
_untapped: dict[Any, set[tuple[int, str]]] = {}
"""By compilation: calls and paths of outputs whose gradient is not tapped."""


def _compile_id() -> Any:
    return CompileContext.current_compile_id()


def _current() -> _Notes:
    context = TracingContext.get()
    if (found := _notes.get(context)) is None:
        found = _notes[context] = _Notes()
        traced[0] += 1
    return found


def _fakes(context: Any) -> list[Any]:
    """Return the fake tensors of the local variable `tensors`."""
    notes, fakes = _current(), []
    for proxy in context.get_local("tensors").as_proxy():
        fake = proxy.node.meta["example_value"]
        notes.see_memory(proxy.node.graph)
        if proxy.node.op == "placeholder" and getattr(proxy.tracer, "parent", None) is None:
            notes.values.setdefault((id(fake), fake._version), (fake, _FROM_OUTSIDE))
        fakes.append(fake)
    return fakes


def _nodes(context: Any) -> list[Any]:
    return [proxy.node for proxy in context.get_local("tensors").as_proxy()]


def _strings(context: Any, name: str) -> list[str]:
    return list(context.get_local(name).as_python_constant())


# --- called by the compiler with its variables -------------------------------------------------------------------
def see_plain(context: Any) -> None:
    """Take a plain argument of the call that begins."""
    value = context.get_local("value")
    kept: Any
    try:
        kept = value.as_python_constant()
    except Exception:  # the compiler may raise any error for values that are no constants
        try:
            kept = OpaqueValue("object", value.python_type().__qualname__)
        except Exception:
            kept = OpaqueValue("object", "unknown")
    _current().plain.append(kept)


def see_inputs(context: Any) -> None:
    """Begin a call."""
    notes = _current()
    notes.check()
    fakes, notes.paths = _fakes(context), _strings(context, "paths")
    plain = list(zip(_strings(context, "plain_paths"), notes.plain, strict=True))
    notes.plain = []
    call = _Call(notes.count, [(fake, fake._version) for fake in fakes], _nodes(context))
    notes.count += 1
    call.common = {
        "nth": notes.count_call(context.get_local("number").as_fake()),
        "outermost": not notes.open,
        "autograd": torch.is_grad_enabled(),
        "reached": any(fake.requires_grad for fake in fakes),
    }
    call.spec = call.common | _spec(notes, fakes, _strings(context, "closed"))
    if plain:
        call.spec["plain"] = written(plain, opaque_value[0])
    notes.open.append(call)
    first: dict[int, int] = {}
    marks = []
    for place, fake in enumerate(fakes):
        if not fake.requires_grad or not torch.is_grad_enabled():
            marks.append("-")
        elif (known := first.setdefault(id(fake), place)) != place:
            marks.append(str(known))
            call.repeated.append([notes.paths[known], notes.paths[place]])
        else:
            marks.append("tap")
    notes.marks = ",".join(marks)


def see_tapped_inputs(context: Any) -> None:
    """Take the tensors that the call gets instead of its inputs."""
    notes = _current()
    call = notes.open[-1]
    if call.repeated:
        call.spec["repeated"] = call.repeated
    for fake, (before, _) in zip(_fakes(context), call.inputs, strict=True):
        notes.values[id(fake), fake._version] = fake, notes.value(before)
    call.inputs = [(fake, fake._version) for fake in _fakes(context)]
    call.nodes = _nodes(context)


def see_outputs(context: Any) -> None:
    """Decide for each output of a call whether its gradient is tapped, or was tapped before."""
    notes = _current()
    notes.check()
    fakes, notes.paths = _fakes(context), _strings(context, "paths")
    call = notes.open[-1]
    passed = _passed_by_dropout(context, call)
    for place, source in passed.items():
        fakes[place] = call.inputs[source][0]
    notes.leave = call.common | _spec(notes, fakes, _strings(context, "closed"))
    unchanged = {id(fake) for fake, version in call.inputs if fake._version == version}
    left_out = _untapped.get(_compile_id(), set())
    first: dict[int, int] = {}
    marks = []
    for place, (fake, path) in enumerate(zip(fakes, notes.paths, strict=True)):
        known = notes.tapped.get(id(fake))
        if id(fake) in unchanged:
            notes.leave.setdefault("unchanged", []).append(path)
            marks.append(f"input{passed[place]}" if place in passed else "-")
        elif not fake.requires_grad or not torch.is_grad_enabled():
            marks.append("-")
        elif known is not None and known.version == fake._version:
            notes.leave.setdefault("aliases", {})[path] = [known.call, known.path]
            marks.append("-")
        elif (earlier := first.setdefault(id(fake), place)) != place:
            notes.leave.setdefault("aliases", {})[path] = [call.number, notes.paths[earlier]]
            marks.append(str(earlier))
        elif (call.number, path) in left_out:
            notes.leave.setdefault("left_out", []).append(path)
            marks.append("-")
        else:
            notes.leave.setdefault("tapped", []).append(path)
            marks.append("tap")
    notes.marks = ",".join(marks)


def see_tapped_output(context: Any) -> None:
    """Take the tensor that replaces an output from now on, also where the module itself has used it."""
    notes = _current()
    before = context.get_local("tensor").as_fake()
    fake = context.get_local("tapped").as_fake()
    path = notes.paths[context.get_local("place").as_python_constant()]
    if before._version == 0:  # else its uses see several values
        nodes = context.get_local("tensor").as_proxy().node, context.get_local("tapped").as_proxy().node
        if _use_instead(*nodes):
            notes.leave.setdefault("used_inside", []).append(path)
    call = notes.open[-1]
    memory = _memory(before)
    aliases = [(other, other._version) for other, _ in call.inputs if memory is not None and _memory(other) == memory]
    notes.values[id(fake), fake._version] = fake, notes.value(before)
    notes.tapped[id(fake)] = _Tapped(fake, fake._version, call.number, path, aliases)


def see_left(context: Any) -> None:
    """End a call."""
    _current().open.pop()


def _passed_by_dropout(context: Any, call: _Call) -> dict[int, int]:
    """Return by place the outputs of a dropout that drops nothing, each with the place of its input.

    Uncompiled, such a dropout returns its input. The compiler makes a copy.
    """
    found = {}
    for place, node in enumerate(_nodes(context)):
        if (
            node.op != "call_function"
            or node.target not in _DROPOUTS
            or not node.args
            or node.args[0] not in call.nodes
        ):
            continue
        chance = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        if chance == 0 or training is False:
            found[place] = call.nodes.index(node.args[0])
    return found


def _use_instead(tensor: Any, tapped: Any) -> bool:
    """Let earlier uses of an output use the tapped one, so that its gradient is the sum over all uses.

    Return whether there are any.
    """
    uses = [user for user in tensor.users if user is not tapped]
    chain = [tapped]  # the nodes that compute the tapped tensor from the other one, the last first
    while tensor not in chain[-1].all_input_nodes:
        inner = [node for node in chain[-1].all_input_nodes if node.op == "call_function"]
        if len(inner) != 1:
            return False
        chain += inner
    if tensor.graph is not tapped.graph or all(user in chain or user.target in _TAPS for user in uses):
        return False
    inputs = [node for node in chain[-1].all_input_nodes if node.op == "get_attr"]
    others = [node for node in chain[-1].all_input_nodes if node not in inputs and node is not tensor]
    if any(node.op != "placeholder" and not node < tensor for node in others):
        return False
    for node in [*chain, *inputs]:  # each is put before those that were moved already
        tensor.append(node)
    tensor.replace_all_uses_with(tapped, delete_user_cb=lambda user: user not in chain)
    return True


def _spec(notes: _Notes, fakes: Sequence[Any], closed: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"paths": notes.paths, "values": [notes.value(fake) for fake in fakes]}
    found["made"] = [notes.made(fake) for fake in fakes]
    if detached := [path for path, fake in zip(notes.paths, fakes, strict=True) if not fake.requires_grad]:
        found["detached"] = detached
    return found | ({"closed": list(closed)} if closed else {})


def _memory(fake: Any) -> int | None:
    if not isinstance(fake, torch.Tensor):
        return None
    try:
        return int(fake.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


# --- constants of the traced code ----------------------------------------------------------------------------------
_constant = partial(torch._dynamo.assume_constant_result)


@_constant
def input_marks() -> str:
    """Return the action for each input: tap its gradient, nothing, or take the tensor of another place."""
    return _current().marks


@_constant
def output_marks() -> str:
    """Return the same for each output."""
    return _current().marks


@_constant
def gradient_point(kind: str, place: int) -> int:
    """Return the point at which the gradient of a tensor of the innermost call is tapped."""
    notes = _current()
    return new_point(kind, notes.open[-1].number, {"path": notes.paths[place]})


@_constant
def enter_point() -> int:
    """Return the point at which the innermost call begins."""
    call = _current().open[-1]
    return new_point("enter", call.number, call.spec)


@_constant
def leave_point() -> int:
    """Return the point at which the innermost call ends."""
    notes = _current()
    return new_point("leave", notes.open[-1].number, notes.leave)


@_constant
def whole_point() -> int:
    """Return the point at which a call ends that has not shown its beginning."""
    notes = _current()
    call = notes.open[-1]
    return new_point("leave", call.number, {**notes.leave, "entered": call.spec})
