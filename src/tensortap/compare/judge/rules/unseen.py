"""Rounding that no record shows: of several layers that share one record, inside code that computes in a short dtype,
and of what cancels out in a loss.

As those of `conditioning`, these rules are asked only of pairs that no other rule allows: few pairs need them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensortap.compare.judge.rules.evidence import Evidence, JudgedPair
from tensortap.compare.judge.rules.margins import ENLARGED, MOST_ASSUMED, SHORT
from tensortap.compare.judge.rules.rounding import EPSILON, Policy
from tensortap.core.records import GRADIENT_KINDS

__all__ = [
    "CANCELLED_LOSS",
    "CANCELS_INSIDE",
    "EXPONENTS_OF_LOSS",
    "FITTED",
    "KINKS_INSIDE",
    "MOVED_WITHIN_STEP",
    "OWN_SUMS",
    "READ_BY_CODE",
    "SATURATED",
    "SHORT_INSIDE",
    "SHORT_NORM",
    "SHORT_PRODUCT",
    "STATISTICS_INSIDE",
    "UNDERFLOWS",
    "UNEVEN_STEPS",
    "UNRECORDED_TERMS",
    "UNSEEN_PRODUCT",
    "doubt_unseen_code",
    "explain_by_unseen_code",
]

STATISTICS_INSIDE = "rounding of the statistics of norms that only one record of the model covers"
SHORT_INSIDE = "code whose steps were not recorded computes in a short dtype"
SHORT_PRODUCT = "rounding of the short dtype in which its product is computed"
UNRECORDED_TERMS = "rounding of what it sums, which was not recorded"
UNSEEN_PRODUCT = "rounding of the short dtype in which code multiplies by matrices of modules that it does not call"
CANCELLED_LOSS = "rounding of what cancels out in the loss"
EXPONENTS_OF_LOSS = "error of the exponents in a loss"
KINKS_INSIDE = "activations inside code of which one record covers several layers may have crossed a kink"
UNDERFLOWS = "its numbers are below the least one of a dtype, and become zero there"
FITTED = "little is left of a loss whose targets are met, and rounding of the outputs is much of it"
UNEVEN_STEPS = "many elements of its gradient are nearly zero, and noise decides the steps of these"
SHORT_NORM = "rounding of the short dtype in which the norm is kept by which gradients are clipped"
MOVED_WITHIN_STEP = "error of parameters that changed within the step, after they were recorded"
READ_BY_CODE = "error of the values that the code around a module reads"
CANCELS_INSIDE = "rounding of what it sums, which was not recorded, beside the gradient of its module's matrix"
SATURATED = "error that came in, of large numbers that code takes bounded functions of"
OWN_SUMS = "rounding of sums over positions inside the own code of a module"

_OF_EACH_NORM = 2.0
"""Times the usual rounding that each norm adds. In right pairs of networks with 20 to 36 norms it was up to 1.3, unless
some of these had two positions only."""
_OF_TWO_SIDES = 2.0
"""Epsilons by which two short numbers differ that both sides made in several sums, each of which is rounded."""
_OF_A_COLUMN = 4.0
"""Times the rounding of a mean column of a matrix's gradient that the gradient of its bias may be off by."""
_ROUNDINGS_OF_LOSS = 4.0
"""Epsilons by which a probability may be off: two sides, each with an exponential and a division."""
_PART_OF_STEP = 1 / 4
"""Part of a step by which a parameter may be off if one in 64 elements goes the other way."""
_MUCH_LARGER = 8.0
"""Times that numbers are larger than what code makes of them, from which on its functions are bounded."""
_TIMES_EXPONENT = 4.0
"""Times the mean error of an exponent by which exponentials may be off: large ones are further off than the mean."""
_BY_KINKS, _SEVERAL = 2.0, 2
"""Times the root of an activation's error by which kinks move a gradient; and layers that share a record."""
_SAME_NUMBER = 1e-6
"""Relative difference of norms up to which all elements of a record are one number."""
_ALONG = 0.9
"""Share of an error that rounding may have along the tensor itself. Of a wrong factor, all of it is."""
_LEAST_TENSOR = 64
"""Elements that it takes to tell."""


