"""The verdict in words that need no explaining."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from tensortap.core.arguments import ABSENT, ArgumentDifference, in_words
from tensortap.core.records import Finding, Key, display_name

__all__ = [
    "Tensor",
    "called",
    "checkpoints",
    "forward_agrees",
    "hidden_optimizer",
    "isolated",
    "listed",
    "lost",
    "matched",
    "other_arguments",
    "other_steps",
    "parted",
    "too_little",
    "undecided",
    "unseen_parameters",
]

_MOST_NAMED = 8
_MOST_ARGUMENTS = 3
_MOST_STEPS = 4
_MOST_UNJUDGED = 2


class Tensor(NamedTuple):
    """What a sentence says of one side's tensor."""

    shape: tuple[int, ...]
    nonfinite: int
    """How many of its elements are NaN or Inf."""
    l2: float = float("nan")
    """The norm of its finite elements."""


def parted(
    first: Finding,
    changed_parameters: int,
    tensors: tuple[Tensor, Tensor],
    several: bool,
    forward: str,
    candidate: str = "the candidate",
    ran_alike: bool = True,
) -> str:
    """Say where the runs part.

    several: whether several ranks took part.
    forward: what `forward_agrees` says of the forward pass; empty if nothing of it was recorded.
    candidate: what the other side is called where its names differ.
    ran_alike: whether both ran the steps so far equally often.
    """
    key = first.key
    where = _where(first, several)
    known = [first.cls] if first.cls and first.container is None else []
    known += [f"{first.counterpart} in {candidate}"] if first.counterpart is not None else []
    name = display_name(first.module) + (f" ({'; '.join(known)})" if known else "")
    full = _full(first) + (f" ({known[-1]})" if first.counterpart is not None else "")
    off = _off(first, tensors)
    agrees = f"{forward}; the" if forward else "The"
    if key.kind == "param" and key.call == 0 and changed_parameters:
        others = f" and {changed_parameters - 1} more" if changed_parameters > 1 else ""
        return f"The parameters already differed before the first step: {full}{others}; it {off}."
    if key.kind in ("param", "buffer") and key.call == 0:
        return f"{full} differs before step {key.step}: it {off}. What changed it was not recorded."
    if key.kind == "param":
        alike = "although its gradient matches" if ran_alike else "and the gradients that both have match"
        made_from = _made_from(first, alike, "and its gradient was not recorded")
        return f"The runs part in the optimizer: after {where}, {full} {off}, {made_from}."
    if key.kind == "buffer":
        made_from = _made_from(first, "while its inputs match", "and its inputs were not recorded")
        return f"The runs part in {name}: after {where}, its buffer {key.path} {off}, {made_from}."
    if key.kind == "input" and first.container is None and key.module:
        return f"In {where}, input {key.path} of {name} {off} already; what made it was not recorded."
    if key.kind == "input" and first.container is None:
        return f"The runs were not given the same input: in {where}, input {key.path} of {name} {off}."
    unknown = "and what it was made from was not recorded"
    if key.kind == "input":
        made_from = _made_from(first, "while all that it was made from matches", unknown)
        return (
            f"The runs part in the own code of {name}: in {where}, what it hands to {display_name(key.module)} "
            f"(input {key.path}) {off}, {made_from}."
        )
    if key.kind == "output":
        made_from = _made_from(first, "while its inputs match", "and its inputs were not recorded")
        return f"The runs part in {name}: in {where}, its output {key.path} {off}, {made_from}."
    if key.kind == "param_grad":
        unknown = "and the gradient at its output was not recorded"
        made_from = _made_from(first, "while the gradient at its output matches", unknown)
        what = f"the gradient of its {key.path}"
        return f"{agrees} runs part in the backward of {name}: in {where}, {what} {off}, {made_from}."
    if first.enters:
        return _entered(first, name, where, off, forward)
    target = f"{display_name(key.module)}'s output" if key.kind == "grad_output" else f"its input {key.path}"
    unknown = "and what it was given was not recorded"
    made_from = _made_from(first, "while the gradient that it was given matches", unknown)
    return (
        f"{agrees} runs part in the backward of {name}: in {where}, the gradient that it sends back to {target} {off}, "
        f"{made_from}."
    )


