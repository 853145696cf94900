"""Findings for gradients that only one side has, while all pairs may be right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod

import numpy as np

from tensortap.compare.align.distinct import are_among
from tensortap.compare.judge.causes import is_within
from tensortap.compare.judge.counterparts import Counterparts, Pass, pass_of
from tensortap.compare.judge.detached import DetachedKeys, knows_detached
from tensortap.compare.judge.isolation import Isolation
from tensortap.compare.judge.judging import CallsWithoutGradient
from tensortap.compare.judge.loss_terms import lost_terms
from tensortap.compare.judge.newly_detached import find_newly_detached
from tensortap.compare.judge.shared_values import gradients_of_elements, lacks_shared_gradient
from tensortap.compare.judge.structure import CallRows, Ints, Spot, Structure
from tensortap.compare.matched import Matched
from tensortap.core.causes import UNCALLED, Cause
from tensortap.core.records import GRADIENT_KINDS, Finding, Key

__all__ = [
    "Parameters",
    "find_calls_without_gradient",
    "find_extra_gradients",
    "find_lost_term",
    "find_missing_gradients",
    "find_missing_in_isolation",
    "find_uncalled_modules",
    "find_uncertain_modules",
    "without_reordered",
]

_MOST = 1000
Parameters = Collection[tuple[str, str]]
"""The candidate's own parameters, by the module in the reference's names and the name there."""


def find_missing_in_isolation(
    matched: Matched,
    structure: Structure,
    isolation: Isolation,
    parameters: Parameters,
    wrong: Collection[str] = (),
) -> dict[int, Finding]:
    """Find where gradients end in a run on the reference's own inputs. Keys are the reference's rows.

    wrong: modules whose own code makes something wrong of values, which may be why it sends nothing back for some.
    """
    side = matched.reference
    unfinished = _unfinished(matched)
    alone = [(row, side.key(row)) for row in matched.alignment.only_reference.tolist()]
    # A value of another shape, or with tokens in another order, is not replaced, and its gradient is not compared.
    unreplaced = {*np.flatnonzero(matched.measures.reshaped).tolist(), *matched.measures.reordered}
    lost = {key for _, key in alone} | _keys_of(matched, unreplaced)
    missing = [(row, key) for row, key in alone if key.step != unfinished and _is_expected(key, parameters)]
    further = _called_further(matched)
    missing = [(row, key) for row, key in missing if not _lacks_its_value(key, lost)]
    missing = [
        (row, key)
        for row, key in missing
        if (key.step, key.micro, key.module) not in further or key.kind == "param_grad"
    ]
    cuts = _find_cuts(matched, structure, isolation, missing)
    return cuts or _find_ends(matched, structure, isolation, missing, wrong=wrong)


def without_reordered(keys: Collection[Key], matched: Matched) -> set[Key]:
    """Return the keys without gradients of values that a check did not replace, as their tokens are in another order:
    these are not compared."""
    values = _keys_of(matched, matched.measures.reordered)
    return {key for key in keys if key.phase != "backward" or not _lacks_its_value(key, values)}


def _keys_of(matched: Matched, pairs: Collection[int]) -> set[Key]:
    return {matched.reference.key(row) for row in matched.alignment.reference[list(pairs)].tolist()}


def _called_further(matched: Matched) -> set[tuple[int, int, str]]:
    """Return the modules that the candidate calls more often than the reference, with step and micro step.

    They may return the same each time, as a parametrized weight that is read twice. The gradient then comes to the call
    whose value is used, and that need not be one that the reference makes.
    """
    side, alone = matched.candidate, matched.alignment.only_candidate
    keys = map(side.key, alone[side.kind.among(("output",))[alone]].tolist())
    return {(key.step, key.micro, key.module) for key in keys if key.call}


def find_lost_term(matched: Matched, parameters: Parameters) -> dict[int, Finding]:
    """Find a term of the loss that the model returns, and that gets no gradient. Keys are the reference's rows.

    Code outside the model may leave it out, so that no gradient ends inside.
    """
    side, is_term, unfinished = matched.reference, lost_terms(matched), _unfinished(matched)
    alone = [(row, side.key(row)) for row in matched.alignment.only_reference.tolist()]
    lost = {key for _, key in alone}
    for row, key in alone:
        if key.step == unfinished or not _is_expected(key, parameters) or _lacks_its_value(key, lost):
            continue
        if is_term(row, key):
            return {row: _missing_finding(matched, row, key, None)}
    return {}


def find_calls_without_gradient(matched: Matched, structure: Structure, free: bool = True) -> CallsWithoutGradient:
    """Find calls that lack a gradient where the reference has one, while others come in the same pass.

    In a `free` run, return them only if `find_missing_gradients` reports them: nothing else would.
    """
    if not len(matched.alignment.only_reference):
        return CallsWithoutGradient()
    expected = Counterparts(matched).expected if free else None

    missing = _certain(matched, _missing_rows(matched, structure, None, ("grad_output", "grad_input"), expected))

    def lacking(kind: str) -> frozenset[Spot]:
        rows = [(row, key) for row, key in missing if key.kind == kind]
        return frozenset((pass_of(matched.reference, row), key.module, key.call) for row, key in rows)

    return CallsWithoutGradient(lacking("grad_output"), lacking("grad_input"))


def find_missing_gradients(
    matched: Matched, structure: Structure, affected: Collection[Spot], parameters: Parameters | None = None
) -> dict[int, Finding]:
    """Find where gradients end in two free runs. Keys are the reference's rows.

    A gradient counts as missing only if its module ran on both sides and others of its kind came in the same pass.
    In addition, parameters must lack their gradients, or a share of one, or get wrong ones (`affected` calls), or the
    gradient must be that of a term of the loss (`loss_terms.py`). Otherwise the runs may only have been captured or
    called differently.
    `parameters` is None if the candidate's are not known.
    """
    if not len(matched.alignment.only_reference):
        return {}
    expected = Counterparts(matched, parameters).expected
    missing = _certain(matched, _missing_rows(matched, structure, parameters, expected=expected))
    needed = "param_grad" if "param_grad" in structure.kind else "grad_output"
    certain = missing
    if not any(key.kind == needed for _, key in missing):
        side, is_term = matched.reference, lost_terms(matched)
        certain = [
            (row, key)
            for row, key in missing
            if (pass_of(side, row), key.module, key.call) in affected
            or is_term(row, key)
            or _is_share_of_parameter(key, pass_of(side, row), structure)
        ]
        places = {key[:6] for _, key in certain}
        certain = [(row, key) for row, key in missing if not places.isdisjoint(_same_around(key))]
    if not certain:
        return {}
    callers = _CallersInStructure(structure)
    row, key = certain[0]
    isolation = Isolation(callers=callers)
    if knows_detached(matched):
        cut_off = DetachedKeys(matched, {"input": "inputs", "output": "outputs"})
        outside = DetachedKeys(matched, {"output": "outputs_of_detached"})
        isolation = Isolation(callers=callers, cut_off=cut_off, outside=outside)
    by_names = matched.plan is None and not knows_detached(matched)
    ends = _find_cuts(matched, structure, isolation, missing)
    for rows in (certain, missing):
        ends = ends or _find_ends(matched, structure, isolation, rows, by_names)
    return ends or {row: _missing_finding(matched, row, key, None)}


def find_uncalled_modules(matched: Matched, structure: Structure, born: Sequence[Finding]) -> dict[int, Finding]:
    """Find modules that the candidate never calls, among those whose parameters an optimizer moves otherwise: these get
    no gradient. What the module would have added may be too little to show. Keys are the reference's rows."""
    left, right, alone = matched.reference, matched.candidate, matched.alignment.only_reference
    moved = {(each.rank, each.key.module) for each in born if each.cause == Cause.OPTIMIZER}
    uncalled = {name for _, name in moved if name in left.called and name not in right.called}
    found: dict[int, Finding] = {}
    named: set[tuple[int, str]] = set()
    for row in alone[left.kind.among(("param_grad",))[alone]].tolist() if uncalled else ():
        key, rank = left.key(row), int(left.rank[row])
        if key.module not in uncalled or (rank, key.module) not in moved - named:
            continue
        scope = pass_of(left, row)
        around = (name for name in _around(key.module) if structure.calls_of_module.get((scope, name)))
        if (caller := next(around, None)) is not None:
            named.add((rank, key.module))
            found[row] = _missing_finding(matched, row, key, caller, UNCALLED)
    return found