def explain_by_unseen_code(pair: JudgedPair, error: float) -> str:
    """Return the rule that allows an error; empty if none does."""
    if pair.policy.fixed or not pair.l2 > 0:
        return ""
    for name, amount in _AMOUNTS:
        if error <= amount(pair):
            return name
    return ""


def doubt_unseen_code(pair: JudgedPair, error: float) -> str:
    """Return why a pair beyond its tolerance may still be right; empty if it is wrong."""
    if pair.policy.fixed or not pair.l2 > 0:
        return ""
    if len(pair.evidence.pairs.underflow) and error <= float(pair.evidence.pairs.underflow[pair.row]):
        return UNDERFLOWS
    if error <= _saturated_code(pair):
        return SATURATED
    if _may_be_fitted(pair, error):
        return FITTED
    if _may_be_uneven_steps(pair, error):
        return UNEVEN_STEPS
    if error <= _kinks_inside(pair):
        return KINKS_INSIDE
    return SHORT_INSIDE if _is_doubtful_inside(pair, error) else ""


def _may_be_fitted(pair: JudgedPair, error: float) -> bool:
    """Whether a loss sends back what is left of its targets, and one side computes in a short dtype: if the model
    meets its targets, little is left, and the rounding of the outputs is much of it. A factor moves all of it along
    itself, which rounding does not do."""
    evidence = pair.evidence
    if not evidence.mixed_rounding or pair.policy.noise is not None or not _is_of_loss(pair):
        return False
    if int(evidence.pairs.elements[pair.row]) < 2 or not len(evidence.pairs.candidate_l2):
        return False
    if error > (1 if evidence.structure.is_at_start(pair.row) else 2):  # a wrong loss shows in the first step
        return False
    return bool(abs(float(evidence.pairs.candidate_l2[pair.row]) / pair.l2 - 1) <= _ALONG * error)


def _may_be_uneven_steps(pair: JudgedPair, error: float) -> bool:
    """Whether a parameter is off by a part of a step, and many elements of its gradient are nearly zero, as under
    inputs that are constant: noise decides their step. Summaries do not show how many."""
    evidence = pair.evidence
    if pair.kind != "param" or evidence.pairs.is_set_differently(pair.row):
        return False
    step, gradients = evidence.structure.scope[pair.row][1], evidence.optimizer.so_far(pair.row)
    if not evidence.optimizer.noise(pair.row, pair.sources) or gradients.worst_share(step) is not None:
        return False
    return gradients.are_uneven(step) and error <= _PART_OF_STEP * evidence.step_size(pair.row)


def _kinks_inside(pair: JudgedPair) -> float:
    """Where activations that no record shows cross a kink, gradients jump: by about the root of what these are off by,
    in each layer that they pass. The records around show the latter. One of n may cross, however little they are off.

    Gradients of parameters that belong to other modules than the one that was called are meant, as in a compiled model.
    """
    evidence, structure = pair.evidence, pair.evidence.structure
    if pair.kind != "param_grad" or pair.base >= SHORT:
        return 0.0
    calls = [call for call in structure.users_of_own(pair.row) if call.module != structure.module[pair.row]]
    around = [row for call in calls for row in call.of("input", "output") if evidence.base[row] > 0]
    known = [evidence.error[row] for row in around if evidence.is_known(row) and not evidence.wrong[row]]
    layers = {structure.module[row] for row in pair.held_inside}
    if not known or len(layers) < _SEVERAL:
        return 0.0
    off = (1 + len(layers)) * max(*known, EPSILON["float32"])
    one = 1 / max(int(evidence.pairs.elements[row]) for row in around)
    return float(_BY_KINKS * max(off, one) ** 0.5)