def _entered(first: Finding, name: str, where: str, off: str, forward: str) -> str:
    """Say that a gradient is wrong where backward begins."""
    if not forward:
        return f"In {where}, the gradient at the output of {name} {off} already; what made it was not recorded."
    entered = "the model" if not first.module else display_name(first.module)
    return (
        f"{forward}, but the gradient that enters {entered} at its output {off} in {where}: "
        "look at the loss and at how it is scaled."
    )


def forward_agrees(unjudged: bool) -> str:
    """Say that nothing is wrong in a forward pass, some of which may not have been judged."""
    return "The forward pass agrees" + " as far as it could be judged" * unjudged


def _made_from(first: Finding, matches: str, unrecorded: str) -> str:
    """Say whether what a value was made from matches. What could not be judged is never called a match."""
    if not first.unjudged:
        return matches if first.inputs_matched else unrecorded
    unjudged = listed([_source(first, key) for key in first.unjudged], _MOST_UNJUDGED)
    if first.inputs_matched is None:
        return f"and {unjudged} could not be judged"
    return f"{matches}, except {unjudged}, which could not be judged"


def _source(first: Finding, key: Key) -> str:
    words = {"grad_output": "the gradient at output", "grad_input": "the gradient at input"}
    words |= {"param": "parameter", "param_grad": "the gradient of"}
    of = f" of {display_name(key.module)}" if key.module != first.key.module else ""
    return f"{words.get(key.kind, key.kind)} {key.path}{of}"


def lost(first: Finding, several: bool, forward: str, candidate: str = "the candidate") -> str:
    """Say that only one side has a gradient, in a run that is right up to there; arguments as in `parted`."""
    key = first.key
    where = _where(first, several)
    begin = f"{forward}, but in {where}" if forward else f"In {where}"
    other = (
        f" ({display_name(first.module)} is {first.counterpart} in {candidate})"
        if first.counterpart is not None
        else ""
    )
    if first.status == "extra":
        return f"{begin} {_comes(key)}, which it does not in the reference{other}."
    return f"{begin} {_never_comes(key)}, though the reference has it{other}."


def _where(first: Finding, several: bool) -> str:
    key = first.key
    rank, micro = f", rank {first.rank}" * several, f", micro step {key.micro}" * bool(key.micro)
    return f"step {key.step}{rank}{micro}"


def _comes(key: Key) -> str:
    return f"a gradient comes to {display_name(key.module)}'s parameter {key.path}"


def _never_comes(key: Key) -> str:
    of = {"grad_input": "input", "grad_output": "output", "param_grad": "parameter"}[key.kind]
    return f"the gradient of {display_name(key.module)}'s {of} {key.path} never comes"


