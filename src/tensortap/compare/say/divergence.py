"""The sentence about a divergence, by the cause of its first birth. `core.causes` has the wording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import NamedTuple

from tensortap.compare.judge.rules.names import SAME_MASK
from tensortap.compare.say.formatting import listed, rounded
from tensortap.core.causes import CAUSES, OUTSIDE_CAUSES, PARAMETER_CAUSES, UNCALLED, Cause, CauseWording
from tensortap.core.records import Finding, Key, display_name

__all__ = ["ComparedTensor", "describe_divergence", "describe_isolated", "forward_agrees", "layout_slots"]

_MOST_NAMED = 8
_MOST_UNJUDGED = 2
_PARTS = {"grad_input": "input", "grad_output": "output", "param_grad": "parameter"}
_RECORDS = {
    "param": "parameter {path}",
    "buffer": "buffer {path}",
    "param_grad": "the gradient of {path}",
    "step_grad": "the gradient of {path} that the optimizer uses",
    "grad_output": "the gradient at its output {path}",
    "grad_input": "the gradient at its input {path}",
    "input": "its input {path}",
    "output": "its output {path}",
}


class ComparedTensor(NamedTuple):
    """One side's tensor, as far as a sentence describes it."""

    shape: tuple[int, ...]
    nonfinite: int
    """Number of NaN and Inf among its elements."""
    l2: float = float("nan")
    """The norm of its finite elements."""


def describe_divergence(
    births: Sequence[Finding],
    tensors: tuple[ComparedTensor, ComparedTensor] | None,
    several: bool,
    forward: str,
    candidate: str = "the candidate",
    ran_alike: bool = True,
) -> str:
    """Say where the runs part, by the cause of the first birth.

    tensors: the two tensors of the first birth; None if only one side has it.
    several: whether several ranks took part.
    forward: what `forward_agrees` says about the forward pass; empty if nothing of it was recorded.
    candidate: the name of the other side where its names differ.
    ran_alike: whether both ran the steps so far equally often.
    """
    first = births[0]
    wording, where = CAUSES[first.cause], _where(first, several)
    known = [first.cls] if first.cls and first.container is None else []
    known += [f"{first.counterpart} in {candidate}"] if first.counterpart is not None else []
    others = sum(birth.cause is first.cause for birth in births) - 1
    elsewhere = f" ({display_name(first.module)} is {first.counterpart} in {candidate})"
    slots = _slots(first, where, tensors) | {
        "name": display_name(first.module) + (f" ({'; '.join(known)})" if known else ""),
        "full": _full(first) + (f" ({known[-1]})" if first.counterpart is not None else ""),
        "agrees": f"{forward}; the" if forward else "The",
        "forward": forward,
        "but_in": f"{forward}, but in {where}" if forward else f"In {where}",
        "more": f" and {others:,} more" if others else "",
        "it": "the first" if others else "it",
        "start": f"step {first.key.step}, the first that takes part" if first.key.step else "the first step",
        "cut_by": _cut_by(first),
        "elsewhere": elsewhere if first.counterpart is not None else "",
        "sources": _sources(first, wording, ran_alike),
        **layout_slots(first),
    }
    return wording.sentence.format(**slots)


def describe_isolated(
    births: Sequence[Finding], tensors: tuple[ComparedTensor, ComparedTensor] | None, several: bool
) -> str:
    """Say which modules are wrong on the reference's own inputs, and what shows the first of them."""
    first = births[0]
    wording, where = CAUSES[first.cause], _where(first, several)
    slots = _slots(first, where, tensors)
    slots["name"] = display_name(first.module) + (f" ({first.cls})" if first.cls and first.container is None else "")
    slots["full"] = _full(first)
    slots["sent"] = f"the gradient at its input {first.key.path}"
    if first.key.kind == "grad_output":
        slots["sent"] = f"the gradient that {slots['name']} sends back to {slots['target']}"
    slots |= layout_slots(first)
    slots["clause"] = wording.isolated.format(**slots)
    slots["more"] = _more_modules(births)
    verdict = wording.isolated_verdict.format(**slots)
    about_parameters = first.cause in PARAMETER_CAUSES
    other_cause = first.cause if first.cause is Cause.EXTRA_GRADIENT else None
    elsewhere = PARAMETER_CAUSES | OUTSIDE_CAUSES
    modules = _modules(b for b in births if b.cause not in elsewhere and b.cause is not other_cause)
    named = listed(modules, _MOST_NAMED)
    if about_parameters or other_cause is not None or first.cause in OUTSIDE_CAUSES:
        return verdict + (f" Wrong on the reference's own inputs: {named}." if modules else "")
    too = " The update of parameters is wrong, too." if any(birth.cause is Cause.OPTIMIZER for birth in births) else ""
    if len(modules) == 1:
        return verdict + too
    about = "{} modules are wrong on the reference's own inputs: {}. In {}, {}."
    return about.format(len(modules), named, slots["name"], slots["clause"]) + too


def forward_agrees(unjudged: bool) -> str:
    """Say that nothing is wrong in a forward pass, parts of which may be unjudged."""
    return "The forward pass agrees" + " as far as it could be judged" * unjudged