def find_extra_gradients(
    matched: Matched, structure: Structure, explained: bool = False
) -> dict[tuple[int, float], Finding]:
    """Find parameters that get a gradient only in the candidate, while their module ran on both sides and others got
    theirs. There is one finding a module. Keys are its step and its position in the reference's order.

    explained: whether other findings tell why something is used that the reference's model does not use. Then modules
    that are sent no gradient in the reference are right.
    """
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    order = np.argsort(alignment.candidate)
    found: dict[tuple[int, float], Finding] = {}
    named: set[tuple[int, str]] = set()
    for row, rank, key in _extra_rows(matched, structure):
        calls = structure.calls_of_module.get(((rank, key.step, key.micro), key.module), ())
        if explained and not any(call.of("grad_output") for call in calls):
            continue
        if not matched.is_certain(key.module) or (rank, key.module) in named:
            continue
        if len(named) == _MOST:
            break
        named.add((rank, key.module))
        after = int(np.searchsorted(alignment.candidate[order], row))
        before = -1.0 if not after else float(left.seq[alignment.reference[order[after - 1]]])
        place = key.step, before + 0.5 + len(found) * 1e-6  # after the records before it on the candidate's side
        found[place] = Finding(
            key=key,
            rank=rank,
            cls=right.cls[row],
            status="extra",
            cause=Cause.EXTRA_GRADIENT,
            difference=None,
            tolerance=0.0,
            rule="the reference has none",
            inputs_matched=True,
            counterpart=matched.names.get(key.module),
        )
    return found


