"""How checkpoints get into models and optimizers change them: what an audit has to stand beside.

Neither framework tells of a load all that there is to know (which keys were given, how it was called, what it raised),
so the loading methods of every module are wrapped for as long as somebody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks.base import Framework, Remove
from tensortap.frameworks.hooks import Detour, innermost_optimizer
from tensortap.frameworks.registered import registered
from tensortap.kernels.summary.probe import probe

__all__ = [
    "LoadCall",
    "Wrap",
    "around_steps",
    "few_elements",
    "held_by",
    "in_host_memory",
    "loaders",
    "outcome",
    "read_call",
    "state_of",
]

_FROM_DEVICE = 64
"""About how many elements of a tensor on a device are brought to the host to tell whether it has changed."""


class Wrap(Detour):
    """A detour that tools which look closely at the attribute do not stumble over.

    Its signature is the callable's own, and a model that is pickled while it stands there gets the plain method.
    """

    def __init__(self, owner: Any, attribute: str, around: Callable[..., Any]) -> None:
        super().__init__(owner, attribute, around)
        self.__wrapped__ = self.inner

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._attribute)


@dataclass(frozen=True)
class LoadCall:
    """What a loading method was called with."""

    given: Mapping[str, tuple[int, ...] | None]
    """Key → shape; None where a value has none."""
    options: str
    """The options that were not left at their defaults, as one would write them."""
    by_tensor_name: bool = False
    """Paddle's use_structured_name=False: keys are the tensors' own names."""


def loaders(framework: Framework) -> tuple[str, ...]:
    """The methods that load a checkpoint into a module."""
    return ("load_state_dict",) if framework.name == "torch" else ("set_state_dict", "set_dict", "load_dict")


def read_call(framework: Framework, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoadCall:
    """Make sense of a loading method's arguments, whatever a subclass has made of its signature."""
    names = ("strict", "assign") if framework.name == "torch" else ("use_structured_name",)
    options = dict(zip(names, args[1:], strict=False)) | {k: v for k, v in kwargs.items() if k != "state_dict"}
    state = args[0] if args else kwargs.get("state_dict")
    given = {str(key): _shape(value) for key, value in state.items()} if isinstance(state, Mapping) else {}
    return LoadCall(
        given,
        ", ".join(f"{name}={_short(value)}" for name, value in options.items()),
        framework.name == "paddle" and options.get("use_structured_name") is False,
    )


def outcome(result: Any) -> tuple[list[str], list[str]] | None:
    """(missing, unexpected) as the framework itself reports them; None if a subclass returns something else."""
    if isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, (list, tuple, set)) for part in result):
        return [str(key) for key in result[0]], [str(key) for key in result[1]]
    return None


def state_of(framework: Framework, module: Any, by_tensor_name: bool = False) -> dict[str, Any]:
    """Key → tensor as a checkpoint of this module would have them; no state_dict hook of anybody's runs."""
    found: dict[str, Any] = {}

    def walk(part: Any, prefix: str) -> None:
        for name, tensor, registration in registered(framework, part):
            if registration.saved:
                found[str(tensor.name) if by_tensor_name else prefix + name] = tensor
        for name, child in framework.children(part):
            walk(child, f"{prefix}{name}.")

    walk(module, "")
    return found


def around_steps(framework: Framework, optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> Remove:
    """Call `before` and `after` around each step of the optimizer, which need not have the framework's base class.

    Raises UsageError if the object has no `step` method.
    """

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
        # A wrapper does more than the optimizer inside it: it may copy master weights back.
        wraps = innermost_optimizer(optimizer) is not optimizer
        if hasattr(optimizer, "register_step_pre_hook") and not wraps:
            from tensortap.frameworks.torch.steps import after_step, before_step  # loads torch

            undo.callback(before_step(optimizer, lambda *_: before()))
            undo.callback(after_step(optimizer, after))
            return undo.pop_all().close
        if framework.name == "paddle":
            from tensortap.frameworks.paddle.optimizers import stepper

            optimizer = stepper(optimizer) or optimizer
        if not callable(getattr(optimizer, "step", None)):
            raise UsageError(
                f"optimizer= takes an optimizer with a step() method, not a {type(optimizer).__qualname__}; leave it "
                "out, and its steps will show as changes by something else"
            )
        for name in ("step", "minimize"):  # paddle's optimizers have no hooks, and minimize does not call step
            if callable(getattr(optimizer, name, None)):
                undo.callback(Wrap(optimizer, name, around).remove)
        return undo.pop_all().close


def held_by(framework: Framework, optimizer: Any) -> Iterator[Any]:
    """The tensors that an optimizer changes."""
    if framework.name == "paddle":
        from tensortap.frameworks.paddle.optimizers import parameter_groups

        try:
            groups = parameter_groups(optimizer)
        except UsageError:  # one that was written by hand
            groups = getattr(optimizer, "_param_groups", None) or ()
    else:
        groups = getattr(optimizer, "param_groups", None) or ()
    for group in groups:
        yield from group["params"] if isinstance(group, dict) else (group,)


def few_elements(framework: Framework, tensor: Any) -> bytes:
    """The bytes of a few elements, brought from the device if they are there."""
    if in_host_memory(tensor):
        return probe(framework.host(tensor))
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # no rank waits for the others
    flat = local.detach().reshape([-1])
    return probe(framework.host(flat[:: max(1, int(flat.shape[0]) // _FROM_DEVICE | 1)]))


def in_host_memory(tensor: Any) -> bool:
    """Whether a few elements can be looked at without waiting for a device."""
    if (place := getattr(tensor, "place", None)) is not None:
        return bool(place.is_cpu_place())
    return bool(tensor.device.type == "cpu")


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return tuple(int(size) for size in shape) if isinstance(shape, (tuple, list)) else None


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else "…"