def _cancels_inside(pair: JudgedPair) -> float:
    """A vector's gradient may be zero in theory, as that of a key's bias. In a layer that runs unseen, what it sums was
    not recorded, but the gradient of the matrix of its module sums the same, times each input: its mean column shows
    how much rounding is."""
    evidence, structure = pair.evidence, pair.evidence.structure
    place = structure.scope[pair.row], structure.module[pair.row]
    if pair.kind != "param_grad" or not pair.is_vector or structure.calls_of_module.get(place):
        return 0.0
    own = structure.own_gradients.get(place, ())
    matrices = [row for row in own if evidence.pairs.dimensions[row] > 1 and not evidence.wrong[row]]
    sizes, elements = evidence.pairs.l2, evidence.pairs.elements
    columns = [float(sizes[row]) / max(1.0, elements[row] / elements[pair.row]) ** 0.5 for row in matrices]
    rounding = _OF_A_COLUMN * max(pair.base, evidence.short_rounding) * max(columns, default=0.0) / pair.l2
    return rounding if rounding >= 1 else 0.0  # all of it is rounding


def _is_doubtful_inside(pair: JudgedPair, error: float) -> bool:
    """Whether code that works in a short dtype on both sides, and keeps its result in a longer one, may be off by this.

    Code that computes the same in another way rounds at other places. Only measured noise shows by how much. A factor
    moves all elements along the tensor, which rounding does not do.
    """
    evidence = pair.evidence
    if pair.base >= SHORT or pair.policy.noise is not None:
        return False
    short = evidence.short_rounding if evidence.short_rounding and _multiplies_unseen(pair) else 0.0
    if not short and pair.is_made_by_container:
        short = max((evidence.base[source] for source in pair.sources if evidence.base[source] >= SHORT), default=0.0)
    if not short or error > short:
        return False
    if int(evidence.pairs.elements[pair.row]) < _LEAST_TENSOR or not len(evidence.pairs.candidate_l2):
        return True
    return bool(abs(float(evidence.pairs.candidate_l2[pair.row]) / pair.l2 - 1) <= _ALONG * error)


def _statistics_inside(pair: JudgedPair) -> float:
    """A compiled model has one record of all its layers. Norms over the batch enlarge rounding, and what each of them
    adds passes through all others."""
    evidence, structure = pair.evidence, pair.evidence.structure
    if pair.kind not in ("output", "grad_input", "buffer") or pair.base >= SHORT:
        return 0.0
    norms = {structure.module[row] for row in pair.held_inside if evidence.has_statistics(structure.class_of(row))}
    return min(MOST_ASSUMED, _OF_EACH_NORM * len(norms) * pair.base)


def _short_product(pair: JudgedPair) -> float:
    """Under autocast, the gradient of a matrix is a product of short numbers that is rounded to their dtype, and then
    kept in a longer one. A module whose output is short casts its input to that dtype, if it is longer. Convolutions
    sum several products, each of which is rounded. A tied parameter has the products of all that use it. Measured noise
    shows how much that is, but for a sum over several calls: each of them is rounded on its own."""
    if pair.kind != "param_grad" or pair.is_vector or pair.base >= SHORT:
        return 0.0
    evidence = pair.evidence
    if pair.policy.noise is not None and len(evidence.structure.users_of_own(pair.row)) < _SEVERAL:
        return 0.0
    uses = [(pair.sources_of("grad_output"), pair.sources_of("input"))]
    uses += [(call.of("grad_output"), call.of("input")) for call in pair.tied_calls]
    products = [given for given, inputs in uses if given and any(evidence.base[row] > 0 for row in inputs)]
    if not products or pair.is_made_by_container:
        return 0.0
    short = max(min(evidence.base[row] for row in given) for given in products)
    several = _OF_TWO_SIDES if evidence.pairs.dimensions[pair.row] > 2 else 1.0
    return several * short if short >= SHORT else 0.0


