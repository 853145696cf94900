"""Changes of a training. A module keeps its name and class, and no random number is drawn.

Most mistakes are an edit of a method's source, as a person would make it: `edits("model", "old code", "new code")`.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from support.training_changes import Apply, both, does, has, holds, reads, regroups, trains

from .running import Training, usual_groups

__all__ = [
    "Apply", "attends", "both", "does", "edits", "has", "holds", "optimizes", "reads", "returns", "told", "trains",
    "untied", "uses",
]  # fmt: skip

Change = Callable[[Tensor], Tensor]


def edits(module: str, old: str, new: str, method: str = "forward", **names: Any) -> Apply:
    """Replace a part of the source of a module's method. `names` are further globals, or others than the module's."""

    def apply(training: Training) -> None:
        target = training.model.get_submodule(module)
        setattr(target, method, MethodType(_edited(getattr(type(target), method), old, new, names), target))

    return apply


def _edited(function: Any, old: str, new: str, names: dict[str, Any]) -> FunctionType:
    plain = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(plain))
    if source.count(old) != 1:
        raise ValueError(f"{plain.__qualname__} has {source.count(old)} times the code {old!r}")
    scope = {**vars(sys.modules[plain.__module__]), "auto_docstring": _undocumented, **names}
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), "<edited>", "exec"), scope)
    made: FunctionType = scope[plain.__name__]
    return made


def _undocumented(decorated: Any = None, **_: Any) -> Any:
    """Stands for transformers' decorator, with or without options."""
    return _undocumented if decorated is None else decorated


def uses(module: str, method: str = "forward", **names: Any) -> Apply:
    """A module's method finds other functions under these global names."""
    return edits(module, f"def {method}(", f"def {method}(", method, **names)


def returns(module: str, change: Change) -> Apply:
    """Change what a module returns; of several values, the first."""

    def apply(training: Training) -> None:
        target = training.model.get_submodule(module)
        inner = target.forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

        target.forward = MethodType(forward, target)

    return apply


class _Attention:
    """Stands for transformers' table of attention functions: each is called with changed arguments."""

    def __init__(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.change = change

    def get_interface(self, implementation: str, default: Any) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        inner = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, default)

        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **o: Any
        ) -> Any:
            call = {"query": query, "key": key, "value": value, "attention_mask": attention_mask, **o}
            return inner(module, **(call | self.change(call)))

        return attention


def attends(module: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Apply:
    """Change the arguments of the attention function that a module calls, whichever implementation it is."""
    return uses(module, ALL_ATTENTION_FUNCTIONS=_Attention(change))


def told(module: str, method: str, *arguments: Any) -> Apply:
    """Call a method of the module beforehand: eval(), requires_grad_(False)."""

    def apply(training: Training) -> None:
        getattr(training.model.get_submodule(module), method)(*arguments)

    return apply


def untied(module: str) -> Apply:
    """The module gets a weight of its own."""

    def apply(training: Training) -> None:
        target = training.model.get_submodule(module)
        target.weight = nn.Parameter(target.weight.detach().clone())

    return apply


def optimizes(matters: Callable[[str, nn.Parameter], bool], options: dict[str, float] | None) -> Apply:
    """Some parameters get other options; with None, the optimizer does not get them."""
    return regroups(usual_groups, matters, options)
