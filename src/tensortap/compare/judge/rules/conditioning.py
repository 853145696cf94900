"""Errors that a module enlarges by what it does with sizes: gradients that cancel out, and norms over uneven rows.

These are asked only of pairs that no other rule allows: they need the calls that made a pair, and few pairs do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tensortap.compare.judge.rules.evidence import Evidence, JudgedPair
from tensortap.compare.judge.rules.margins import CANCELLED, CANCELS, ENLARGED, MOST_ASSUMED, PARTLY_CANCELS, SHORT
from tensortap.compare.judge.rules.rounding import EPSILON
from tensortap.compare.judge.steps.calls import CallRows

__all__ = ["CANCELLED_ERROR", "CANCELLED_PRODUCT", "CANCELLED_SUM", "ERROR_OF_PARTS", "explain_by_conditioning"]

CANCELLED_ERROR = "error that came in, of what cancels out in it"
CANCELLED_SUM = "error of the products that it sums, most of which cancel out"
CANCELLED_PRODUCT = "error of the products that it sums, which cancel out"
_OF_FLAT_NORM = 1000.0
"""Times that a norm may enlarge a gradient: one over the root of an epsilon of 1e-6."""
ERROR_OF_PARTS = "error of the parts of its input: small rows count as much as large ones"


def explain_by_conditioning(pair: JudgedPair, error: float) -> str:
    """Return the rule that allows an error; empty if none does."""
    if pair.policy.fixed or not pair.l2 >= 0:
        return ""
    if float(pair.evidence.distance[pair.row]) <= _error_of_cancelled_sum(pair):
        return CANCELLED_SUM
    if not pair.l2 > 0:
        return ""
    if error <= max(_error_of_cancelled(pair), _rounding_of_flat_norm(pair), _error_of_saturated(pair)):
        return CANCELLED_ERROR
    if error <= _error_of_cancelled_product(pair):
        return CANCELLED_PRODUCT
    return ERROR_OF_PARTS if error <= _error_of_parts(pair) else ""


def _error_of_cancelled(pair: JudgedPair) -> float:
    """A module sends back what it was given times its slope. A norm removes what is parallel to its output, and under
    some losses little is left: all errors are then large against the rest.

    The size of its output over that of its input is about its slope, whatever it computes. A container sums what the
    modules that it calls send back, and a sum may cancel out just as well.
    """
    evidence, structure = pair.evidence, pair.evidence.structure
    if pair.kind not in ("grad_output", "grad_input"):
        return 0.0
    own = structure.call_of(pair.row) if pair.kind == "grad_input" else None
    calls = structure.made_in(pair.row) if own is None else [own]
    sent = max((_slope(pair, call) * _largest(pair, call.of("grad_output")) for call in calls), default=0.0)
    if pair.is_made_by_container:
        sent = max(sent, _largest(pair, pair.sources_of("grad_input")))
    if sent < CANCELLED * pair.l2:
        return 0.0
    known = [row for row in pair.sources if not evidence.wrong[row] and evidence.is_known(row)]
    worst = max((max(evidence.propagated[row], evidence.base[row]) for row in known), default=0.0)
    return 2 * CANCELLED * worst * sent / pair.l2  # slopes of single rows may be larger


def _error_of_cancelled_sum(pair: JudgedPair) -> float:
    """Return the absolute error of a sum that cancels out.

    The gradient of a matrix sums products of gradients and inputs over all positions. Near a minimum they cancel out:
    the sum is smaller than one of terms with random signs, while the errors of its terms do not cancel.
    """
    evidence = pair.evidence
    if pair.kind != "param_grad" or pair.is_vector:
        return 0.0
    terms = _terms_of_matrix(pair)
    if terms < PARTLY_CANCELS * pair.l2:
        return 0.0
    known = [row for row in pair.sources if not evidence.wrong[row] and evidence.is_known(row)]
    came_in = max((evidence.propagated[row] for row in known if evidence.propagated[row] < float("inf")), default=0.0)
    rounding = max((evidence.base[row] for row in known), default=0.0)
    if rounding < SHORT:
        rounding *= pair.policy.lengthening("param_grad")
    allowed = max(pair.policy.passed_on(came_in), rounding) * terms
    return float(allowed if terms >= CANCELS * pair.l2 else min(allowed, MOST_ASSUMED * pair.l2))


def _error_of_cancelled_product(pair: JudgedPair) -> float:
    """Return the error of a product with a matrix whose terms cancel out, as in scores of which a softmax reads only
    differences: the sum is smaller than one of terms with random signs, and the errors of the terms are large
    compared with it."""
    evidence, dimensions = pair.evidence, pair.evidence.pairs.dimensions
    if pair.kind != "output" or pair.base >= SHORT or pair.is_made_by_container:
        return 0.0
    matrices = [row for row in pair.sources_of("param") if dimensions[row] > 1]
    given = [row for row in pair.sources_of("input") if evidence.base[row] > 0]
    if (
        len(matrices) != 1
        or len(given) != 1
        or any(evidence.wrong[row] or not evidence.is_known(row) for row in (*matrices, *given))
    ):
        return 0.0
    elements, structure = evidence.pairs.elements, evidence.structure
    channels = structure.shape(pair.row)[1 if dimensions[matrices[0]] > 2 else -1]
    if channels not in structure.shape(matrices[0]):
        return 0.0
    positions = int(elements[pair.row]) / max(1, channels)
    size = evidence.l2[given[0]] * evidence.l2[matrices[0]] * (positions / max(1, int(elements[given[0]]))) ** 0.5
    if size < PARTLY_CANCELS * pair.l2:
        return 0.0
    came_in = max(evidence.propagated[row] for row in (*matrices, *given))
    allowed = max(pair.base, pair.policy.passed_on(came_in))
    return float(min(MOST_ASSUMED, allowed * size / pair.l2))


def _rounding_of_flat_norm(pair: JudgedPair) -> float:
    """A norm of numbers that are all the same divides by the root of its epsilon, and removes nearly all of the
    gradient that it was given. What is left is rounding, enlarged by as much."""
    structure = pair.evidence.structure
    if pair.kind not in ("grad_output", "grad_input") or pair.base >= SHORT:
        return 0.0
    own = structure.call_of(pair.row) if pair.kind == "grad_input" else None
    calls = structure.made_in(pair.row) if own is None else [own]
    norms = [
        call for call in calls if call.of("grad_output") and "Norm" in structure.class_of(call.of("grad_output")[0])
    ]
    given = max((_largest(pair, call.of("grad_output")) for call in norms), default=0.0)
    rounding = EPSILON["float32"] * _OF_FLAT_NORM * given
    return 2 * CANCELLED * rounding / pair.l2 if pair.l2 < rounding else 0.0


def _terms_of_matrix(pair: JudgedPair) -> float:
    """Return the norm that the gradient of a matrix has if the signs of what it sums are random; 0 if it is unknown."""
    evidence, structure = pair.evidence, pair.evidence.structure
    elements = evidence.pairs.elements
    given = [row for row in pair.sources_of("grad_output") if elements[row] > 1]
    if pair.is_made_by_container or not given:  # its parameter is added, or multiplied with numbers that are not known
        return max(
            (evidence.l2[row] for row in pair.sources_of("grad_output", "grad_input") if elements[row] > 1), default=0.0
        )
    inputs = [row for row in pair.sources_of("input") if evidence.base[row] > 0]
    total = sum(evidence.l2[row] ** 2 for row in given) ** 0.5
    if not inputs:  # an embedding: each of its rows sums gradients
        return float(total)
    positions, numbers = 0.0, 0
    for row in given:
        shape = structure.shape(row)
        channels = shape[1] if evidence.pairs.dimensions[pair.row] > 2 and len(shape) > 2 else shape[-1]
        positions += int(elements[row]) / max(1, channels)
        numbers += int(elements[row])
    size = max(evidence.l2[row] / max(1, int(elements[row])) ** 0.5 for row in inputs)
    return float(total / numbers**0.5 * size * (positions * int(elements[pair.row])) ** 0.5)


def _error_of_saturated(pair: JudgedPair) -> float:
    """Where an activation is saturated, as a tanh of large numbers, its slope is the rest of a difference: as far off
    as its output is, in absolute terms, and large against the rest."""
    evidence, structure = pair.evidence, pair.evidence.structure
    if pair.kind not in ("grad_output", "grad_input"):
        return 0.0
    own = structure.call_of(pair.row) if pair.kind == "grad_input" else None
    calls = structure.made_in(pair.row) if own is None else [own]
    allowed = 0.0
    for call in calls:
        held = structure.parameters_of.get((*call.scope[:2], call.module), []) or structure.own_gradients.get(
            (call.scope, call.module), []
        )
        values = [row for row in call.of("input", "output") if evidence.is_known(row) and not evidence.wrong[row]]
        if call.children or held or not values:
            continue
        worst = max(max(evidence.propagated[row], evidence.base[row]) for row in values)
        given = _largest(pair, call.of("grad_output"))
        if given >= CANCELS * pair.l2 and worst < float("inf"):
            allowed = max(allowed, CANCELLED * worst * given / pair.l2)
    return allowed


def _error_of_parts(pair: JudgedPair) -> float:
    """A norm enlarges small rows. What its input sums may be further off than the sum, which large rows dominate: where
    a row consists of one of the parts, it is off by as much as that part is."""
    evidence = pair.evidence
    kinds = {"output": "input", "grad_input": "grad_output"}
    if pair.kind not in kinds or pair.is_made_by_container or pair.has_matrix or evidence.pairs.isolated is not None:
        return 0.0
    parts = _parts(evidence, pair.sources_of(kinds[pair.kind]))
    errors = [evidence.propagated[part] for part in parts if not evidence.wrong[part] and evidence.is_known(part)]
    return ENLARGED * max((error for error in errors if error < float("inf")), default=0.0)


def _parts(evidence: Evidence, rows: Sequence[int]) -> set[int]:
    """Return what some records were made from, above those that only hand them on."""
    parts: set[int] = set()
    seen = open_rows = set(rows)
    while open_rows:
        above = {(row, source) for row in open_rows for source in evidence.structure.sources(row) if source < row}
        same = {source for row, source in above if _are_same(evidence, row, source)} - seen
        parts |= {source for _, source in above}
        seen, open_rows = seen | same, same
    return parts


def _are_same(evidence: Evidence, row: int, source: int) -> bool:
    return evidence.error[row] == evidence.error[source] and evidence.l2[row] == evidence.l2[source]


def _slope(pair: JudgedPair, call: CallRows) -> float:
    given = _largest(pair, call.of("input"))
    return _largest(pair, call.of("output")) / given if given > 0 and not call.children else 0.0


def _largest(pair: JudgedPair, rows: Iterable[int]) -> float:
    """Return the largest norm of some records of numbers that are rounded."""
    evidence = pair.evidence
    return max((evidence.l2[row] for row in rows if evidence.base[row] > 0), default=0.0)