def find_uncertain_modules(matched: Matched, structure: Structure) -> list[str]:
    """Find modules whose parameters get a gradient on one side alone, and whose counterpart is a guess."""
    if matched.plan is None:
        return []
    rows = _missing_rows(matched, structure, None, ("param_grad",), Counterparts(matched).expected)
    names = [key.module for _, key in rows] + [key.module for _, _, key in _extra_rows(matched, structure)]
    return [name for name in dict.fromkeys(names) if not matched.is_certain(name)]


def _extra_rows(matched: Matched, structure: Structure) -> Iterator[tuple[int, int, Key]]:
    """Yield the candidate's parameter gradients that the reference should have and lacks: row, rank, and identity in
    the reference's names."""
    left, right, alone = matched.reference, matched.candidate, matched.alignment.only_candidate
    if not len(alone):
        return
    rows = alone[right.kind.among(("param_grad",))[alone]]
    counterparts = Counterparts(matched)
    unfinished = None if left.run.finished else int(left.step.max(initial=-1))
    came = {scope for scope, kind in zip(structure.scope, structure.kind, strict=True) if kind == "param_grad"}
    for row in rows.tolist():
        if (place := counterparts.extra(row)) is None:
            continue
        rank, key = place
        scope = rank, key.step, key.micro
        if key.step != unfinished and scope in came and _ran_on_both(matched, structure, scope, key):
            yield row, rank, key


def _missing_rows(
    matched: Matched,
    structure: Structure,
    parameters: Parameters | None,
    kinds: Collection[str] = GRADIENT_KINDS,
    expected: Callable[[Key], bool] | None = None,
) -> list[tuple[int, Key]]:
    """Return the reference's gradients that the candidate should have and lacks."""
    left, unfinished = matched.reference, _unfinished(matched)
    alone = matched.alignment.only_reference
    rows = alone[left.kind.among(kinds)[alone]]
    came = structure.kinds_in_pass if len(rows) else set()
    ran = _ran(matched, rows)
    values = alone[left.kind.among(("input", "output"))[alone]] if len(rows) else alone[:0]
    lost = {left.key(row) for row in values.tolist()}
    missing = []
    for row, has_run in zip(rows.tolist(), ran, strict=True):
        if has_run is False:
            continue
        key, scope = left.key(row), pass_of(left, row)
        if (scope, key.kind) not in came or key.step == unfinished or not _is_expected(key, parameters):
            continue
        if _lacks_its_value(key, lost):
            continue
        if has_run is None and not _ran_on_both(matched, structure, scope, key):
            continue
        if expected is None or expected(key):
            missing.append((row, key))
    return missing


def _lacks_its_value(key: Key, lost: Collection[Key]) -> bool:
    """Whether a gradient is that of a value which the candidate does not return or take, such as attention weights: it
    has no place there. If something reads the value, that shows elsewhere."""
    if key.kind == "param_grad":
        return False
    value = key._replace(phase="forward", kind=key.kind.removeprefix("grad_"), path=key.path.partition("~")[0])
    return value in lost


