"""Judges free runs against a truth: where the distance of one side grows against the other's.

In free runs errors accumulate: the error of a record is what came in, and what its module adds. Both sides carry nearly
the same errors until they part, so that what is left of them in the difference of the squared distances is chance. Its
size follows from the distance between the two sides, which is small where they have computed alike so far.
"""

from __future__ import annotations

from collections.abc import Callable

from tensortap.compare.judge.attribution import Attribution
from tensortap.compare.judge.findings import FindingBuilder
from tensortap.compare.judge.implementations import Implementations
from tensortap.compare.judge.precision import (
    LEAST_OF_LONG,
    LEAST_RATIO,
    LEAST_ROUNDINGS,
    Precision,
    TruthPairs,
    is_cast,
    is_noise,
    least_ratio,
    less_exact,
    one_rounding,
)
from tensortap.core.records import GRADIENT_KINDS, WRONG_STATUSES, Finding

__all__ = ["judge_free"]

_BARS = 3.5
"""Both distances may be estimates from sketches: the ratio must exceed 1 by this many half-widths of their interval."""
_LEAST_ELEMENTS = 256
"""Only the norms of errors are known; in fewer elements they vary too much."""
_LEAST_ACCUMULATED = 1.1
"""Least ratio from which on no chance is worked out. Chunked sums move it by 0.02."""
_LEAST_GROWTH, _MOST_BEFORE = 1.02, 1.05
"""The same where chance is worked out, and the most that the ratio of a source may be there: a module may enlarge the
one error that a mistake before it has made more than all others."""
_VERY_CERTAIN = 5.0
"""Times the growth that chance explains."""
_FLOWING = ("input", "output")
_MOVING = (*_FLOWING, *GRADIENT_KINDS)


def judge_free(
    builder: FindingBuilder, pairs: TruthPairs, attribute: Callable[[int], Attribution], elements: Callable[[int], int]
) -> Precision:
    """Judge free runs, whose errors accumulate: a side is less exact where its distance grows against the other's.

    Independent roundings add up in squares, so the ratio of the distances stays where both sides round alike.
    """
    structure, status = builder.structure, builder.judgement.status
    findings: dict[tuple[int, str], Finding] = {}
    doubtful: dict[tuple[int, str], Finding] = {}
    implementations = Implementations(builder)
    if any(each in WRONG_STATUSES for each in status):
        return Precision([], pairs.errors, pairs.notes)  # beyond a mistake, distances are those of the mistake
    hidden: dict[str, None] = {}
    for pair, found in sorted(pairs.errors.items()):
        if elements(pair) < _LEAST_ELEMENTS or is_cast(pairs, pair) or status[pair] == "equal":
            continue
        if pairs.is_gradient(pair):
            least = _least_of_gradient(builder, pairs, pair, elements(pair))
        else:
            least = _least_of_value(builder, pairs, pair, elements(pair))
        attribution = attribute(pair)
        place = structure.scope[pair][0], builder.module_to_blame(pair, attribution)
        if least is None and _would_hide_a_rounding(builder, pairs, pair, elements(pair)):
            hidden.setdefault(place[1])
        if least is None or place in findings or attribution.from_outside:
            continue
        into = doubtful if _may_be_another(implementations, pairs, pair, place[1]) else findings
        into.setdefault(place, less_exact(builder.build(pair, attribution, pair), found, least))
    return Precision(
        list(findings.values()), pairs.errors, pairs.notes, doubtful=list(doubtful.values()), hidden=tuple(hidden)
    )


def _may_be_another(implementations: Implementations, pairs: TruthPairs, pair: int, module: str) -> bool:
    """Whether a value that is less exact may be that of another implementation of attention.

    An implementation is chosen for all modules of a class, so that the first of them differs as much.
    """
    if pairs.is_gradient(pair) or not implementations.is_attention(module):
        return False
    first = implementations.first_like(pair, module)
    return first not in pairs.errors or implementations.differs(first, pairs.errors[first])


