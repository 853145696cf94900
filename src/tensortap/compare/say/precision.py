"""Sentences about a truth: which side is less exact, and which one is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tensortap.compare.say.formatting import listed, rounded
from tensortap.core.causes import CAUSES
from tensortap.core.records import Finding, TruthErrors, display_name

__all__ = ["describe_doubtful", "describe_hidden", "describe_less_exact", "describe_truth", "describe_without_truth"]

_MOST_NAMED = 4
_MANY_ROUNDINGS = 8
_CLEAR = 2.0
"""From this ratio on, one side is named as the one that is wrong."""
_CHECK = '`tensortap.check(model, reference, truth="float64")`'
_AGREES, _FEW_ROUNDINGS = 10.0, 16.0


def describe_less_exact(findings: Sequence[Finding], several: bool) -> str:
    """Say which module is less exact than the reference's, by how many roundings, and how many more there are."""
    first = findings[0]
    key, truth = first.key, first.truth
    assert truth is not None
    owner = display_name(first.module)
    name = f"The own code of {owner}" if first.container is not None else owner + (f" ({first.cls})" * bool(first.cls))
    value = _value(first)
    where = f"step {key.step}" + f", rank {first.rank}" * several
    text = CAUSES[first.cause].sentence.format(
        name=name, how=_roundings(truth), where=where, value=value, truth=truth.of, distances=_distances(truth)
    )
    others = list(dict.fromkeys(display_name(each.module) for each in findings[1:] if each.module != first.module))
    if others:
        text += f" So {'are' if len(others) > 1 else 'is'} {listed(others, _MOST_NAMED)}."
    return text


def describe_doubtful(findings: Sequence[Finding], several: bool, isolated: bool) -> str:
    """Say that modules are less exact, and that another implementation would be, too."""
    advice = (
        "the gradients of its inputs tell them apart: capture the reference with `grad_output`, and run the backward"
        if isolated
        else f"{_CHECK} tells them apart"
    )
    return (
        f"Cannot tell a mistake from another implementation. {describe_less_exact(findings, several)} Eager attention "
        f"instead of fused does so, and so does a softmax that is not upcast; {advice}."
    )


def _value(finding: Finding) -> str:
    """Name the value that is less exact."""
    key = finding.key
    if finding.container is None or key.kind == "param_grad":
        of = "" if finding.container is None else f" of {display_name(key.module)}"
        return f"{'the' if of else 'its'} {key.kind} {key.path}{of}"
    if key.kind == "grad_output":
        return f"the gradient that it sends back to {display_name(key.module)} (grad_output {key.path})"
    return f"what it passes to {display_name(key.module)} (input {key.path})"


def describe_truth(truth: TruthErrors | None) -> str:
    """Return a further sentence about a wrong value: which side is further from the truth."""
    if truth is None or math.isnan(truth.ratio):
        return ""
    ours, theirs = rounded(truth.reference), rounded(truth.candidate)
    if truth.ratio >= _CLEAR:
        if truth.of_reference is False and _reference_agrees(truth):
            return (
                f" In {truth.of} the same code gives the reference's result to {ours}, and this one only to {theirs}: "
                "the candidate loses precision."
            )
        return f" The candidate is the one at fault: it is {theirs} from the {truth.of} result, the reference {ours}."
    if truth.ratio * _CLEAR <= 1:
        if truth.of_reference is False:
            return (
                f" In {truth.of} its code gives the same to {theirs}, and the reference is {ours} away: the two "
                "compute different things, or the reference is the less exact one."
            )
        return f" The reference is the one at fault: it is {ours} from the {truth.of} result, the candidate {theirs}."
    return f" Both are about as far from the {truth.of} result ({ours} and {theirs})."


def describe_without_truth(modules: Sequence[str]) -> str:
    """Say which modules differ within tolerance and were not measured against a truth."""
    names = listed([display_name(each) for each in modules], _MOST_NAMED)
    return f"Whether {names} round{'s' * (len(modules) == 1)} more than the reference is not judged: no truth."


def describe_hidden(modules: Sequence[str]) -> str:
    """Say in which modules of free runs a rounding more would not show."""
    names = listed([display_name(each) for each in modules], _MOST_NAMED)
    return (
        f"Whether {names} round{'s' * (len(modules) == 1)} once more than the reference would not show: the errors "
        f"that came in are larger. {_CHECK} judges each module alone."
    )


def _reference_agrees(truth: TruthErrors) -> bool:
    """Whether the reference is as near to the truth as rounding allows."""
    if truth.roundings > 0:
        one_rounding = (truth.candidate**2 - truth.reference**2) / truth.roundings
        return truth.reference**2 <= _FEW_ROUNDINGS * one_rounding
    return truth.reference * _AGREES <= truth.candidate


def _roundings(truth: TruthErrors) -> str:
    if 0.5 <= truth.roundings < 1.5:
        return "rounds about once more than"
    if 1.5 <= truth.roundings < _MANY_ROUNDINGS:
        return f"rounds about {round(truth.roundings)} times more than"
    return "is less exact than"


def _distances(truth: TruthErrors) -> str:
    about = "" if truth.exact else "about "
    times = "" if math.isinf(truth.ratio) else f", {about}{truth.ratio:.2g} times as far"
    ours, theirs = rounded(truth.reference), rounded(truth.candidate)
    return f"{about}{theirs} from the {truth.of} result, the reference's {ours}{times}"