def _certain(matched: Matched, rows: Sequence[tuple[int, Key]]) -> list[tuple[int, Key]]:
    """Return the rows of modules whose counterpart is not a guess."""
    return [(row, key) for row, key in rows if matched.is_certain(key.module)]


def _ran(matched: Matched, rows: Ints) -> Sequence[bool | None]:
    """Return of gradients whether their calls ran on both sides, in columns; None where names do not show it."""
    return [None] * len(rows) if matched.plan is not None else _have_calls_with(matched, rows, "output")


def _have_calls_with(matched: Matched, rows: Ints, kind: str) -> Sequence[bool | None]:
    """Return of the reference's gradients whether a record of a kind is paired that is of their calls; for a
    parameter's, of any call of its module in that pass. None if that module is never called: the calls of the module
    around it tell."""
    if not len(rows):
        return []
    side, paired = matched.reference, matched.alignment.reference
    wanted = paired[side.kind.among((kind,))[paired]]
    names = ("rank", "step", "pass_number")
    places = [[*(getattr(side, name)[at] for name in names), side.module.codes[at]] for at in (rows, wanted)]
    called = [[*columns, side.call[at]] for columns, at in zip(places, (rows, wanted), strict=True)]
    of_parameters = side.kind.among(("param_grad",))[rows]
    found: list[bool | None] = np.where(of_parameters, are_among(*places), are_among(*called)).tolist()
    # Where the candidate lacks the module, its parameter may have another name.
    uncalled = [module not in side.called and matched.candidate.may_have(module) for module in side.module.at(rows)]
    unknown = of_parameters & np.array(uncalled, bool)
    return [None if is_unknown else has for has, is_unknown in zip(found, unknown.tolist(), strict=True)]


def _calls_reading(matched: Matched, structure: Structure, scope: Pass, module: str) -> list[CallRows]:
    """Return the calls that read a module's parameters: its own, or, of a module that neither side calls, those of the
    module around it."""
    if matched.candidate.may_have(module):
        while module and module not in matched.reference.called and module not in matched.candidate.called:
            module = module.rpartition(".")[0]
    return structure.calls_of_module.get((scope, module), [])


def _ran_on_both(matched: Matched, structure: Structure, scope: Pass, key: Key) -> bool:
    """Return whether the call of a gradient ran on both sides.

    A mapping may place a parameter in a module that packs it differently; then the module around it suffices.
    """
    calls = structure.calls_of_module.get((scope, key.module), ())
    if key.kind == "param_grad":
        if matched.plan is None:
            calls = _calls_reading(matched, structure, scope, key.module)
        if any(call.of("output") for call in calls) or matched.plan is None:
            return any(call.of("output") for call in calls)
        return bool(key.module) and _ran_on_both(
            matched, structure, scope, key._replace(module=key.module.rpartition(".")[0])
        )
    outputs = [call for call in calls if call.number == key.call and call.of("output")]
    if matched.plan is None:
        return bool(outputs)
    value = key.kind.removeprefix("grad_")  # may lack a counterpart, as an additional argument does
    return any(structure.path[row] == key.path for call in outputs for row in call.of(value))


def _is_share_of_parameter(key: Key, scope: Pass, structure: Structure) -> bool:
    """Whether a call that gets no gradient at its output uses a parameter that gets one all the same, by another use
    of it, as a tied one does."""
    if key.kind != "grad_output":
        return False
    calls = [call for call in structure.calls_of_module.get((scope, key.module), ()) if call.number == key.call]
    if not calls or any(call.children or call.of("grad_output") for call in calls):
        return False
    return bool(structure.own_gradients.get((scope, key.module), ()))


def _same_around(key: Key) -> Iterator[tuple[object, ...]]:
    """Yield the place of a gradient, without its path, and for one at an input those of the modules around: what these
    do not send back may end inside."""
    yield key[:6]
    if key.kind == "grad_input":
        yield from (key._replace(module=name)[:6] for name in _around(key.module))


