"""What is usually a mistake about a model's tensors, in words. Each says what follows from it and what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tensortap.frameworks.ownership import Ownership
from tensortap.model.inspect.tensor_facts import Gathered, TensorFacts

__all__ = ["Concern", "concerns"]

_NAMED = 3


@dataclass(frozen=True, slots=True)
class Concern:
    """One likely mistake. `str()` is the sentence."""

    code: str
    """Stable, for programs: plain-attribute, hidden-modules, in-no-group, ..."""
    text: str
    names: tuple[str, ...] = ()
    """The tensors it is about, all of them."""

    def __str__(self) -> str:
        return self.text


def concerns(found: Gathered, ownership: Ownership, with_optimizer: bool) -> list[Concern]:
    tensors = [entry for module in found.modules for entry in module.tensors]
    result = [*_unseen(found, tensors, ownership), *_saving(found, tensors, ownership)]
    if with_optimizer:
        result += _training(found, tensors, ownership)
    lazy = [entry for entry in tensors if not entry.initialised]
    if lazy:
        result.append(
            _concern(
                "uninitialised",
                lazy,
                lambda n: "has no values yet" if n == 1 else "have no values yet",
                "run one forward first, then count, save or compare",
            )
        )
    return result


def _unseen(found: Gathered, tensors: Sequence[TensorFacts], ownership: Ownership) -> Iterator[Concern]:
    plain = [entry for entry in tensors if entry.kind == "attribute" and not entry.hidden_in]
    stale = [entry for entry in plain if entry.shared_with and not entry.is_parameter]
    lone = [entry for entry in plain if entry not in stale]
    if weights := [entry for entry in lone if entry.is_parameter]:
        yield _concern(
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
    if rest := [entry for entry in lone if not entry.is_parameter]:
        yield _concern(
            "plain-attribute",
            rest,
            lambda n: "is a plain tensor attribute" if n == 1 else "are plain tensor attributes",
            "not saved by state_dict(), not moved by .to(); use register_buffer(), or a Parameter to train",
        )
    if stale:
        yield _concern(
            "attribute-shares",
            stale,
            lambda n: (
                "is a plain attribute on memory that is registered elsewhere"
                if n == 1
                else "are plain attributes on memory that is registered elsewhere"
            ),
            "after .to() this may still be the old tensor",
        )
    by_attribute: dict[tuple[str, str], list[TensorFacts]] = defaultdict(list)
    count: dict[tuple[str, str], int] = defaultdict(int)
    for hidden in found.hidden:
        by_attribute[hidden.attribute, hidden.container] += hidden.tensors
        count[hidden.attribute, hidden.container] += 1
    for (attribute, container), inside in by_attribute.items():
        how = f"a plain {container}" if container in ("list", "dict", "tuple") else "an unregistered attribute"
        trained = any(entry.groups for entry in inside)
        modules = f"{count[attribute, container]} module{'s' * (count[attribute, container] > 1)}"
        listed = ownership.module_dict if container == "dict" else ownership.module_list
        yield Concern(
            "hidden-modules",
            f"{attribute} is {how} with {modules} ({sum(e.elements for e in inside if e.is_parameter):,} parameters) "
            f"that the model does not see: not saved, not moved{'' if trained else ', not trained'}, "
            f"not in train() or eval(); use {listed}",
            tuple(entry.name for entry in inside),
        )


def _saving(found: Gathered, tensors: Sequence[TensorFacts], ownership: Ownership) -> Iterator[Concern]:
    if found.state_dict_error:
        yield Concern(
            "no-state-dict",
            f"state_dict() could not be asked ({found.state_dict_error}): what is saved is told from the rules",
        )
    if twice := [entry for entry in tensors if len(entry.saved_as) > 1]:
        keys = " and ".join(twice[0].saved_as[:_NAMED])
        yield Concern(
            "saved-twice",
            f"{_listed(twice)} {'is' if len(twice) == 1 else 'are'} tied and saved under every name ({keys}): "
            "on loading the last key wins, a strict load wants all of them, and formats without "
            "shared tensors (safetensors) refuse",
            tuple(entry.name for entry in twice),
        )
    # A parameter that a custom state_dict leaves out is lost in silence.
    if not found.state_dict_error:
        lost = [entry for entry in tensors if entry.kind in ("parameter", "buffer") and not entry.saved_as]
        if lost:
            yield _concern(
                "not-saved",
                lost,
                lambda n: "is registered, but not in the state_dict" if n == 1 else "are registered, but not saved",
                "left out by the model's own state_dict()",
            )


def _training(found: Gathered, tensors: Sequence[TensorFacts], ownership: Ownership) -> Iterator[Concern]:
    parameters = [entry for entry in tensors if entry.kind == "parameter" and not entry.statistics]
    if missed := [entry for entry in parameters if entry.requires_grad and not entry.groups]:
        yield _concern(
            "in-no-group",
            missed,
            lambda n: "is in no group of the optimizer" if n == 1 else "are in no group of the optimizer",
            f"no step changes what takes gradients here, and optimizer.{ownership.clearing} does not clear them; "
            f"add to a group, or freeze ({ownership.freezing})",
        )
    if twice := [entry for entry in parameters if len(entry.groups) > 1]:
        yield _concern(
            "in-two-groups",
            twice,
            lambda n: "is in more than one place of the optimizer" if n == 1 else "are in more than one place of it",
            "updated more than once by each step",
        )
    if frozen := [entry for entry in parameters if entry.groups and not entry.requires_grad]:
        yield _concern(
            "frozen-in-optimizer",
            frozen,
            lambda n: "is frozen, but in the optimizer" if n == 1 else "are frozen, but in the optimizer",
            "no gradient comes, but one that is left from before is applied at every step",
        )
    if found.strangers:
        many = found.strangers > 1
        yield Concern(
            "not-in-model",
            f"the optimizer holds {found.strangers} tensor{'s' * many} that {'are' if many else 'is'} not in this "
            "model: another model's, or replaced after the optimizer was made",
        )


def _concern(code: str, entries: Sequence[TensorFacts], what: Callable[[int], str], follows: str) -> Concern:
    text = f"{_listed(entries)} {what(len(entries))}: {follows}"
    return Concern(code, text, tuple(entry.name for entry in entries))


def _listed(entries: Iterable[TensorFacts]) -> str:
    names = [entry.name for entry in entries]
    if len(names) <= _NAMED:
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{', '.join(names[: _NAMED - 1])} and {len(names) - _NAMED + 1} more"
