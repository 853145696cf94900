"""Sentences and notes about what differs beside the numbers (dtypes, attributes, ties) and what was not compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.rows import same_rows
from tensortap.compare.align.settings import SettingDifferences, TieDifference
from tensortap.compare.align.side import Side
from tensortap.compare.matched import Matched
from tensortap.core.arguments import ArgumentDifference, in_words
from tensortap.core.causes import Cause
from tensortap.core.records import Finding, display_name
from tensortap.mapping.outline import full_name

__all__ = [
    "are_buffers_unseen",
    "attribute_notes",
    "describe_attributes",
    "describe_class",
    "describe_dtype",
    "describe_given",
    "describe_one_sided_modules",
    "describe_order",
    "describe_ties",
    "describe_uncompared",
    "dtype_note",
    "is_explained",
    "tie_notes",
]

_FEW, _MOST_ATTRIBUTES = 3, 3
_OF_PARAMETERS = ("param", "param_grad", "step_grad")
_OF_CONTAINERS = {Cause.OUTPUT, Cause.CONTAINER_CODE, Cause.HANDED_ON, Cause.CONTAINER_BACKWARD}
_ONE_SIDED_INPUTS = {Cause.LOST_INPUT, Cause.EXTRA_INPUT}
_OF_MODULES = {
    Cause.OUTPUT,
    Cause.OUTPUT_ON_UNKNOWN_INPUTS,
    Cause.BUFFER,
    Cause.SENT_GRADIENT,
    Cause.PARAMETER_GRADIENT,
}
_EVERYWHERE = 0.25
"""Share of pairs with other dtypes from which on another precision is the run's, not a mistake of one module."""


def describe_attributes(first: Finding, settings: SettingDifferences) -> str:
    """Return a further sentence if the module to inspect has other attributes than the reference's."""
    others = settings.attributes_at(first.module, first.key.step)
    mode = ""
    if (modes := settings.modes(first.module, first.key.step)) is not None:
        ours, theirs = ("training" if each else "evaluation" for each in modes)
        mode = f" It is in {theirs} mode, and the reference's in {ours} mode."
    if not others:
        return mode
    whose = "its"
    if first.cause is Cause.LOSS:  # the sentence is not about the module
        whose = f"{display_name(first.module)}'s" if first.module else "the model's"
    parts = [
        f"{whose} {each.path} is {in_words(each.candidate)} instead of {in_words(each.reference)}" for each in others
    ]
    more = f", and {len(parts) - _MOST_ATTRIBUTES} more differ" if len(parts) > _MOST_ATTRIBUTES else ""
    text = ", ".join(parts[:_MOST_ATTRIBUTES]) + more
    return f"{mode} {text[0].upper()}{text[1:]}."


def is_explained(first: Finding, matched: Matched) -> bool:
    """Whether attributes or the class of the first finding's module explain it."""
    return bool(describe_attributes(first, matched.settings) or describe_class(first, matched))


def describe_class(first: Finding, matched: Matched) -> str:
    """Return a further sentence if the module of the first finding has another class."""
    if first.row is None or first.container is not None or matched.plan is not None or first.cause not in _OF_MODULES:
        return ""
    ours = matched.reference.cls[int(matched.alignment.reference[first.row])]
    theirs = matched.candidate.cls[int(matched.alignment.candidate[first.row])]
    return f" Its class is {theirs} instead of {ours}." if ours and theirs and ours != theirs else ""


def describe_given(first: Finding, matched: Matched) -> str:
    """Return a further sentence if the model itself was given a tensor on one side alone, which the module that is
    named lacks, or which the code that is named passes."""
    passed = first.cause in _ONE_SIDED_INPUTS
    wanted = {each.path for each in first.arguments} | ({first.key.path} if passed else set())
    sides = (
        ("reference", matched.reference, matched.alignment.only_reference),
        ("candidate", matched.candidate, matched.alignment.only_candidate),
    )
    for name, side, rows in sides if wanted and (first.module or passed) else ():
        given = rows[side.kind.among(("input",))[rows] & side.module.among(("",))[rows]]
        found = [path for path in dict.fromkeys(side.path[row] for row in given.tolist()) if path in wanted]
        if found:
            return f" The model itself was given {found[0]} in the {name} alone."
    return ""


