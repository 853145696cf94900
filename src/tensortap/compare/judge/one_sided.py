"""Gradients that one side alone has: nothing that both have is off, and yet it is not the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from tensortap.compare.judge.counterparts import Counterparts, Pass, pass_of
from tensortap.compare.judge.isolated import Isolation
from tensortap.compare.judge.structure import Call, Spot, Structure
from tensortap.compare.matching import Matched
from tensortap.core.records import GRADIENT_KINDS, Finding, Key

__all__ = ["Parameters", "extra", "guessed_modules", "lost_in_free_run", "lost_in_isolation", "without_gradient"]

_MOST = 1000
Parameters = Collection[tuple[str, str]]
"""The candidate's own parameters, by the module in the reference's names and the name there."""


def lost_in_isolation(
    matched: Matched, structure: Structure, isolation: Isolation, parameters: Parameters
) -> dict[int, Finding]:
    """Where gradients end, by the reference's row."""
    side = matched.reference
    unfinished = _unfinished(matched)
    lost = [(row, side.key(row)) for row in matched.alignment.only_reference.tolist()]
    meant = [(row, key) for row, key in lost if key.step != unfinished and _is_meant(key, parameters)]
    return _ends(matched, structure, isolation, meant)


def without_gradient(matched: Matched, structure: Structure, free: bool = True) -> set[Spot]:
    """Calls that got no gradient at an output at which the reference has one, though others came in the same pass. In a
    `free` run only if `lost_in_free_run` would tell of it: else nobody would."""
    if not len(matched.alignment.only_reference):
        return set()
    expected = Counterparts(matched).expected if free else None
    lost = _certain(matched, _lost_rows(matched, structure, None, ("grad_output",), expected))
    return {(pass_of(matched.reference, row), key.module, key.call) for row, key in lost}


def lost_in_free_run(
    matched: Matched, structure: Structure, deprived: Collection[Spot], parameters: Parameters | None = None
) -> dict[int, Finding]:
    """The same of two runs of which less is known. A gradient counts as lost only if its module ran on both sides, if
    others of its kind came in the same pass, and if parameters go without theirs or get a wrong one for it (`deprived`
    calls): else the runs may just have been captured or called differently. `parameters` are None if the candidate's
    are not known."""
    if not len(matched.alignment.only_reference):
        return {}
    expected = Counterparts(matched, parameters).expected
    lost = _certain(matched, _lost_rows(matched, structure, parameters, expected=expected))
    needed = "param_grad" if "param_grad" in structure.kind else "grad_output"
    if not any(key.kind == needed for _, key in lost):
        lost = [(row, key) for row, key in lost if (pass_of(matched.reference, row), key.module, key.call) in deprived]
    if not lost:
        return {}
    callers = {
        (call.scope[1], call.scope[2], call.module, call.number): None if call.parent is None else call.parent.module
        for call in structure.calls.values()
    }
    first = lost[0]
    return _ends(matched, structure, Isolation(callers=callers), lost) or {first[0]: _finding(matched, *first, None)}


def extra(matched: Matched, structure: Structure) -> dict[tuple[int, float], Finding]:
    """Parameters that get a gradient only in the candidate, though their module ran on both sides and others got
    theirs: one for each module, by the step and the place in the reference's order where it came."""
    left, right, alignment = matched.reference, matched.candidate, matched.alignment
    order = np.argsort(alignment.candidate)
    found: dict[tuple[int, float], Finding] = {}
    named: set[tuple[int, str]] = set()
    for row, rank, key in _extra_rows(matched, structure):
        if not matched.is_certain(key.module) or (rank, key.module) in named:
            continue
        if len(named) == _MOST:
            break
        named.add((rank, key.module))
        after = int(np.searchsorted(alignment.candidate[order], row))
        before = -1.0 if not after else float(left.seq[alignment.reference[order[after - 1]]])
        place = key.step, before + 0.5 + len(found) * 1e-6  # behind what came before it on the candidate's side
        theirs = matched.names.get(key.module)
        found[place] = Finding(
            key, rank, right.cls[row], "extra", None, 0.0, "the reference has none", True, counterpart=theirs
        )
    return found


def guessed_modules(matched: Matched, structure: Structure) -> list[str]:
    """Modules of the reference whose parameters get a gradient on one side alone, and whose counterpart is a guess."""
    if matched.plan is None:
        return []
    rows = _lost_rows(matched, structure, None, ("param_grad",), Counterparts(matched).expected)
    names = [key.module for _, key in rows] + [key.module for _, _, key in _extra_rows(matched, structure)]
    return [name for name in dict.fromkeys(names) if not matched.is_certain(name)]


def _extra_rows(matched: Matched, structure: Structure) -> Iterator[tuple[int, int, Key]]:
    """The candidate's gradients of parameters that the reference should have, and has not: row, rank and identity in
    the reference's terms."""
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
        if key.step != unfinished and scope in came and _ran(matched, structure, scope, key):
            yield row, rank, key


