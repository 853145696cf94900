"""Loads of checkpoints and steps of optimizers, as an audit watches them.

Frameworks do not report everything about a load (the given keys, the options, the exception), so an audit wraps the
loading methods of every module while it watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks.base import Framework, Remove, require
from tensortap.frameworks.capabilities import CheckpointLoading
from tensortap.frameworks.hooks import Detour
from tensortap.frameworks.registered import registered
from tensortap.kernels.summary.probe import probe

__all__ = [
    "LoadCall",
    "Loading",
    "Wrap",
    "around_steps",
    "few_elements",
    "held_by",
    "loaders",
    "outcome",
    "read_call",
    "state_of",
]

_FROM_DEVICE = 64
"""Approximate number of elements of a device tensor that are copied to the host to detect a change."""


class Wrap(Detour):
    """A detour that tools which inspect the attribute tolerate.

    Its signature is the callable's own, and a model that is pickled meanwhile gets the plain method.
    """

    def __init__(self, owner: Any, attribute: str, around: Callable[..., Any]) -> None:
        super().__init__(owner, attribute, around)
        self.__wrapped__ = self.inner

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._attribute)


@dataclass(frozen=True)
class LoadCall:
    """The arguments of one call of a loading method."""

    given: Mapping[str, tuple[int, ...] | None]
    """Key → shape; None for a value without one."""
    options: str
    """The options that differ from their defaults, as source text."""
    by_tensor_name: bool = False
    """Whether keys are the tensors' own names, as with paddle's use_structured_name=False."""


class Loading:
    """The loading methods and optimizers of one framework."""

    loaders: tuple[str, ...]
    """Methods of a module that load a checkpoint."""
    option_names: tuple[str, ...]
    """Their positional parameters after the state_dict."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework

    def by_tensor_name(self, options: Mapping[str, Any]) -> bool:
        """Return whether these options make keys the tensors' own names."""
        return False

    def groups(self, optimizer: Any) -> Any:
        """Return the parameter groups of an optimizer, which may be written by hand."""
        raise NotImplementedError

    def in_host_memory(self, tensor: Any) -> bool:
        """Return whether elements can be read without waiting for a device."""
        raise NotImplementedError

    def around_steps(self, optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> Remove:
        """Call back around each step of the optimizer, which need not derive from the framework's base class.

        Raise UsageError if the object has no `step` method.
        """
        if not callable(getattr(optimizer, "step", None)):
            raise UsageError(
                f"optimizer= takes an optimizer with a step() method, not a {type(optimizer).__qualname__}; leave it "
                "out, and its steps will show as changes by something else"
            )
        steps = 0

        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            if not steps:
                before()
            steps += 1
            try:
                result = inner(*args, **kwargs)
            finally:
                steps -= 1
            if not steps:  # a wrapper's minimize may call its own step
                after()
            return result

        with ExitStack() as undo:
            for name in ("step", "minimize"):  # minimize, where there is one, does not call step
                if callable(getattr(optimizer, name, None)):
                    undo.callback(Wrap(optimizer, name, around).remove)
            return undo.pop_all().close


def _loading_of(framework: Framework) -> Loading:
    supported: CheckpointLoading = require(framework, CheckpointLoading, "auditing loads and steps")
    return supported.loading()


def loaders(framework: Framework) -> tuple[str, ...]:
    """Return the names of the methods that load a checkpoint into a module."""
    return _loading_of(framework).loaders


def read_call(framework: Framework, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoadCall:
    """Interpret the arguments of a loading method, whose signature a subclass may have changed."""
    loading = _loading_of(framework)
    named = dict(zip(loading.option_names, args[1:], strict=False))
    options = named | {name: value for name, value in kwargs.items() if name != "state_dict"}
    state = args[0] if args else kwargs.get("state_dict")
    given = {str(key): _shape(value) for key, value in state.items()} if isinstance(state, Mapping) else {}
    text = ", ".join(f"{name}={_short(value)}" for name, value in options.items())
    return LoadCall(given, text, loading.by_tensor_name(options))


def outcome(result: Any) -> tuple[list[str], list[str]] | None:
    """Return (missing, unexpected) as the framework reports them; None if a subclass returns something else."""
    if isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, (list, tuple, set)) for part in result):
        return [str(key) for key in result[0]], [str(key) for key in result[1]]
    return None


def state_of(framework: Framework, module: Any, by_tensor_name: bool = False) -> dict[str, Any]:
    """Return key → tensor as a checkpoint of this module has them. No state_dict hook runs."""
    found: dict[str, Any] = {}

    def walk(part: Any, prefix: str) -> None:
        for name, tensor, registration in registered(framework, part):
            if registration.saved:
                found[framework.assigned_name(tensor) if by_tensor_name else prefix + name] = tensor
        for name, child in framework.children(part):
            walk(child, f"{prefix}{name}.")

    walk(module, "")
    return found


def around_steps(framework: Framework, optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> Remove:
    """Call back around each step of the optimizer; see `Loading.around_steps`."""
    return _loading_of(framework).around_steps(optimizer, before, after)


def held_by(framework: Framework, optimizer: Any) -> Iterator[Any]:
    """Yield the tensors that an optimizer changes."""
    for group in _loading_of(framework).groups(optimizer):
        yield from group["params"] if isinstance(group, dict) else (group,)


def few_elements(framework: Framework, tensor: Any) -> bytes:
    """Return the bytes of a few elements, copied from the device if necessary."""
    if _loading_of(framework).in_host_memory(tensor):
        return probe(framework.host(tensor))
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # no rank waits for the others
    flat = local.detach().reshape([-1])
    return probe(framework.host(flat[:: max(1, int(flat.shape[0]) // _FROM_DEVICE | 1)]))


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return tuple(int(size) for size in shape) if isinstance(shape, (tuple, list)) else None


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else "…"