def isolated(births: Sequence[Finding], tensors: tuple[Tensor, Tensor] | None, several: bool) -> str:
    """Which modules are wrong though they worked on the reference's own inputs, and how the first of them shows."""
    first = births[0]
    key = first.key
    where = _where(first, several)
    if first.status == "extra":
        return _gained(births, where)
    off = "" if tensors is None else _off(first, tensors)
    name = display_name(first.module) + (f" ({first.cls})" if first.cls and first.container is None else "")
    if first.status == "missing":
        how = f"in {where}, {_never_comes(key)}"
    elif key.kind == "input" and first.container is None:
        how = f"in {where}, input {key.path} of {name} {off}: the model was not given what the reference was"
    elif key.kind == "input":
        how = f"in {where}, what the own code of {name} hands to {display_name(key.module)} (input {key.path}) {off}"
    elif first.enters:
        how = f"in {where}, the gradient that enters {name} {off}: look at the loss and at how it is scaled"
    elif key.kind == "grad_output":
        how = f"in {where}, the gradient that {name} sends back to {display_name(key.module)}'s output {off}"
    elif key.kind in ("param", "buffer") and not key.call:
        how = f"before {where}, {_full(first)} {off}"
    elif key.kind in ("param", "buffer"):
        how = f"after {where}, {_full(first)} {off}"
    else:
        what = {"output": "its output", "grad_input": "the gradient at its input", "param_grad": "the gradient of its"}
        how = f"in {where}, {what[key.kind]} {key.path} {off}"
    modules = _modules(birth for birth in births if birth.key.kind != "param")
    named = listed(modules, _MOST_NAMED)
    if key.kind == "param":
        others = len({_full(birth) for birth in births if birth.key.kind == "param" and not birth.key.call}) - 1
        more = f"; so do parameters of {others} more module{'s' * (others > 1)}" if others > 0 and not key.call else ""
        text = f"The optimizer is wrong: {how}." if key.call else f"The parameters already differed: {how}{more}."
        return text + (f" Wrong on the reference's own inputs: {named}." if modules else "")
    too = " The optimizer is wrong, too." if any(b.key.kind == "param" and b.key.call for b in births) else ""
    if len(modules) == 1:
        return f"{name} is wrong on the reference's own inputs: {how}.{too}"
    return f"{len(modules)} modules are wrong on the reference's own inputs: {named}. In {name}, {how}.{too}"


def _gained(births: Sequence[Finding], where: str) -> str:
    """That gradients come to modules that get none in the reference; and who is wrong beside them."""
    others = len(_modules(birth for birth in births if birth.status == "extra")) - 1
    more = f"; so it is with {others} more module{'s' * (others > 1)}" if others else ""
    wrong = _modules(birth for birth in births if birth.status != "extra" and birth.key.kind != "param")
    text = f"In {where}, {_comes(births[0].key)}, which it does not in the reference{more}."
    return text + (f" Wrong on the reference's own inputs: {listed(wrong, _MOST_NAMED)}." if wrong else "")


def _modules(births: Iterable[Finding]) -> list[str]:
    return list(dict.fromkeys(display_name(birth.module) for birth in births))


def called(first: Finding) -> str:
    """A further sentence, where the module to look at was called differently."""
    return f" It was called with {other_arguments(first.arguments)}." if first.arguments else ""


def other_arguments(others: Sequence[ArgumentDifference]) -> str:
    """In which plain arguments two calls differ.

    >>> other_arguments([ArgumentDifference("is_causal", True, False), ArgumentDifference("scale", 0.5, 1.0)])
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


def unseen_parameters() -> str:
    """A further sentence, where the module to look at may be right, and its parameters not."""
    return ' Its parameters were not recorded: it may be the optimizer, too, which kinds=(..., "param") would tell.'


def hidden_optimizer(allowed: float | None) -> str:
    """A further sentence, where so much was allowed because parameters were not recorded."""
    if allowed is None:
        return ""
    return (
        f" Parameters were not recorded: up to {_number(allowed)} was allowed for what an optimizer makes of noise. "
        'Its mistakes may hide in that; kinds=(..., "param") would tell.'
    )


def other_steps(reference: Mapping[int, int], candidate: Mapping[int, int]) -> str:
    """A further sentence about steps that one side lacks, or ran more often; from how often each step was run.

    >>> other_steps({0: 2, 1: 2, 2: 2}, {0: 2, 1: 4})
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
    """A few of them.

    >>> listed([1, 2, 3, 4, 5, 6])
    '1, 2, 3, 4 and 2 more'
    """
    few = ", ".join(map(str, words[:most]))
    return few + (f" and {len(words) - most} more" if len(words) > most else "")


def checkpoints(first: Finding, differing: int, tensors: tuple[Tensor, Tensor]) -> str:
    """That two checkpoints are not the same."""
    others = f" and {differing - 1:,} more" if differing > 1 else ""
    return f"The checkpoints differ in {_full(first)}{others}; it {_off(first, tensors)}."


