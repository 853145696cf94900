"""Warnings about likely mistakes with a model's tensors. Each names the consequence and the remedy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tensortap.frameworks.ownership import Ownership
from tensortap.model.inspect.tensors import HiddenModule, InspectedModel, InspectedTensor

__all__ = ["InspectionWarning", "find_warnings"]

_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class InspectionWarning:
    """One likely mistake. `str()` returns the sentence."""

    code: str
    """Stable identifier for programs: plain-attribute, hidden-modules, in-no-group, ..."""
    text: str
    names: tuple[str, ...] = ()
    """Names of all tensors concerned."""

    def __str__(self) -> str:
        return self.text


def find_warnings(found: InspectedModel, ownership: Ownership, with_optimizer: bool) -> list[InspectionWarning]:
    """Return all warnings about a model; those about training need the optimizer."""
    result = [*_warn_unregistered(found, ownership), *_warn_hidden_modules(found, ownership), *_warn_saving(found)]
    if with_optimizer:
        result += _warn_training(found, ownership)
    lazy = [tensor for tensor in found.tensors if not tensor.initialised]
    if lazy:
        result.append(
            _warning(
                "uninitialised",
                lazy,
                lambda n: "has no values yet" if n == 1 else "have no values yet",
                "run one forward first, then count, save or compare",
            )
        )
    if meta := [tensor for tensor in found.tensors if tensor.device == "meta"]:
        result.append(
            _warning(
                "no-values",
                meta,
                lambda n: "is on the meta device" if n == 1 else "are on the meta device",
                "no values, and .to() raises; use to_empty() and initialise, or load_state_dict(..., assign=True)",
            )
        )
    return result


def _warn_unregistered(found: InspectedModel, ownership: Ownership) -> Iterator[InspectionWarning]:
    plain = [tensor for tensor in found.tensors if tensor.kind == "attribute" and not tensor.hidden_in]
    stale = [tensor for tensor in plain if tensor.shared_with and not tensor.is_parameter]
    unshared = [tensor for tensor in plain if tensor not in stale]
    if weights := [tensor for tensor in unshared if tensor.is_parameter]:
        yield _warning(
            "plain-parameter",
            weights,
            lambda n: (
                "is a Parameter in a plain attribute"
                if n == 1
                else "are Parameters in plain lists, dicts or attributes"
            ),
            "not in parameters(), so not trained, not saved by state_dict(), not moved by .to(); "
            f"use a {ownership.parameter_containers}",
        )
    if others := [tensor for tensor in unshared if not tensor.is_parameter]:
        yield _warning(
            "plain-attribute",
            others,
            lambda n: "is a plain tensor attribute" if n == 1 else "are plain tensor attributes",
            "not saved by state_dict(), not moved by .to(); use register_buffer(), or a Parameter to train",
        )
    if stale:
        yield _warning(
            "attribute-shares",
            stale,
            lambda n: (
                "is a plain attribute on memory that is registered elsewhere"
                if n == 1
                else "are plain attributes on memory that is registered elsewhere"
            ),
            "after .to() this may still be the old tensor",
        )


def _warn_hidden_modules(found: InspectedModel, ownership: Ownership) -> Iterator[InspectionWarning]:
    by_attribute: dict[tuple[str, str], list[HiddenModule]] = defaultdict(list)
    for hidden in found.hidden:
        by_attribute[hidden.attribute, hidden.container].append(hidden)
    for (attribute, container), modules in by_attribute.items():
        tensors = [tensor for hidden in modules for tensor in hidden.tensors]
        elements = sum(tensor.elements for tensor in tensors if tensor.is_parameter)
        what = f"a plain {container}" if container in ("list", "dict", "tuple") else "an unregistered attribute"
        untrained = "" if any(tensor.groups for tensor in tensors) else ", not trained"
        remedy = ownership.module_dict if container == "dict" else ownership.module_list
        yield InspectionWarning(
            "hidden-modules",
            f"{attribute} is {what} with {len(modules)} module{'s' * (len(modules) > 1)} ({elements:,} parameters) "
            f"that the model does not see: not saved, not moved{untrained}, not in train() or eval(); use {remedy}",
            tuple(tensor.name for tensor in tensors),
        )


def _warn_saving(found: InspectedModel) -> Iterator[InspectionWarning]:
    tensors = found.tensors
    if found.state_dict_error:
        yield InspectionWarning(
            "no-state-dict",
            f"state_dict() raised ({found.state_dict_error}): saved keys are inferred from registrations",
        )
    if twice := [tensor for tensor in tensors if len(tensor.saved_as) > 1]:
        keys = " and ".join(twice[0].saved_as[:_MAX_NAMED])
        yield InspectionWarning(
            "saved-twice",
            f"{_join_names(twice)} {'is' if len(twice) == 1 else 'are'} tied and saved under every name ({keys}): "
            "on loading the last key wins, a strict load wants all of them, and formats without "
            "shared tensors (safetensors) refuse",
            tuple(tensor.name for tensor in twice),
        )
    # A custom state_dict may leave out a parameter silently.
    if not found.state_dict_error:
        unsaved = [tensor for tensor in tensors if tensor.kind in ("parameter", "buffer") and not tensor.saved_as]
        if unsaved:
            yield _warning(
                "not-saved",
                unsaved,
                lambda n: "is registered, but not in the state_dict" if n == 1 else "are registered, but not saved",
                "left out by the model's own state_dict()",
            )


def _warn_training(found: InspectedModel, ownership: Ownership) -> Iterator[InspectionWarning]:
    parameters = [tensor for tensor in found.tensors if tensor.kind == "parameter" and not tensor.statistics]
    if ungrouped := [tensor for tensor in parameters if tensor.requires_grad and not tensor.groups]:
        yield _warning(
            "in-no-group",
            ungrouped,
            lambda n: "is in no group of the optimizer" if n == 1 else "are in no group of the optimizer",
            f"no step changes what takes gradients here, and optimizer.{ownership.clearing} does not clear them; "
            f"add to a group, or freeze ({ownership.freezing})",
        )
    if twice := [tensor for tensor in parameters if len(tensor.groups) > 1]:
        yield _warning(
            "in-two-groups",
            twice,
            lambda n: "is in more than one place of the optimizer" if n == 1 else "are in more than one place of it",
            "updated more than once by each step",
        )
    if frozen := [tensor for tensor in parameters if tensor.groups and not tensor.requires_grad]:
        yield _warning(
            "frozen-in-optimizer",
            frozen,
            lambda n: "is frozen, but in the optimizer" if n == 1 else "are frozen, but in the optimizer",
            "no gradient comes, but one that is left from before is applied at every step",
        )
    if found.foreign_tensors:
        many = found.foreign_tensors > 1
        yield InspectionWarning(
            "not-in-model",
            f"the optimizer holds {found.foreign_tensors} tensor{'s' * many} that {'are' if many else 'is'} not in "
            "this model: another model's, or replaced after the optimizer was made",
        )


def _warning(
    code: str, tensors: Sequence[InspectedTensor], what: Callable[[int], str], consequence: str
) -> InspectionWarning:
    text = f"{_join_names(tensors)} {what(len(tensors))}: {consequence}"
    return InspectionWarning(code, text, tuple(tensor.name for tensor in tensors))


def _join_names(tensors: Iterable[InspectedTensor]) -> str:
    names = [tensor.name for tensor in tensors]
    if len(names) <= _MAX_NAMED:
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{', '.join(names[: _MAX_NAMED - 1])} and {len(names) - _MAX_NAMED + 1} more"
