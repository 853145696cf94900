"""The verdict as a sentence. `core.causes` has the wording by cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from tensortap.compare.judge.rules import SAME_MASK
from tensortap.core.arguments import ABSENT, ArgumentDifference, in_words
from tensortap.core.causes import CAUSES, OUTSIDE_CAUSES, PARAMETER_CAUSES, UNCALLED, Cause, CauseWording
from tensortap.core.records import Finding, Key, display_name

__all__ = [
    "ComparedTensor",
    "about_selection",
    "describe_call",
    "describe_divergence",
    "describe_hidden_optimizer",
    "describe_isolated",
    "describe_large",
    "describe_match",
    "describe_moved_parameters",
    "describe_none_judged",
    "describe_open",
    "describe_open_ties",
    "describe_other_arguments",
    "describe_other_steps",
    "describe_read_hidden",
    "describe_rounding_alone",
    "describe_too_little",
    "describe_undecided",
    "describe_unrelated",
    "describe_unseen_parameters",
    "describe_unseen_start",
    "describe_unsupported",
    "describe_worst",
    "forward_agrees",
    "layout_slots",
    "listed",
    "rounded",
    "ways_to_tell",
]

_MOST_NAMED = 8
_MOST_ARGUMENTS = 3
_MOST_STEPS = 4
_MOST_UNJUDGED = 2
_PARTS = {"grad_input": "input", "grad_output": "output", "param_grad": "parameter"}


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


def _cut_by(first: Finding) -> str:
    """Say which code is why a gradient never comes, if it is that of another module."""
    if first.container is None:
        return ""
    does = f"never calls {display_name(first.key.module)}" if first.rule == UNCALLED else "cuts it off"
    return f": {display_name(first.module)} {does}"


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


def forward_agrees(unjudged: bool) -> str:
    """Say that nothing is wrong in a forward pass, parts of which may be unjudged."""
    return "The forward pass agrees" + " as far as it could be judged" * unjudged


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


def describe_call(first: Finding) -> str:
    """Return a further sentence if the module to inspect was called with other arguments."""
    return f" It was called with {describe_other_arguments(first.arguments)}." if first.arguments else ""


def describe_other_arguments(others: Sequence[ArgumentDifference]) -> str:
    """Name the plain arguments in which two calls differ.

    >>> describe_other_arguments([ArgumentDifference("is_causal", True, False), ArgumentDifference("scale", 0.5, 1.0)])
    'is_causal=True in the reference and False in the candidate, scale=0.5 and 1.0'
    """
    words: list[str] = []
    for path, ours, theirs in others[:_MOST_ARGUMENTS]:
        if ours is ABSENT or theirs is ABSENT:
            side, value = ("candidate", theirs) if ours is ABSENT else ("reference", ours)
            words.append(f"{path}={in_words(value)} in the {side} alone")
        else:
            where = ("", "") if words else (" in the reference", " in the candidate")
            words.append(f"{path}={in_words(ours)}{where[0]} and {in_words(theirs)}{where[1]}")
    rest = len(others) - _MOST_ARGUMENTS
    return ", ".join(words) + (f" and {rest} more" if rest > 0 else "")


def describe_unseen_parameters() -> str:
    """Return a further sentence for a module that may be right while its parameters are wrong."""
    return ' Its parameters were not recorded, so the optimizer may be wrong instead: capture kinds=(..., "param").'


def describe_moved_parameters() -> str:
    """Return a further sentence for a module whose parameters changed after they were recorded."""
    return (
        " Its parameters changed within the step, after they were recorded, so what changes them may be wrong instead."
    )


def describe_unseen_start(kind: str) -> str:
    """Return a further sentence for a module whose parameters or buffers, by their kind, may differ from the start."""
    what = {"param": "parameters", "buffer": "buffers"}[kind]
    return f' Its {what} were not recorded, and may differ already: capture kinds=(..., "{kind}").'


def about_selection(text: str) -> str:
    """Return a sentence about a selection of records: what it lacks was left out, and may be recorded.

    >>> about_selection("its output 0 is off, and its inputs were not recorded.")
    'its output 0 is off, and its inputs were not selected.'
    """
    return text.replace("was not recorded", "was not selected").replace("were not recorded", "were not selected")


def describe_hidden_optimizer(allowed: float | None) -> str:
    """Return a further sentence about the tolerance that is due to unrecorded parameters."""
    if allowed is None:
        return ""
    return (
        f" Parameters were not recorded: up to {rounded(allowed)} was allowed for gradient noise that an optimizer "
        'magnifies. This may hide a wrong optimizer: capture kinds=(..., "param").'
    )


def describe_unsupported(pairs: int, step: int, off: float, worst: str, has_optimizer: bool = False) -> str:
    """Say that the verdict is open, because parameters were not recorded and differences depend on them.

    has_optimizer: whether the capture knew the optimizer, whose parameters it records unless `kinds=` leaves them out.

    >>> describe_unsupported(1, 1, 3e-5, "fc · output 0").partition(". ")[0]
    'Cannot tell whether the runs match: from step 1 on, 1 pair is off by 3.0e-5 (fc · output 0)'
    """
    which = f"{pairs:,} pairs are off by up to" if pairs > 1 else "1 pair is off by"
    return (
        f"Cannot tell whether the runs match: from step {step} on, {which} {rounded(off)} ({worst}). That may be "
        "gradient noise that an optimizer magnified, or a wrong optimizer: parameters were not recorded. Capture with "
        + "optimizer=, or " * (not has_optimizer)
        + 'kinds=(..., "param").'
    )


def describe_other_steps(reference: Mapping[int, int], candidate: Mapping[int, int]) -> str:
    """Return a further sentence about steps that one side lacks or ran more often, from the runs of each step.

    >>> describe_other_steps({0: 2, 1: 2, 2: 2}, {0: 2, 1: 4})
    ' The reference alone has step 2, and in step 1 it ran 2 times and the candidate 4 times.'
    """
    parts = []
    for name, own, other in (("reference", reference, candidate), ("candidate", candidate, reference)):
        if alone := sorted(set(own) - set(other)):
            parts.append(f"the {name} alone has step{'s' * (len(alone) > 1)} {listed(alone)}")
    both = sorted(step for step in set(reference) & set(candidate) if reference[step] != candidate[step])
    if both:
        ours, theirs = (f"{counts[both[0]]} time{'s' * (counts[both[0]] > 1)}" for counts in (reference, candidate))
        subject = "it ran" if parts and parts[-1].startswith("the reference") else "the reference ran"
        parts.append(f"in step{'s' * (len(both) > 1)} {listed(both)} {subject} {ours} and the candidate {theirs}")
    text = ", and ".join(parts)
    return f" {text[0].upper()}{text[1:]}." if text else ""


def listed(words: Sequence[object], most: int = _MOST_STEPS) -> str:
    """Join the first words, and say how many more there are.

    >>> listed([1, 2, 3, 4, 5, 6])
    '1, 2, 3, 4 and 2 more'
    """
    few = ", ".join(map(str, words[:most]))
    return few + (f" and {len(words) - most} more" if len(words) > most else "")


def describe_worst(off: float, key: str) -> str:
    """Say how far off the worst pair within tolerance is."""
    return f"at most {rounded(off)} off, at {key}"


def describe_rounding_alone(pairs: int, key: str, alone: bool) -> str:
    """Say which sums cancel out, so that both sides consist of rounding and their relative error means nothing."""
    more = "" if alone else "more "
    if pairs == 1:
        return f"one {more}cancels out and consists of rounding alone on both sides, {key}"
    return f"{pairs:,} {more}cancel out and consist of rounding alone on both sides, as {key}"


def describe_large(pairs: int, off: float, key: str, rule: str, alone: bool) -> str:
    """Say which pairs are far off, relative to their size, and still within tolerance."""
    more = "" if alone else "more "
    if pairs == 1:
        return f"one {more}differs by {rounded(off)}, {key}: {rule}"
    return f"{pairs:,} {more}differ by up to {rounded(off)}, as {key}: {rule}"


def describe_match(counts: Mapping[str, int], worst: str | None, agree: str = "The runs match") -> str:
    """Say that the runs match, and how closely; `worst` describes the worst pairs within tolerance."""
    pairs = sum(counts.get(name, 0) for name in ("equal", "close", "unjudged"))
    if not counts.get("close") and not counts.get("unjudged"):
        all_of_them = f"all {pairs:,} pairs are" if pairs > 1 else "the one pair there is, is"
        text = f"{agree}: {all_of_them} equal bit for bit"
    else:
        text = f"{agree}: of {pairs:,} pair{'s' if pairs > 1 else ''}, "
        text += f"{counts.get('equal', 0):,} are equal bit for bit"
        text += f" and {counts.get('close', 0):,} within tolerance"
        if worst:
            text += f" ({worst})"
        if counts.get("unjudged"):
            text += f"; {counts['unjudged']:,} could not be judged"
    if counts.get("unmatched"):
        alone = counts["unmatched"]
        text += f"; {alone:,} record{'s are' if alone > 1 else ' is'} on one side only"
    return text + "."


def describe_none_judged(pairs: int) -> str:
    """Say that the runs have records in common, none of which could be judged."""
    if pairs == 1:
        return "Too little to judge: the one pair there is could not be judged."
    return f"Too little to judge: none of the {pairs:,} pairs could be judged."


def describe_too_little(reference: int, candidate: int, pairs: int, unpaired: str = "") -> str:
    """Say why the runs cannot be judged. `unpaired` names the ranks without a counterpart."""
    begin = "Too little in common to judge: " + (f"{unpaired}; " if unpaired else "")
    if not reference or not candidate:
        empty = "reference" if not reference else "candidate"
        return f"{begin}the {empty} has no records that take part."
    return (
        f"{begin}of {reference:,} records of the reference and {candidate:,} of the candidate "
        f"only {pairs:,} have the same identity."
    )


def describe_unrelated(reference: str, candidate: str) -> str:
    """Say that two models have no module in common."""
    return (
        f"Too little in common to judge: the reference is a {reference} and the candidate a {candidate}, and no module "
        "of one has its name in the other. If they are one architecture under other names, --map with an empty file "
        "maps them by structure."
    )


def describe_undecided(guessed: str) -> str:
    """Say that the verdict is open, because only pairs that were guessed differ."""
    return f"Cannot tell whether the runs match. {guessed[0].upper()}{guessed[1:]}."


def ways_to_tell(checked: bool, several_steps: bool, short: bool) -> str:
    """Return what would show more where a verdict is open: in a check no error propagates.

    checked: whether it is a check already, or none is possible, as between two frameworks.
    several_steps: whether more than one step was compared.
    short: whether anything was computed in a short dtype.

    >>> ways_to_tell(True, True, True)
    'compare fewer steps, or in float32'
    """
    ways = [] if checked else ["check the candidate on the reference's own inputs (tensortap.check)"]
    if several_steps:
        ways.append("compare fewer steps")
    if short:
        ways.append("in float32" if several_steps else "compare in float32")
    return ", or ".join(ways or ["measure the noise of the reference (tensortap.noise)"])


def describe_open_ties(pairs: int, ways: str, rest: str) -> str:
    """Say that the verdict is open, because tokens chose other experts or codes and pairs depend on them."""
    which = f"{pairs:,} pair{'s depend' if pairs > 1 else ' depends'} on tokens that chose another expert or code"
    return describe_open(which, ways, rest)


def describe_open(why: str, ways: str, rest: str) -> str:
    """Say that the verdict is open, why, and what would show more.

    >>> describe_open("2 pairs differ", "compare fewer steps", "All else matches.")
    'Cannot tell whether the runs match: 2 pairs differ. To tell, compare fewer steps. All else matches.'
    """
    return f"Cannot tell whether the runs match: {why}. To tell, {ways}. {rest}"


def describe_overflow(key: str, side: str, dtype: str, pairs: int) -> str:
    """Say that the verdict is open, because the numbers of one side are beyond the range of its dtype.

    >>> describe_overflow("up · output 0", "candidate", "float16", 9)
    'Cannot tell whether the runs match: the candidate overflows at up · output 0, where the numbers of the other side \
are beyond the range of float16. From there on, 9 pairs could not be judged. To tell, compare in a dtype that holds \
these numbers.'
    """
    return (
        f"Cannot tell whether the runs match: the {side} overflows at {key}, where the numbers of the other side are "
        f"beyond the range of {dtype}. From there on, {pairs:,} pair{'s' * (pairs > 1)} could not be judged. To tell, "
        "compare in a dtype that holds these numbers."
    )


def describe_read_hidden(rest: str) -> str:
    """Say that the verdict is open, because the loss depends on positions at which two kinds of attention differ."""
    return (
        "Cannot tell whether the runs match: the loss reads positions that a mask hides, such as the padding before a "
        "text, and two kinds of attention return other values there. Leave these positions out of the loss, as by the "
        f"label -100 of the first token after the padding. {rest}"
    )


def rounded(value: float) -> str:
    """Format two digits, and an exponent without padding: 1.5e-5, 0.42."""
    if value == 0 or 0.00995 <= abs(value) < 995:
        return f"{value:.2g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


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