def _short_norm(pair: JudgedPair) -> float:
    """Gradients in a short dtype have a norm in it. If it lands on another number, the factor by which all gradients
    are clipped is an epsilon off, and then each of them is rounded."""
    return _OF_TWO_SIDES * pair.base if pair.kind == "step_grad" and pair.base >= SHORT else 0.0


def _unseen_product(pair: JudgedPair) -> float:
    """Recurrent cells, and attention by functions, multiply by matrices themselves. Under autocast that is done in a
    short dtype, and no record has to show it. Such code calls modules that own them, or owns several itself."""
    if not pair.evidence.mixed_rounding or pair.base >= SHORT:
        return 0.0
    unseen = _multiplies_unseen(pair) or pair.own_matrices >= _SEVERAL
    return Policy.lengthening(pair.kind) * pair.evidence.mixed_rounding if unseen else 0.0


def _cancelled_loss(pair: JudgedPair) -> float:
    """The gradient of a loss is often a probability less a target. If the model is sure of the target, little is left,
    and the rounding of the probability is large against it. Of a mean over n rows, it is an epsilon / n in each."""
    evidence = pair.evidence
    if pair.kind != "grad_output" or pair.base >= SHORT:
        return 0.0
    elements = evidence.pairs.elements
    if not _is_of_loss(pair):
        return 0.0
    rows = max(1.0, int(elements[pair.row]) / pair.row_length)
    return float(min(MOST_ASSUMED, _ROUNDINGS_OF_LOSS * EPSILON["float32"] / (rows**0.5 * pair.l2)))


def _exponentials_of_loss(pair: JudgedPair) -> float:
    """A loss takes exponentials of what the model returns, as in a softmax. Their relative error is the absolute error
    of the exponents, and so is that of a probability less a target, if little is left of it."""
    evidence = pair.evidence
    call = evidence.structure.call_of(pair.row) if _is_of_loss(pair) else None
    if call is None:
        return 0.0
    isolated, off = evidence.pairs.isolated, 0.0
    for row in call.of("output"):
        distance = evidence.distance[row] if isolated is None else 0.0
        if isolated is not None and isolated.cast[row]:
            distance = evidence.base[row] * evidence.l2[row]
        if not evidence.wrong[row] and distance < float("inf"):
            off = max(off, float(distance / max(1, int(evidence.pairs.elements[row])) ** 0.5))
    return min(MOST_ASSUMED, _TIMES_EXPONENT * off)


def _is_of_loss(pair: JudgedPair) -> bool:
    """Whether it is a gradient that the loss alone sends back: no module uses the output."""
    evidence, structure = pair.evidence, pair.evidence.structure
    if pair.kind != "grad_output":
        return False
    came_in = [row for row in pair.sources_of(*GRADIENT_KINDS) if int(evidence.pairs.elements[row]) > 1]
    if any(evidence.l2[row] != pair.l2 or evidence.error[row] != evidence.error[pair.row] for row in came_in):
        return False  # another gradient of the model came in, not the same one of a module inside
    call = structure.call_of(pair.row)
    return call is not None and not structure.users(pair.row, call)


def _unrecorded_loss(pair: JudgedPair) -> float:
    """Return the error of the last module's gradients whose terms cancel out in the loss, if the gradient at its output
    was not recorded: see `_cancelled_loss`. A bias sums it over all rows, a weight with the inputs of each row."""
    if not _lacks_terms(pair) or pair.base >= SHORT:
        return 0.0
    evidence, structure = pair.evidence, pair.evidence.structure
    calls = structure.users_of_own(pair.row)
    returned = [row for call in calls for row in call.of("output")]
    if not returned or any(structure.consumers.get(structure.tensor[row]) for row in returned):
        return 0.0
    size = 1.0
    if not pair.is_vector:
        inputs = [row for call in calls for row in call.of("input") if evidence.base[row] > 0]
        rows = max(1.0, int(evidence.pairs.elements[returned[0]]) / max(1, structure.row_length(returned[0])))
        size = max((evidence.l2[row] for row in inputs), default=0.0) / float(rows**0.5)
    return min(MOST_ASSUMED, _ROUNDINGS_OF_LOSS * EPSILON["float32"] * size / pair.l2)