class _CallersInStructure:
    """The modules around calls."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._ranks: dict[int, list[int]] = {}
        for rank, step in structure.kinds_in_step:
            self._ranks.setdefault(step, []).append(rank)

    def get(self, call: tuple[int, int, str, int], /) -> str | None:
        """Return the module that made a call; that of the last rank, if several have it."""
        step, micro, module, number = call
        spots = [((rank, step, micro), module, number) for rank in self._ranks.get(step, ())]
        found = [made for spot in spots if (made := self._structure.calls.get(spot)) is not None]
        if not found:
            return None
        last = max(found, key=lambda made: made.first_row)
        return None if last.parent is None else last.parent.module


def _unfinished(matched: Matched) -> int | None:
    """Return the step, in the reference's numbers, in which the candidate stopped; None if it finished."""
    if matched.candidate.run.finished:
        return None
    return int(matched.reference.step[matched.alignment.reference].max(initial=-1))


def _is_expected(key: Key, parameters: Parameters | None) -> bool:
    """Whether the candidate should have a record: it is a gradient, and not of a parameter that is kept elsewhere."""
    if key.phase != "backward" or "~" in key.path:
        return False
    return key.kind != "param_grad" or parameters is None or (key.module, key.path) in parameters


def _find_ends(
    matched: Matched,
    structure: Structure,
    isolation: Isolation,
    rows: Sequence[tuple[int, Key]],
    by_names: bool = False,
    wrong: Collection[str] = (),
) -> dict[int, Finding]:
    """Return findings for the modules at which gradients end, by the reference's rows.

    by_names: callers are the modules around by name, and it is not known which values are outside the graph. Then
    columns show most of it, without the calls of each step.
    """
    missing = {key[:6] for _, key in rows}
    # Some inputs never need a gradient, such as tables of angles: only one that the reference has can be lost.
    lost = None
    if "grad_input" in matched.reference.kind.words:
        lost = {matched.reference.key(row) for row in matched.alignment.only_reference.tolist()}
    elements = gradients_of_elements(lost or ())
    found: dict[int, Finding] = {}
    named: set[str] = set()
    around: set[str] = set()
    """All modules around those that are named."""
    frozen = matched.settings.loop.frozen_modules if rows else frozenset()
    numbers = np.array([row for row, _ in rows], np.int64)
    reached = _have_calls_with(matched, numbers, "grad_output") if by_names else [None] * len(rows)
    for (row, key), is_reached in zip(rows, reached, strict=True):
        if key.module in named:
            continue
        if named and key.kind != "grad_output" and (*key[:5], "grad_output") in missing:
            continue  # one of its outputs gets none, either
        if (
            by_names
            and key.kind == "grad_output"
            and named
            and all(name in named or name in around for name in _around(key.module))
        ):
            continue  # whichever of these modules called it, it is not to blame
        if key.kind == "grad_output" and key.module in frozen:
            module: str | None = key.module  # nothing that made its output requires a gradient
        elif is_reached is None or key.kind == "grad_output":
            rank = int(matched.reference.rank[row])
            module = _end_of(key, matched, structure, isolation, missing, lost, rank, wrong, elements)
        else:
            module = key.module if is_reached else None
        if module is None or module in named:
            continue
        # A gradient that ends inside a module never reaches the modules before it: containers are not to blame, nor are
        # their own parameters, where the module inside sends nothing back.
        if module in around and (key.kind != "param_grad" or _is_starved(key, module, named, missing, lost)):
            continue
        named.add(module)
        around.update(_around(module))
        found[row] = _missing_finding(matched, row, key, module if module != key.module else None)
    return found


def _is_starved(
    key: Key,
    container: str,
    named: Collection[str],
    missing: Collection[tuple[object, ...]],
    lost: Collection[Key] | None,
) -> bool:
    """Whether a module inside a container is known to cut a gradient off and sends none back, so that what the
    container makes of its own parameters may get none."""
    inside = {module for module in named if is_within(module, container)}
    if lost is None:
        return bool(inside)
    return any(place[:3] == key[:3] and place[3] in inside and place[5] == "grad_input" for place in missing)


def _find_cuts(
    matched: Matched, structure: Structure, isolation: Isolation, rows: Sequence[tuple[int, Key]]
) -> dict[int, Finding]:
    """Return findings for the modules whose own code detached a value, by the reference's rows of gradients that never
    come because of it."""
    if not rows:
        return {}
    cuts = find_newly_detached(matched, structure, isolation, pass_of(matched.reference, rows[0][0]))
    found: dict[int, Finding] = {}
    for cut in cuts:
        of_cut = [(row, key) for row, key in rows if key in cut.gradients]
        row, key = (of_cut or rows)[0]
        if row not in found:
            found[row] = _missing_finding(matched, row, key, cut.module if cut.module != key.module else None)
    return found