def _least_of_value(builder: FindingBuilder, pairs: TruthPairs, pair: int, elements: int) -> float | None:
    """Return the ratio that an input or output exceeds beyond its sources; None if it does not."""
    structure, status, found = builder.structure, builder.judgement.status, pairs.errors[pair]
    sources = [each for each in structure.sources(pair) if structure.kind[each] in _FLOWING and each < pair]
    # A source that is equal bit for bit, as tokens and masks are, needs no distance.
    if not sources or any(each not in pairs.errors and status[each] != "equal" for each in sources):
        return None
    before = max(1.0, *(pairs.errors[each].ratio for each in sources if each in pairs.errors), 0.0)
    least, unit = least_ratio(pairs, pair), one_rounding(*pairs.dtypes(pair))
    if unit is not None and least == LEAST_RATIO:  # earlier errors dilute the ratio, but not the number of roundings
        least = _LEAST_ACCUMULATED
    least = max(least, 1 + _BARS * found.bar)
    own = found.candidate**2 - (before * found.reference) ** 2
    if own < LEAST_ROUNDINGS * (unit or 0.0) ** 2:
        return None
    if found.ratio >= least * before:
        return least
    chance = None if unit is None or least > _LEAST_ACCUMULATED else _by_chance(builder, pairs, pair, elements)
    if chance is None or before > _MOST_BEFORE or found.ratio < _LEAST_GROWTH * before:
        return None
    return before if own >= _VERY_CERTAIN * chance else None


def _would_hide_a_rounding(builder: FindingBuilder, pairs: TruthPairs, pair: int, elements: int) -> bool:
    """Whether a value differs from the reference's so much that one rounding more would not show in it."""
    unit = one_rounding(*pairs.dtypes(pair))
    if unit is None or pairs.is_gradient(pair):
        return False
    chance = _by_chance(builder, pairs, pair, elements)
    return chance is None or _VERY_CERTAIN * chance > unit**2


def _by_chance(builder: FindingBuilder, pairs: TruthPairs, pair: int, elements: int) -> float | None:
    """Return by how much the squared distances of two right sides differ by chance; None if it is not known.

    The difference of the squares is the product of the sum of both errors and of the difference between the sides. If
    both round alike, the signs of its elements are random.
    """
    found, difference = pairs.errors[pair], builder.difference_of(pair)
    if difference is None or not found.exact:
        return None
    return float(2 * found.reference * difference.rel_l2 / elements**0.5)


def _least_of_gradient(builder: FindingBuilder, pairs: TruthPairs, pair: int, elements: int) -> float | None:
    """Return the ratio that a gradient exceeds; None if it does not, or if its sources differ.

    The error of a gradient is that of the whole forward and of the backward so far, and moves at random if any of it
    differs: by 1.5 times between fused attention and another. Where all its sources are equal bit for bit, the sides
    have the same error but for what this module has added.
    """
    found, chance = pairs.errors[pair], _by_chance(builder, pairs, pair, elements)
    if chance is None or is_noise(found) or not _has_equal_sources(builder, pair):
        return None
    unit = one_rounding(*pairs.dtypes(pair))
    if unit is None:
        return LEAST_OF_LONG if found.ratio >= LEAST_OF_LONG else None
    own = found.candidate**2 - found.reference**2
    return 1.0 if own >= max(LEAST_ROUNDINGS * unit**2, _VERY_CERTAIN * chance) else None


def _has_equal_sources(builder: FindingBuilder, pair: int) -> bool:
    """Whether all that a gradient was made from is equal on both sides, bit for bit."""
    structure, status = builder.structure, builder.judgement.status
    sources = {each for each in structure.sources(pair) if structure.kind[each] in _MOVING}
    for call in structure.made_in(pair):
        if structure.kind[pair] == "grad_output":  # what the users of the output sent back
            sources |= set(call.of("grad_input"))
        sources |= {*call.of(*_FLOWING), *(row for child in call.children for row in child.of(*_MOVING))}
    return bool(sources) and all(status[each] == "equal" for each in sources - {pair})