def _unrecorded_terms(pair: JudgedPair) -> float:
    """How large the terms of a sum are is only estimated if they were not recorded. Near a minimum they cancel out in
    the gradients of weights, too, from which the estimate is made."""
    if not _lacks_terms(pair) or not pair.is_vector or pair.base >= SHORT:
        return 0.0
    return Policy.lengthening("param_grad") * pair.base


def _lacks_terms(pair: JudgedPair) -> bool:
    """Whether a parameter's gradient has no gradient of an output among its sources: none was recorded."""
    return pair.kind == "param_grad" and not pair.sources_of("grad_output")


def _own_sums(pair: JudgedPair) -> float:
    """A parameter that the code of a container uses, such as the decay of a state-space model, has a gradient that sums
    over time and over positions. Two ways to compute it add the same in other orders, at each of these sums. So does
    the backward of a module with several products in one record, as attention by functions."""
    meant = pair.kind == "param_grad" and (pair.is_made_by_container or _multiplies_unseen(pair))
    several = pair.own_matrices > 0 and (_multiplies_unseen(pair) or pair.own_matrices >= _SEVERAL)
    if not (meant or (pair.kind == "grad_input" and several)):
        return 0.0
    return Policy.lengthening("param_grad") * pair.base if pair.base < SHORT else 0.0


def _saturated_code(pair: JudgedPair) -> float:
    """The own code of a container may take bounded functions of large numbers, as a tanh. What it hands on is off by no
    more than these, in absolute terms, which is much in relation to the rest."""
    evidence = pair.evidence
    if pair.kind not in ("input", "output") or not pair.is_made_by_container or evidence.pairs.isolated is not None:
        return 0.0
    given = [row for row in pair.sources_of("input", "output") if not evidence.wrong[row] and evidence.is_known(row)]
    large = [row for row in given if evidence.l2[row] >= _MUCH_LARGER * pair.l2]
    distance = max((evidence.distance[row] for row in large if evidence.distance[row] < float("inf")), default=0.0)
    return float(ENLARGED * distance / pair.l2)


def _read_by_code(pair: JudgedPair) -> float:
    """The backward of a container's own code multiplies by values of its forward: by what the modules inside return."""
    evidence, structure = pair.evidence, pair.evidence.structure
    call = structure.call_of(pair.row) if pair.kind == "grad_output" and evidence.pairs.isolated is None else None
    if call is None or call.parent is None:
        return 0.0
    read = [row for each in call.parent.children for row in each.of("output")]
    errors = [evidence.propagated[row] for row in read if not evidence.wrong[row] and evidence.is_known(row)]
    return min(MOST_ASSUMED, pair.policy.passed_on(max(errors, default=0.0)))


def _moved_within_step(pair: JudgedPair) -> float:
    """An optimizer that calls the model again, as LBFGS, moves parameters between the forwards of a step. How far off
    they are there was not recorded; after the step it was."""
    evidence, structure = pair.evidence, pair.evidence.structure
    if pair.kind not in ("output", "grad_input") or not evidence.pairs.moved_within_step(pair.row):
        return 0.0
    (rank, step, _), module = structure.scope[pair.row], structure.module[pair.row]
    spots = [(rank, step, module, "param", path, 1) for path in sorted(pair.paths_of_parameters)]
    after = [row for row in map(structure.state.get, spots) if row is not None]
    if any(evidence.pairs.is_set_differently(row) for row in after):
        return 0.0
    errors = [evidence.error[row] for row in after]
    return min(MOST_ASSUMED, pair.policy.passed_on(max((e for e in errors if e < float("inf")), default=0.0)))