def describe_one_sided_modules(first: Finding, matched: Matched) -> str:
    """Return a further sentence if the blamed module calls modules that only one side has: the error may be theirs."""
    inside = f"{first.module}." if first.module else ""
    sides = (
        ("reference", matched.reference, matched.alignment.only_reference),
        ("candidate", matched.candidate, matched.alignment.only_candidate),
    )
    paired = set(matched.reference.module.at(matched.alignment.reference))
    parts = []
    for name, side, rows in sides:
        outputs = rows[side.kind.among(("output",))[rows]]
        modules = dict.fromkeys(side.module.at(outputs))
        found = [each for each in modules if each.startswith(inside) and each not in paired]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            parts.append(f"{found[0]}{more} of the {name}")
    if len(parts) < 2 or first.cause not in _OF_CONTAINERS:
        return ""
    return f" But {' and '.join(parts)} have no counterpart and were not compared: the error may be inside them."


def attribute_notes(
    settings: SettingDifferences, said: Collection[str], matches: bool, unseen_buffers: bool = False
) -> list[str]:
    """Return notes on modules with other attributes, grouped by difference, without those `said` already.

    unseen_buffers: whether buffers, which an attribute may change, were not compared.
    """
    alike: dict[tuple[str, str, str], list[str]] = {}
    for module, others in settings.attributes.items():
        for each in others if module not in said else ():
            alike.setdefault(_words(each), []).append(display_name(module))
    below = f" (no compared record shows it{'; buffers were not compared' * unseen_buffers})" if matches else ""
    lines = []
    for (name, ours, theirs), modules in list(alike.items())[:_FEW]:
        names = ", ".join(modules[:_FEW]) + (f" and {len(modules) - _FEW} more" if len(modules) > _FEW else "")
        have = "have" if len(modules) > 1 else "has"
        lines.append(
            f"other attributes: {names} {have} {name}={ours} in the reference and {theirs} in the candidate{below}"
        )
    rest = len(alike) - _FEW
    return lines + ([f"other attributes: {rest} more difference{'s' * (rest > 1)}"] if rest > 0 else [])


def describe_ties(first: Finding, settings: SettingDifferences) -> str:
    """Return a further sentence if a parameter of the first finding, or of its module, is tied on one side alone."""
    return "".join(f" {each.words()}." for each in _ties_of(first, settings.ties)[:1])


def _ties_of(first: Finding | None, ties: Sequence[TieDifference]) -> list[TieDifference]:
    if first is None:
        return []
    if first.key.kind == "output":
        return [
            each for each in ties if first.key.module in (each.name.rpartition(".")[0], each.other.rpartition(".")[0])
        ]
    if first.key.kind not in _OF_PARAMETERS:
        return []
    name = full_name(first.key.module, first.key.path)
    return [each for each in ties if name in (each.name, each.other)]


def tie_notes(ties: Sequence[TieDifference], first: Finding | None = None) -> list[str]:
    """Return a note for each parameter that is tied on one side alone, without the one that the sentence names."""
    said = _ties_of(first, ties)[:1]
    ties = [each for each in ties if each not in said]
    more = [f"so are {len(ties) - _FEW} more parameters"] if len(ties) > _FEW else []
    return [each.words() for each in ties[:_FEW]] + more


def dtype_note(matched: Matched) -> list[str]:
    """Return a note on the records whose dtype changed: the first place, and how many there are."""
    changed = np.flatnonzero(other_dtypes(matched))
    if not len(changed):
        return []
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    first = _earliest(matched, changed)
    ours, theirs = left.dtype[int(alignment.reference[first])], right.dtype[int(alignment.candidate[first])]
    where = f"{len(changed):,} of {len(alignment.reference):,} pairs have" if len(changed) > 1 else "one pair has"
    key = left.key(int(alignment.reference[first]))
    return [f"{where} other dtypes, the first is {key}: {ours} in the reference and {theirs} in the candidate"]


def describe_order(first: Finding, matched: Matched) -> str:
    """Return a further sentence if the model was given the reference's rows in another order."""
    if first.cause is not Cause.INPUT or first.row is None or matched.plan is not None:
        return ""
    if not same_rows(matched.reference, matched.candidate, matched.alignment, first.row):
        return ""
    return " It has the same rows in another order: check how the data are shuffled."