def _lost_rows(
    matched: Matched,
    structure: Structure,
    parameters: Parameters | None,
    kinds: Collection[str] = GRADIENT_KINDS,
    expected: Callable[[Key], bool] | None = None,
) -> list[tuple[int, Key]]:
    """The reference's gradients that the candidate should have, and has not."""
    left, unfinished = matched.reference, _unfinished(matched)
    alone = matched.alignment.only_reference
    rows = alone[left.kind.among(kinds)[alone]]
    came = set(zip(structure.scope, structure.kind, strict=True)) if len(rows) else set()
    lost = []
    for row in rows.tolist():
        key, scope = left.key(row), pass_of(left, row)
        if (scope, key.kind) not in came or key.step == unfinished or not _is_meant(key, parameters):
            continue
        if _ran(matched, structure, scope, key) and (expected is None or expected(key)):
            lost.append((row, key))
    return lost


def _certain(matched: Matched, lost: Sequence[tuple[int, Key]]) -> list[tuple[int, Key]]:
    """Without those of modules whose counterpart is a guess."""
    return [(row, key) for row, key in lost if matched.is_certain(key.module)]


def _ran(matched: Matched, structure: Structure, scope: Pass, key: Key) -> bool:
    """Whether the call that a gradient is of ran on both sides; of parameters that a mapping has placed, at least the
    module around, which may pack them otherwise."""
    calls = structure.calls_of_module.get((scope, key.module), ())
    if key.kind == "param_grad":
        if any(call.of("output") for call in calls) or matched.plan is None:
            return any(call.of("output") for call in calls)
        return bool(key.module) and _ran(matched, structure, scope, key._replace(module=key.module.rpartition(".")[0]))
    outputs = [call for call in calls if call.number == key.call and call.of("output")]
    if matched.plan is None:
        return bool(outputs)
    value = key.kind.removeprefix("grad_")  # which may have no counterpart of its own, as an argument more
    return any(structure.path[row] == key.path for call in outputs for row in call.of(value))


def _unfinished(matched: Matched) -> int | None:
    """The reference's number of the step in which the candidate was broken off."""
    if matched.candidate.run.finished:
        return None
    return int(matched.reference.step[matched.alignment.reference].max(initial=-1))


def _is_meant(key: Key, parameters: Parameters | None) -> bool:
    """Whether it is a gradient at all, and not of a parameter that is kept elsewhere, as in a part of the module."""
    if key.phase != "backward" or "~" in key.path:
        return False
    return key.kind != "param_grad" or parameters is None or (key.module, key.path) in parameters


def _ends(
    matched: Matched, structure: Structure, isolation: Isolation, lost: Sequence[tuple[int, Key]]
) -> dict[int, Finding]:
    missing = {key for _, key in lost}
    found: dict[int, Finding] = {}
    named: set[str] = set()
    for row, key in lost:
        module = _end_of(key, structure, isolation, missing, int(matched.reference.rank[row]))
        if module is None or {module, key.module} & named:
            continue
        # What is lost inside a module never gets to what is before it: the ones around are not to blame.
        if key.kind != "param_grad" and any(not module or name.startswith(f"{module}.") for name in named):
            continue
        named.add(module)
        found[row] = _finding(matched, row, key, module if module != key.module else None)
    return found


def _finding(matched: Matched, row: int, key: Key, container: str | None) -> Finding:
    return Finding(
        key=key,
        rank=int(matched.reference.rank[row]),
        cls=matched.reference.cls[row],
        status="missing",
        difference=None,
        tolerance=0.0,
        rule="the reference has one",
        inputs_matched=True,
        container=container,
        counterpart=matched.names.get(key.module if container is None else container),
    )


def _end_of(key: Key, structure: Structure, isolation: Isolation, missing: Collection[Key], rank: int) -> str | None:
    """The module that lost a gradient itself; None if it never got as far."""
    scope = rank, key.step, key.micro
    calls = [
        c
        for c in structure.calls_of_module.get((scope, key.module), ())
        if key.kind == "param_grad" or c.number == key.call
    ]
    if key.kind == "grad_output":
        if any(_sent_nothing(user, missing) for user in _users_of(key, structure, calls)):
            return None
        caller = isolation.callers.get((key.step, key.micro, key.module, key.call))
        around = () if caller is None else structure.calls_of_module.get((scope, caller), ())
        if not any(call.of("grad_output") for call in around):
            return None
        return _cut_at_output(key, calls, structure, isolation) or caller
    if not any(call.of("grad_output") for call in calls):
        return None
    if key.kind == "grad_input" and key._replace(phase="forward", kind="input") in isolation.cut_off:
        cutter = isolation.cutter(calls[0], key.path, structure)
        return key.module if cutter is None else cutter
    return key.module


def _cut_at_output(key: Key, calls: Sequence[Call], structure: Structure, isolation: Isolation) -> str | None:
    """Who took the past from an output, if anybody did: the module that returns it, or where its inputs come from."""
    for call in calls:
        if isolation.is_cut_off(call, "output", key.path):
            return call.module
        for row in call.of("input"):
            if isolation.is_cut_off(call, "input", structure.path[row]):
                return isolation.cutter(call, structure.path[row], structure)
    return None


def _users_of(key: Key, structure: Structure, calls: Sequence[Call]) -> list[Call]:
    """The calls that were given the output whose gradient is meant."""
    rows = [row for call in calls for row in call.of("output") if structure.path[row] == key.path]
    return [user for row in rows for user in structure.consumers.get(structure.tensor[row], ())]


def _sent_nothing(user: Call, missing: Collection[Key]) -> bool:
    _, step, micro = user.scope
    place = step, micro, "backward", user.module, user.number, "grad_input"
    return any(key[:6] == place for key in missing)