def layout_slots(finding: Finding) -> dict[str, str]:
    """Return what the wording of causes of parallel layouts may name."""
    fact = finding.layout
    if fact is None:
        return {}
    key, many = finding.key, len(fact.ranks) > 1
    record = _RECORDS.get(key.kind, "{path}").format(path=key.path)
    if finding.status in ("replica", "layout"):  # the sentence does not begin with the module
        record = f"{display_name(key.module)} {key.kind} {key.path}"
        record = _full(finding) if key.kind in ("param", "buffer") else record
    elif key.kind == "grad_output" and finding.container is not None:
        record = f"the gradient that it sends back to {display_name(key.module)}"
    backward = key.phase == "backward" or key.kind == "step_grad"
    return {
        "axis": fact.axis or "parallel",
        "ranks": f"{'Ranks' if many else 'Rank'} {listed(fact.ranks)}",
        "verb": "differ" if many else "differs",
        "since": "since step",
        "count": f"{fact.count:,}",
        "fact": fact.words,
        "record": record,
        "pass": " in backward" if backward else "",
    }


def _slots(first: Finding, where: str, tensors: tuple[ComparedTensor, ComparedTensor] | None) -> dict[str, str]:
    """Return what the wording of every cause may name."""
    key = first.key
    module = display_name(key.module)
    return {
        "where": where,
        "step": str(key.step),
        "module": module,
        "path": key.path,
        "off": "" if tensors is None else _off(first, tensors),
        "entered": "the model" if not first.module else display_name(first.module),
        "target": f"{module}'s output" if key.kind == "grad_output" else f"its input {key.path}",
        "part": _PARTS.get(key.kind, ""),
        "value": f"{key.kind} {key.path}" + (f" of {module}" if first.container is not None else ""),
    }


def _cut_by(first: Finding) -> str:
    """Say which code is why a gradient never comes, if it is that of another module."""
    if first.container is None:
        return ""
    does = f"never calls {display_name(first.key.module)}" if first.rule == UNCALLED else "cuts it off"
    return f": {display_name(first.module)} {does}"


def _more_modules(births: Sequence[Finding]) -> str:
    """Say how many more modules the cause of the first birth is found at."""
    cause = births[0].cause
    if cause is Cause.EXTRA_GRADIENT:
        others = len(_modules(birth for birth in births if birth.cause is cause)) - 1
        return f"; so it is with {others} more module{'s' * (others > 1)}" if others else ""
    if cause in PARAMETER_CAUSES and cause is not Cause.OPTIMIZER:
        before = PARAMETER_CAUSES - {Cause.OPTIMIZER}
        others = len({_full(birth) for birth in births if birth.cause in before}) - 1
        return f"; so do parameters of {others} more module{'s' * (others > 1)}" if others > 0 else ""
    return ""


def _where(first: Finding, several: bool) -> str:
    key = first.key
    rank, micro = f", rank {first.rank}" * several, f", micro step {key.micro}" * bool(key.micro)
    if key.phase == "eval":
        micro = f", forward {key.micro} of the evaluation before it"
    return f"step {key.step}{rank}{micro}"


def _sources(first: Finding, wording: CauseWording, ran_alike: bool) -> str:
    """Say whether the sources of a value match. Sources that could not be judged never count as a match."""
    matches = wording.sources_match if ran_alike else wording.sources_match_so_far or wording.sources_match
    if not first.unjudged:
        return matches if first.inputs_matched else wording.sources_unrecorded
    unjudged = listed([_source(first, key) for key in first.unjudged], _MOST_UNJUDGED)
    if first.inputs_matched is None:
        return f"and {unjudged} could not be judged"
    return f"{matches}, except {unjudged}, which could not be judged"


def _source(first: Finding, key: Key) -> str:
    words = {"grad_output": "the gradient at output", "grad_input": "the gradient at input"}
    words |= {"param": "parameter", "param_grad": "the gradient of", "step_grad": "the optimizer's gradient of"}
    of = f" of {display_name(key.module)}" if key.module != first.key.module else ""
    return f"{words.get(key.kind, key.kind)} {key.path}{of}"


def _modules(births: Iterable[Finding]) -> list[str]:
    return list(dict.fromkeys(display_name(birth.module) for birth in births))


def _full(finding: Finding) -> str:
    name = finding.key.module
    return f"{name}.{finding.key.path}" if name else finding.key.path


def _off(finding: Finding, tensors: tuple[ComparedTensor, ComparedTensor]) -> str:
    ours, theirs = tensors
    if finding.rule == SAME_MASK and finding.difference is not None:
        differing, elements = finding.difference.l2**2, finding.difference.elements
        about = "" if finding.difference.exact else "about "
        return f"hides other elements than the reference's ({about}{differing:,.0f} of {elements:,} differ)"
    if finding.status == "shape":
        before, now = ("×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)
        return f"has the shape {now} instead of {before}"
    if finding.status == "nonfinite" and ours.nonfinite > theirs.nonfinite:
        return "is finite where the reference's is not"
    if finding.status == "nonfinite" and ours.nonfinite == theirs.nonfinite:
        return f"has other NaN or Inf than the reference's, which has {ours.nonfinite:,} itself"
    if finding.status == "nonfinite":
        return "is not finite where the reference's is"
    if finding.rel_l2 == float("inf") and ours.l2 == 0:
        return "is not zero where the reference's is"
    if not isfinite(finding.rel_l2):
        return "differs by more than can be measured"
    if finding.only_a_row and finding.difference is not None:
        row = ", ".join(map(str, finding.difference.row_index or ()))
        return f"is off by {rounded(finding.difference.row_rel_l2)} (relative L2) in its row [{row}]"
    if finding.rel_l2 <= finding.tolerance:
        return f"is off by {rounded(finding.rel_l2)} (relative L2), most of it as if it were scaled"
    about = "" if finding.difference is None or finding.difference.exact else "about "
    if finding.difference is not None and finding.difference.rel_l2_bar == float("inf"):
        about = "at least "
    return f"is off by {about}{rounded(finding.rel_l2)} (relative L2)"