def describe_dtype(first: Finding, matched: Matched) -> str:
    """Return a further sentence if the first wrong record has another dtype: as the first of all, or as one of few."""
    if first.row is None:
        return ""
    changed = other_dtypes(matched)
    if not changed[first.row]:
        return ""
    if changed.mean() > _EVERYWHERE and _earliest(matched, np.flatnonzero(changed)) != first.row:
        return ""
    rows = matched.alignment.reference[first.row], matched.alignment.candidate[first.row]
    ours, theirs = matched.reference.dtype[int(rows[0])], matched.candidate.dtype[int(rows[1])]
    return f" It is {theirs} instead of {ours}."


def _earliest(matched: Matched, pairs: npt.NDArray[np.int64]) -> int:
    """Return the first of these pairs in execution order."""
    left, rows = matched.reference, matched.alignment.reference[pairs]
    return int(pairs[np.lexsort((left.seq[rows], left.step[rows]))[0]])


def other_dtypes(matched: Matched) -> npt.NDArray[np.bool_]:
    """Return for each pair whether both sides are floating-point numbers of other dtypes."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    if not len(alignment.reference):
        return np.zeros(0, bool)
    table = np.array([[_is_other(ours, theirs) for theirs in right.dtype.words] for ours in left.dtype.words], bool)
    found: npt.NDArray[np.bool_] = table[left.dtype.codes[alignment.reference], right.dtype.codes[alignment.candidate]]
    return found


def describe_uncompared(matched: Matched, optimizer: bool) -> str:
    """Return a further sentence for a match of trainings that says what could not have shown.

    optimizer: False if the optimizer is spoken of already.
    """
    left, alignment = matched.reference, matched.alignment
    rows = alignment.reference
    if not len(rows) or "config" not in left.run.info:
        return ""
    steps, equal = len(set(left.step[rows].tolist())), bool(matched.measures.equal.all())
    gradients = bool(left.phase.among(("backward",))[rows].any())
    if not gradients and not (_leaves_out_gradients(left) and (steps > 1 or _has_optimizer(matched))):
        return ""
    after = left.kind.among(("param",)) & (left.call > 0)
    unseen: list[tuple[str, str]] = []
    last = steps > 1 and equal  # the steps before show in the next one
    if not gradients and not last:
        unseen.append(("gradients", "backward"))
    if optimizer and not after[rows].any():
        unseen.append(
            ("parameters after the last step", "last step") if last else ("parameters after the step", "optimizer")
        )
    unseen += [("buffers", "buffer")] * are_buffers_unseen(matched)
    if not unseen:
        return ""
    what, why = _listed("and", [each for each, _ in unseen]), _listed("or", [each for _, each in unseen])
    return f" {what[0].upper()}{what[1:]} were not compared: a wrong {why} would not show."


def _listed(word: str, parts: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return f" {word} ".join([*filter(None, [", ".join(parts[:-1])]), parts[-1]])


def _leaves_out_gradients(side: Side) -> bool:
    """Whether a run was asked for records of the forward alone. Without that, one without gradients is an inference."""
    kinds = (side.run.info.get("config") or {}).get("kinds") or ()
    return bool(kinds) and not any("grad" in kind for kind in kinds)


def _has_optimizer(matched: Matched) -> bool:
    return any("optimizer" in side.run.loop(rank).names() for side, rank in _ranks(matched))


def are_buffers_unseen(matched: Matched) -> bool:
    """Whether the models may have buffers that were not compared. Runs note the names of all buffers."""
    left, rows = matched.reference, matched.alignment.reference
    recorded: Mapping[str, object] = left.run.info.get("config") or {}
    kinds = recorded.get("kinds") or ()
    if left.kind.among(("buffer",))[rows].any() or "buffer" in kinds:  # type: ignore[operator]
        return False
    known = [side.run.loop(rank).value("buffers", int(side.step.max(initial=0))) for side, rank in _ranks(matched)]
    return not all(value is not None and not value.get("names") for value in known)


def _ranks(matched: Matched) -> list[tuple[Side, int]]:
    return [(side, rank) for side in (matched.reference, matched.candidate) for rank in side.ranks]


def _is_other(ours: str, theirs: str) -> bool:
    return ours != theirs and all("float" in name or "complex" in name for name in (ours, theirs))


def _words(other: ArgumentDifference) -> tuple[str, str, str]:
    return other.path, in_words(other.reference), in_words(other.candidate)