def matched(counts: Mapping[str, int], worst: tuple[float, str] | None, agree: str = "The runs match") -> str:
    """That they do not."""
    pairs = sum(counts.get(name, 0) for name in ("equal", "close", "unjudged"))
    if not counts.get("close") and not counts.get("unjudged"):
        all_of_them = f"all {pairs:,} pairs are" if pairs > 1 else "the one pair there is, is"
        text = f"{agree}: {all_of_them} equal bit for bit"
    else:
        text = f"{agree}: of {pairs:,} pair{'s' if pairs > 1 else ''}, "
        text += f"{counts.get('equal', 0):,} are equal bit for bit"
        text += f" and {counts.get('close', 0):,} within tolerance"
        if worst is not None:
            text += f" (at most {_number(worst[0])} off, at {worst[1]})"
        if counts.get("unjudged"):
            text += f"; {counts['unjudged']:,} could not be judged"
    if counts.get("unmatched"):
        alone = counts["unmatched"]
        text += f"; {alone:,} record{'s are' if alone > 1 else ' is'} on one side only"
    return text + "."


def none_judged(pairs: int) -> str:
    """Say that the runs have records in common, and that nothing is known of any of them."""
    if pairs == 1:
        return "Too little to judge: the one pair there is could not be judged."
    return f"Too little to judge: none of the {pairs:,} pairs could be judged."


def too_little(reference: int, candidate: int, pairs: int, unpaired: str = "") -> str:
    """Say why the runs cannot be judged. `unpaired` names the ranks without a counterpart."""
    begin = "Too little in common to judge: " + (f"{unpaired}; " if unpaired else "")
    if not reference or not candidate:
        empty = "reference" if not reference else "candidate"
        return f"{begin}the {empty} has no records that take part."
    return (
        f"{begin}of {reference:,} records of the reference and {candidate:,} of the candidate "
        f"only {pairs:,} have the same identity."
    )


def undecided(guessed: str) -> str:
    """That nobody can tell, because all that differs was guessed to belong together."""
    return f"Cannot tell whether the runs match. {guessed[0].upper()}{guessed[1:]}."


def _number(value: float) -> str:
    """Two digits, and an exponent without padding: 1.5e-5, 0.42."""
    if value == 0 or 0.00995 <= abs(value) < 995:
        return f"{value:.2g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _full(finding: Finding) -> str:
    name = finding.key.module
    return f"{name}.{finding.key.path}" if name else finding.key.path


def _off(finding: Finding, tensors: tuple[Tensor, Tensor]) -> str:
    ours, theirs = tensors
    if finding.status == "shape":
        before, now = ("×".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)
        return f"has the shape {now} instead of {before}"
    if finding.status == "nonfinite" and ours.nonfinite > theirs.nonfinite:
        return "is finite where the reference's is not"
    if finding.status == "nonfinite" and ours.nonfinite == theirs.nonfinite:
        return "has other NaN or Inf than the reference's"
    if finding.status == "nonfinite":
        return "is not finite where the reference's is"
    if finding.rel_l2 == float("inf") and ours.l2 == 0:
        return "is not zero where the reference's is"
    if not isfinite(finding.rel_l2):
        return "differs by more than can be measured"
    if finding.only_a_row and finding.difference is not None:
        row = ", ".join(map(str, finding.difference.row_index or ()))
        return f"is off by {_number(finding.difference.row_rel_l2)} (relative L2) in its row [{row}]"
    if finding.rel_l2 <= finding.tolerance:
        return f"is off by {_number(finding.rel_l2)} (relative L2), most of it as if it were scaled"
    about = "" if finding.difference is None or finding.difference.exact else "about "
    if finding.difference is not None and finding.difference.rel_l2_bar == float("inf"):
        about = "at least "
    return f"is off by {about}{_number(finding.rel_l2)} (relative L2)"
