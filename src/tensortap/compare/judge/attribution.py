"""Attribute a wrong record to the module whose code made it."""

from __future__ import annotations

from dataclasses import dataclass

from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import GRADIENT_KINDS, WRONG_STATUSES

__all__ = ["Attribution", "attribute"]

_RELEVANT_SOURCES = {
    "param": ("param_grad", "step_grad"),
    "step_grad": ("param_grad",),
    "param_grad": ("grad_output",),
    "grad_input": GRADIENT_KINDS,
    "grad_output": GRADIENT_KINDS,
}
"""By kind of a record: the kinds of its sources that `inputs_matched` is about; all of them if it is not here."""


@dataclass(frozen=True)
class Attribution:
    """The module that made a wrong row, and facts about the row's sources."""

    container: str | None
    """The module to blame; None is the record's own."""
    inputs_matched: bool | None
    """Whether the sources are right; None if none was recorded, or none could be judged."""
    unjudged: tuple[int, ...] = ()
    """Rows of sources that could not be judged."""
    hands_on: bool = False
    """Whether `container` made an input of another module as its output, which was not recorded."""
    from_outside: bool = False
    """Whether code outside the model, such as the loss, made the gradient."""


def attribute(row: int, structure: Structure, judgement: Judgement) -> Attribution:
    """Attribute a wrong row to the module whose own code made it."""
    kind = structure.kind[row]
    call = structure.call_of(row)
    if kind == "input":
        caller = call.parent if call is not None else None
        if caller is None:
            return Attribution(None, None)
        return Attribution(caller.module, *_judge_sources(row, structure, judgement))
    if kind == "grad_output" and structure.at_root(row) is not None:
        return Attribution(None, None, from_outside=True)
    if kind == "grad_output" and call is not None:
        outer = structure.outermost(row, call)
        if outer.parent is None and not structure.users(row, call):  # like the root's: the loss made it
            return Attribution(outer.module, None, from_outside=True)
        return Attribution(_find_sender(row, call, structure, judgement), *_judge_sources(row, structure, judgement))
    return Attribution(None, *_judge_sources(row, structure, judgement))


def _judge_sources(row: int, structure: Structure, judgement: Judgement) -> tuple[bool | None, tuple[int, ...]]:
    """Return whether the sources of a row are right, None if none could be judged; and those that could not be."""
    sources, relevant = structure.sources(row), _RELEVANT_SOURCES.get(structure.kind[row])
    if relevant is not None:
        sources = [source for source in sources if structure.kind[source] in relevant]
    unjudged = {structure.tensor[s]: s for s in reversed(sources) if judgement.status[s] == "unjudged"}
    judged = any(judgement.status[source] != "unjudged" for source in sources)
    return True if judged else None, tuple(reversed(unjudged.values()))


def _find_sender(row: int, call: CallRows, structure: Structure, judgement: Judgement) -> str | None:
    """Return the module whose backward made the gradient at a call's output."""
    users = [user for user in structure.users(row, call) if user.of("grad_output", "grad_input")]
    if not users:
        around = structure.outermost(row, call).parent
        return None if around is None else around.module
    wrong = [user for user in users if any(_is_wrong(r, judgement) for r in _own_gradients(user, structure))]
    if len(wrong) == 1:
        return wrong[0].module
    # A module whose own parameters got the right gradient has most likely sent the right one back, too. The rest is
    # the code of the container, which used the same value as well.
    clean = [user for user in users if _own_gradients(user, structure) and user not in wrong]
    suspects = [user for user in users if user not in clean]
    if len(suspects) == 1:
        return suspects[0].module
    return _find_container(row, call, structure, judgement)


def _find_container(row: int, call: CallRows, structure: Structure, judgement: Judgement) -> str:
    """Return the innermost module around all users of a call's output. Skip those that were given that output
    themselves and are known to have sent the right gradient back."""
    users, tensors = structure.users(row, call), structure.returned(row, call)
    named = _innermost_common([user.parent for user in users])
    around = next((user.parent for user in users if user.parent is not None and user.parent.module == named), None)
    while around is not None and around.parent is not None:
        paths = {structure.path[r] for r in around.of("input") if structure.tensor[r] in tensors}
        sent = [r for r in around.of("grad_input") if structure.path[r] in paths]
        if not sent or any(_is_wrong(r, judgement) for r in sent):
            break
        around = around.parent
        named = around.module
    return named


def _own_gradients(call: CallRows, structure: Structure) -> list[int]:
    return structure.own_gradients.get((call.scope, call.module), []) + call.of("grad_input")


def _is_wrong(row: int, judgement: Judgement) -> bool:
    return judgement.status[row] in WRONG_STATUSES


def _innermost_common(calls: list[CallRows | None]) -> str:
    """Return the name of the innermost module around all of these calls, or of the only one."""
    names = [call.module if call is not None else "" for call in calls]
    parts = [name.split(".") if name else [] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) if len(names) > 1 else names[0]