def _cancelled_scalar(pair: JudgedPair) -> float:
    """A loss inside the model may be a difference of large numbers, of which little is left if its targets are met. So
    may any other number that code makes of many, as the logarithm of a determinant."""
    if pair.kind != "output" or not _is_one_number(pair.evidence, pair.row):
        return 0.0
    return _error_of_scalar(pair, pair.row, pair.sources)


def _is_one_number(evidence: Evidence, row: int) -> bool:
    """Whether a record is a single number, or one that is repeated: no other has as large a mean magnitude."""
    elements, magnitudes = int(evidence.pairs.elements[row]), evidence.pairs.l1
    if elements < 2 or not len(magnitudes):
        return elements == 1
    return bool(float(magnitudes[row]) >= (1 - _SAME_NUMBER) * elements**0.5 * evidence.l2[row] > 0)


def _error_of_scalar(pair: JudgedPair, row: int, sources: Sequence[int]) -> float:
    """Return the relative error that what a number is made from may cause in it; 0 if little of that cancels out: it is
    then as large as the elements of what it is made from."""
    evidence = pair.evidence
    known = [at for at in sources if evidence.base[at] > 0 and not evidence.wrong[at] and evidence.is_known(at)]
    elements = evidence.pairs.elements
    size = evidence.l2[row] / max(1, int(elements[row])) ** 0.5
    known = [at for at in known if size < evidence.l2[at] / max(1, int(elements[at])) ** 0.5]
    rounding = pair.policy.base("float32", "float32")  # losses are computed in it, also from short numbers
    off = [max(rounding, pair.policy.passed_on(evidence.propagated[at])) * evidence.l2[at] for at in known]
    worst = max((each for each in off if each < float("inf")), default=0.0)
    return min(MOST_ASSUMED, worst / size) if size > 0 else 0.0


def _gradient_of_scalar(pair: JudgedPair) -> float:
    """Gradients of such a loss are what is left of probabilities and targets: they may be off as the loss is."""
    evidence, structure = pair.evidence, pair.evidence.structure
    if pair.kind not in ("grad_output", "param_grad"):
        return 0.0
    calls = structure.users_of_own(pair.row) if pair.kind == "param_grad" else []
    if (own := structure.call_of(pair.row)) is not None and pair.kind == "grad_output" and own.parent is not None:
        calls = [own.parent]
    rows = [row for call in calls if call.children for row in call.of("output")]
    scalars = [row for row in rows if int(evidence.pairs.elements[row]) == 1 and not evidence.wrong[row]]
    return max((_error_of_scalar(pair, row, structure.sources(row)) for row in scalars), default=0.0)


def _multiplies_unseen(pair: JudgedPair) -> bool:
    """Whether the code that made a pair multiplies by matrices of modules that it does not call."""
    return any(pair.evidence.pairs.dimensions[row] > 1 for row in pair.held_inside)


_AMOUNTS = (
    (STATISTICS_INSIDE, _statistics_inside),
    (SHORT_PRODUCT, _short_product),
    (SHORT_NORM, _short_norm),
    (UNSEEN_PRODUCT, _unseen_product),
    (CANCELLED_LOSS, _cancelled_loss),
    (CANCELLED_LOSS, _unrecorded_loss),
    (EXPONENTS_OF_LOSS, _exponentials_of_loss),
    (OWN_SUMS, _own_sums),
    (MOVED_WITHIN_STEP, _moved_within_step),
    (READ_BY_CODE, _read_by_code),
    (SATURATED, lambda pair: min(MOST_ASSUMED, _saturated_code(pair))),
    (CANCELLED_LOSS, _cancelled_scalar),
    (CANCELLED_LOSS, _gradient_of_scalar),
    (UNRECORDED_TERMS, _unrecorded_terms),
    (CANCELS_INSIDE, _cancels_inside),
)