def _around(module: str) -> Iterator[str]:
    """Yield the names of the modules around one, from the inside out."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def _missing_finding(
    matched: Matched, row: int, key: Key, container: str | None, rule: str = "the reference has one"
) -> Finding:
    in_container = container is not None and key.kind != "param_grad" and is_within(key.module, container)
    return Finding(
        key=key,
        rank=int(matched.reference.rank[row]),
        cls=matched.reference.cls[row],
        status="missing",
        cause=Cause.MISSING_IN_CONTAINER if in_container else Cause.MISSING_GRADIENT,
        difference=None,
        tolerance=0.0,
        rule=rule,
        inputs_matched=True,
        container=container,
        counterpart=matched.names.get(key.module if container is None else container),
    )


def _end_of(
    key: Key,
    matched: Matched,
    structure: Structure,
    isolation: Isolation,
    missing: Collection[tuple[object, ...]],
    lost: Collection[Key] | None,
    rank: int,
    wrong: Collection[str],
    elements: Sequence[Key],
) -> str | None:
    """Return the module at which a gradient ends; None if it already ended further on.

    missing: all gradients that the candidate should have and lacks, without their paths.
    lost: all that it lacks; None if the reference recorded no gradients at inputs.
    wrong: modules whose own code makes something wrong of values.
    elements: those of the lost gradients that modules send to elements of collections.
    """
    scope = rank, key.step, key.micro
    if key.kind == "param_grad":
        tied = [user for user, owners in isolation.tied.items() if key.module in owners]
        if any(user in matched.reference.called and user not in matched.candidate.called for user in tied):
            return None  # one side alone uses it there
        reached = [c for c in _calls_reading(matched, structure, scope, key.module) if c.of("grad_output")]
        if not reached:
            return None
        return key.module if key.module in matched.settings.loop.frozen_modules else reached[0].module
    calls = [call for call in structure.calls_of_module.get((scope, key.module), ()) if call.number == key.call]
    if key.kind == "grad_output":
        if any(_sent_nothing(user, missing) for user in _users_of(key, structure, calls)):
            return None
        caller = isolation.callers.get((key.step, key.micro, key.module, key.call))
        around = [call.parent for call in calls if call.parent is not None and call.parent.module == caller]
        if not around and caller is not None:
            around = structure.calls_of_module.get((scope, caller), [])
        if not any(call.of("grad_output") for call in around):
            return None
        detacher = _find_detacher(key, calls, structure, isolation, lost)
        if detacher is None and any(lacks_shared_gradient(call, elements, structure) for call in calls):
            return None  # it ended at the module that takes the value from a collection
        if detacher is None and any(_gets_less(call, structure, isolation, missing, wrong) for call in around):
            return None  # the output that it was made for lacks its gradient, too: it ended further on
        if detacher is None and (
            _ends_inside(key, structure, calls, missing) or _is_returned_without(key, structure, calls, missing)
        ):
            return None
        return detacher or caller
    if not any(call.of("grad_output") for call in calls):
        return None
    if wrong and any(_gets_less(call, structure, isolation, missing, wrong) for call in calls):
        return None
    if key._replace(phase="forward", kind="input") in isolation.cut_off:
        cutter = isolation.cutter(calls[0], key.path, structure, lost or ())
        return key.module if cutter is None else cutter
    return None if _ends_further_in(key, structure, calls, lost or ()) else key.module


def _ends_further_in(key: Key, structure: Structure, calls: Sequence[CallRows], lost: Collection[Key]) -> bool:
    """Whether a module inside is given the same input, as an element of a collection that is handed on, and sends no
    gradient back for it, although it gets one."""
    tensor, path = structure.tensor, structure.path
    tensors = {tensor[row] for call in calls for row in call.of("input") if path[row] == key.path}
    users = {
        user for each in tensors for user in structure.consumers.get(each, ()) if is_within(user.module, key.module)
    }
    return any(
        user.of("grad_output") and key._replace(module=user.module, call=user.number, path=path[given]) in lost
        for user in users
        for given in user.of("input")
        if tensor[given] in tensors
    )


def _gets_less(
    call: CallRows,
    structure: Structure,
    isolation: Isolation,
    missing: Collection[tuple[object, ...]],
    wrong: Collection[str],
) -> bool:
    """Whether a call lacks the gradient of an output that is in the graph, and something after it sends none back:
    later calls that are given the output, or code around that makes something wrong. An output that neither is given
    may be used by the code of the call itself."""
    _, step, micro = call.scope
    if (step, micro, "backward", call.module, call.number, "grad_output") not in missing or not isolation.knows_graph:
        return False
    came = {structure.path[row] for row in call.of("grad_output")}
    for row in call.of("output"):
        path, users = structure.path[row], structure.consumers.get(structure.tensor[row], ())
        if path in came or isolation.is_detached(call, path):
            continue
        if any(user.begin > call.end for user in users) or isolation.caller(call) in wrong:
            return True
        if wrong and call.parent is not None and _gets_less(call.parent, structure, isolation, missing, wrong):
            return True
    return False


def _is_returned_without(
    key: Key, structure: Structure, calls: Sequence[CallRows], missing: Collection[tuple[object, ...]]
) -> bool:
    """Whether the module around returns the same tensor, and gets no gradient for it, either: it ended further on.

    Not if that module is the model and the gradient of a loss that it returns comes: its own code makes the loss.
    """
    tensors = {structure.tensor[r] for call in calls for r in call.of("output") if structure.path[r] == key.path}
    around = [call.parent for call in calls if call.parent is not None]
    around = [each for each in around if each.parent is not None or not _gets_a_loss(each, structure)]
    returned = [each for each in around if any(structure.tensor[r] in tensors for r in each.of("output"))]
    return any(
        (each.scope[1], each.scope[2], "backward", each.module, each.number, "grad_output") in missing
        for each in returned
    )


def _gets_a_loss(call: CallRows, structure: Structure) -> bool:
    """Whether a call is sent the gradient of a single number."""
    return any(prod(structure.shape(row)) == 1 for row in call.of("grad_output"))


def _find_detacher(
    key: Key, calls: Sequence[CallRows], structure: Structure, isolation: Isolation, lost: Collection[Key] | None
) -> str | None:
    """Return the module that detached an output: the one that returns it, or one that its inputs come from.

    None if the output is in the graph: then the code that used it has detached it.
    """
    for call in calls:
        if isolation.is_cut_off(call, "output", key.path):
            return call.module
        if not isolation.is_outside(call, key.path):
            continue
        for row in call.of("input"):
            given = key._replace(kind="grad_input", path=structure.path[row])
            if (lost is None or given in lost) and isolation.is_cut_off(call, "input", given.path):
                return isolation.cutter(call, given.path, structure, lost or ())
    return None


def _ends_inside(
    key: Key, structure: Structure, calls: Sequence[CallRows], missing: Collection[tuple[object, ...]]
) -> bool:
    """Whether a module most likely cut off the gradient of its output itself: it uses the output inside as well, as a
    list of hidden states that it returns only for information.

    Then a module inside lacks its gradient, too, while other outputs get theirs, and nothing outside is given this one.
    """
    if not any(call.of("grad_output") for call in calls):
        return False
    if any(not is_within(user.module, key.module) for user in _users_of(key, structure, calls)):
        return False
    place, rows = key[:3], [row for call in calls for row in call.of("output") if structure.path[row] == key.path]
    makers = [maker for row in rows for maker, _ in structure.makers.get(structure.tensor[row], ())]
    inside = [maker for maker in makers if is_within(maker.module, key.module)]
    if inside and not any(child.begin > inside[-1].end for call in calls for child in call.children):
        return False  # nothing inside runs after the module that makes it
    same = {maker.module for maker in makers}
    lacking = (str(other[3]) for other in missing if other[:3] == place and other[5] == "grad_output")
    return any(is_within(module, key.module) and module not in same for module in lacking)


def _users_of(key: Key, structure: Structure, calls: Sequence[CallRows]) -> list[CallRows]:
    """Return the calls that were given the output whose gradient a key is."""
    rows = [row for call in calls for row in call.of("output") if structure.path[row] == key.path]
    return [user for row in rows for user in structure.consumers.get(structure.tensor[row], ())]


def _sent_nothing(user: CallRows, missing: Collection[tuple[object, ...]]) -> bool:
    _, step, micro = user.scope
    return (step, micro, "backward", user.module, user.number, "grad_input") in missing
