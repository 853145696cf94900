"""Records every operator that a torch module runs, in forward and backward."""
# mypy: allow-untyped-calls

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tensortap.core.operators import Operator, OperatorTrace, TracedValue
from tensortap.frameworks.torch.fused import expansions
from tensortap.frameworks.torch.source_lines import CallingCode, calling_code, is_users

if TYPE_CHECKING:
    from tensortap.frameworks.base import Remove
    from tensortap.frameworks.operators import Guard, OperatorRan, OperatorWatch

__all__ = ["TorchOperatorRecorder", "TorchOperatorTracer", "changed_arguments", "is_uninitialised"]

_MOVES = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "transpose",
        "t",
        "permute",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "split",
        "split_with_sizes",
        "unbind",
        "alias",
        "detach",
        "clone",
        "contiguous",
        "_to_copy",
        "copy_",
        "lift_fresh",
        "as_strided",
        "_reshape_alias",
        "chunk",
        "narrow",
        "diagonal",
        "movedim",
        "swapaxes",
        "flatten",
        "unflatten",
        "view_as_real",
        "view_as_complex",
    ]
)


_UNINITIALISED = ("empty", "new_empty")


class TorchOperatorTracer:
    """PyTorch's implementation of `frameworks.operators.OperatorTracer`."""

    def operator_recorder(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> TorchOperatorRecorder:
        return TorchOperatorRecorder(modules)

    def operator_watch(self, ran: OperatorRan, hold: Callable[[Remove], None], guard: Guard) -> OperatorWatch:
        from tensortap.frameworks.torch.operator_watch import TorchOperatorWatch

        return TorchOperatorWatch(ran, hold, guard)

    def fresh(self, value: Any, exact: bool) -> tuple[Any, dict[int, torch.Tensor]]:
        leaves: dict[int, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in made:  # an aliased input stays one tensor
                values = leaf.detach().clone()
                values = values.double() if exact and values.is_floating_point() else values
                if values.is_floating_point() or values.is_complex():
                    values.requires_grad_()
                # A module may change its input in place, which autograd refuses for the leaf itself.
                made[id(leaf)] = values.clone()
                leaves[id(made[id(leaf)])] = values
            return made[id(leaf)]

        return tree_map(copy, value), leaves

    def state(self, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        return [*module.named_parameters(), *module.named_buffers()]

    def output_gradients(
        self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        drawn = [
            torch.randn(each.shape, generator=random, dtype=torch.float32) if each.ndim else torch.ones(())
            for each in outputs
        ]
        return [
            (one if gradient is None else gradient).to(output)
            for output, one, gradient in zip(outputs, drawn, given, strict=True)
        ]

    def input_gradients(
        self,
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        retain: bool = False,
    ) -> list[torch.Tensor | None]:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not outputs or not wanted:
            return [None for _ in leaves]
        found = iter(
            torch.autograd.grad(list(outputs), wanted, list(gradients), retain_graph=retain, allow_unused=True)
        )
        return [next(found) if leaf.requires_grad else None for leaf in leaves]

    def expand(self, trace: OperatorTrace, operator: Operator) -> list[list[Operator]]:
        func, spec, leaves = operator.call
        values = iter(trace.values[number].tensor for number in operator.inputs)
        args, kwargs = tree_unflatten([next(values) if leaf is _TENSOR else leaf for leaf in leaves], spec)
        ways = []
        for expansion in expansions(func):
            recorder = TorchOperatorRecorder(())
            recorder.continue_trace(trace, operator)
            try:
                with torch.no_grad(), recorder:
                    expansion(*args, **kwargs)
            except Exception:  # a decomposition that does not know these arguments; the operator stays whole
                continue
            ways.append(recorder.parts)
        return ways


class TorchOperatorRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped to us
    """Records the operators that run inside the block.

    Values are kept by reference. Before an operator writes into their memory, they are copied.
    """

    def __init__(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        super().__init__()
        self.trace = OperatorTrace()
        self.parts: list[Operator] = []
        self._modules = list(modules)
        self._inside: list[str] = []
        self._hooks = ExitStack()
        self._known: dict[tuple[Any, ...], int] = {}
        self._by_object: dict[int, int] = {}
        self._by_memory: dict[int, list[int]] = {}
        self._written: dict[int, int] = {}
        self._by_node: dict[int, int] = {}
        self._held: list[torch.Tensor] = []
        self._part_of: Operator | None = None

    def __enter__(self) -> TorchOperatorRecorder:
        for name, module in self._modules:
            before = module.register_forward_pre_hook(partial(self._enter_module, name))
            after = module.register_forward_hook(self._leave_module, always_call=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _enter_module(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave_module(self, *_: Any) -> None:
        self._inside.pop()

    def continue_trace(self, trace: OperatorTrace, operator: Operator) -> None:
        """Append to a trace that has ended, the parts of one of its operators."""
        self.trace, self._part_of = trace, operator
        for number in operator.inputs:
            self._remember(trace.values[number].tensor, number)

    def name_source(self, tensor: torch.Tensor, name: str) -> int:
        """Record an input, a parameter or a buffer under its name."""
        return self._new_value(tensor, None, name)

    def value_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the value that a tensor has now."""
        return self._read(tensor)

    def end_forward(self) -> None:
        """Note which values autograd has taken up; this is known only after each operator has returned."""
        for value in self.trace.values:
            value.differentiable = value.differentiable or bool(value.tensor.requires_grad)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        inputs = [self._read(tensor) for tensor in tensors]
        changed = changed_arguments(func, args, kwargs)
        for tensor in changed:
            self._preserve(tensor)
        made = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        if not results and not changed:
            return made
        call = func, spec, [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        operator = self._add_operator(func, inputs, call, args, kwargs, bool(changed))
        before = {_key(tensor): self._known.get(_key(tensor)) for tensor in changed}
        for tensor in changed:
            self._written[_memory(tensor)] = operator.number
        outputs = []
        for tensor in dict.fromkeys([*changed, *results]):
            if not changed and any(tensor is each for each in tensors):  # an operator that returned its input
                outputs.append(self._read(tensor))
                continue
            number = self._new_value(tensor, operator.number, "")
            self.trace.values[number].replaced = before.get(_key(tensor))
            self.trace.values[number].uninitialised = self._is_uninitialised(func, operator)
            outputs.append(number)
        operator.outputs = list(dict.fromkeys(outputs))
        return made

    def _is_uninitialised(self, func: Any, operator: Operator) -> bool:
        if operator.moves and not operator.writes and operator.inputs:
            return self.trace.values[operator.inputs[0]].uninitialised
        return is_uninitialised(func._schema.name)

    def _add_operator(
        self, func: Any, inputs: list[int], call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], writes: bool
    ) -> Operator:
        name = func._schema.name.rpartition("::")[2]
        whole = self._part_of
        node = None if whole is not None else torch._C._current_autograd_node()
        number = len(self.trace.operators)
        code = CallingCode([]) if whole is not None else calling_code(sys._getframe(2))
        lines, function = code.lines, code.function
        line, callers = (lines[0] if lines else None), lines[1:]
        module, phase = (self._inside[-1] if self._inside else ""), "forward"
        if whole is not None:
            module, phase, line, callers = whole.module, whole.phase, whole.line, list(whole.callers)
        elif node is not None:
            phase = "backward"
            forward = self._by_node.get(node._sequence_nr())
            if forward is not None:
                origin = self.trace.operators[forward]
                module = origin.module
                if not function and not is_users(line):
                    line, callers = origin.line, list(origin.callers)
                name = name if origin.name in ("detach", "alias") else f"{name} (backward of {origin.name})"
        else:
            # The graph's node of this operator was created just before it ran.
            self._by_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, number)
        operator = Operator(
            number=number,
            name=function or name,
            phase=phase,
            module=module,
            line=line,
            callers=callers,
            inputs=inputs,
            outputs=(),
            arguments=_plain_arguments(func, args, kwargs),
            writes=writes,
            moves=func._schema.name.rpartition("::")[2] in _MOVES,
            is_function=function is not None,
            part_of=None if whole is None else whole.number,
            call=call,
        )
        self.trace.operators.append(operator)
        self.parts.append(operator)
        return operator

    def _read(self, tensor: torch.Tensor) -> int:
        memory = _memory(tensor)
        number = self._by_object.get(id(tensor), self._known.get(_key(tensor)))
        writer = self._written.get(memory)
        if number is not None and (writer is None or (self.trace.values[number].producer or 0) >= writer):
            return number
        made = self._new_value(tensor, writer if writer is not None else self._maker(memory), "")
        self.trace.values[made].replaced = number
        return made

    def _maker(self, memory: int) -> int | None:
        """Return the operator that made the memory that an unseen view lies in."""
        numbers = self._by_memory.get(memory)
        return self.trace.values[numbers[-1]].producer if numbers else None

    def _new_value(self, tensor: torch.Tensor, producer: int | None, name: str) -> int:
        number = len(self.trace.values)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.trace.values.append(TracedValue(number, producer, name, dtype, tuple(tensor.shape), tensor))
        self._remember(tensor, number)
        return number

    def _remember(self, tensor: torch.Tensor, number: int) -> None:
        self._known[_key(tensor)] = number
        self._by_object[id(tensor)] = number
        self._by_memory.setdefault(_memory(tensor), []).append(number)
        self._held.append(tensor)  # its memory must not be reused by another tensor

    def _preserve(self, tensor: torch.Tensor) -> None:
        """Copy the recorded values in the memory that is about to change."""
        for number in self._by_memory.get(_memory(tensor), ()):
            value = self.trace.values[number]
            if value.tensor.untyped_storage().data_ptr() == _memory(tensor):
                value.differentiable = value.differentiable or bool(value.tensor.requires_grad)
                value.tensor = value.tensor.detach().clone()


class _Tensor:
    """Marks the place of a tensor among the arguments of a call."""


_TENSOR = _Tensor()


def is_uninitialised(name: str) -> bool:
    """Return whether an operator returns memory that nothing has written to."""
    return name.rpartition("::")[2].startswith(_UNINITIALISED)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr()) or id(tensor)


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _memory(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def changed_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    changed = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            changed += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return changed


def _plain_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    named = [(argument.name, argument) for argument in func._schema.arguments]
    pairs = [*((named[at][0] if at < len(named) else str(at), value) for at, value in enumerate(args)), *kwargs.items()]
    words = []
    for name, value in pairs:
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)) and value is not None:
            words.append(f"{name}={str(value).removeprefix('torch.')}")
    return words
