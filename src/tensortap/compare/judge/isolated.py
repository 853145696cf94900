"""Findings of a run whose modules all ran on the reference's own inputs: no error propagates from one to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tensortap.compare.judge.causes import is_within
from tensortap.compare.judge.checked_pairs import CheckedPairs
from tensortap.compare.judge.consequences import Consequences
from tensortap.compare.judge.findings import FindingBuilder
from tensortap.compare.judge.isolated_attribution import IsolatedAttributor
from tensortap.compare.judge.random_draws import without_out_of_step
from tensortap.compare.judge.structure import Structure
from tensortap.core.records import WRONG_STATUSES, Finding, Key

__all__ = ["isolated_findings"]


def isolated_findings(builder: FindingBuilder, checked: CheckedPairs) -> list[Finding]:
    """Return, for each module at fault on each rank, the earliest pair that shows it."""
    structure, attributor, consequences = builder.structure, IsolatedAttributor(checked), Consequences(checked)
    found: list[Finding] = []
    known: set[tuple[int, str]] = set()
    optimizers: set[int] = set()
    first_wrong_gradient = _first_wrong_gradients(builder, [*checked.only_reference, *checked.only_candidate])
    # Without gradients at inputs, the gradient of a module at fault reaches the container's code unreplaced.
    feeds_back = "grad_input" in set(structure.kind)
    births = [row for row in builder.births() if not consequences.is_consequence(row)]
    births = [
        row
        for row in births
        if not _is_after_step(row, structure) or not _is_misled(row, structure, first_wrong_gradient)
    ] or ([] if checked.explained or checked.has_extra_gradients else births)  # one that nothing else reports
    births = _without_read_attributes(births, builder, checked, attributor)
    births = without_out_of_step(births, structure, builder.class_of, builder.zeros_of)
    # Code that leaves out a call, adds one, or lets a gradient pass is found by its other values; these gradients count
    # only if there are none.
    follow = consequences.has_other_calls, consequences.is_of_other_uses
    births = [row for row in births if not any(each(row) for each in follow)] or births
    for row in births:
        attribution = attributor.attribute(row)
        module, rank = builder.module_to_blame(row, attribution), structure.scope[row][0]
        unmasked = builder.unmasked_call(row, attribution)
        if unmasked is not None and unmasked.parent is not None:
            module = unmasked.parent.module
        after_step = _is_after_step(row, structure)
        if (rank, module) in known or (after_step and rank in optimizers):
            continue
        if structure.kind[row] == "grad_output" and not feeds_back and _inside(module, rank, known):
            continue
        if after_step:  # one finding for the optimizer, however many parameters it moves wrongly
            optimizers.add(rank)
        known.add((rank, module))
        found.append(builder.build(row, attribution, row))
    return found


def _without_read_attributes(
    births: list[int], builder: FindingBuilder, checked: CheckedPairs, attributor: IsolatedAttributor
) -> list[int]:
    """Return the births without those of containers around a wrong module that passes on a tensor by an attribute.

    Such a tensor cannot be replaced by the reference's, so that code which reads it makes something wrong, too.
    """
    holders, structure = set(checked.isolation.holders), builder.structure
    if not holders:
        return births
    blamed = [builder.module_to_blame(row, attributor.attribute(row)) for row in births]
    wrong = {(structure.scope[row][:2], name) for row, name in zip(births, blamed, strict=True) if name in holders}

    def reads_it(row: int, name: str) -> bool:
        return any(
            place == structure.scope[row][:2]
            and is_within(holder, name)
            and any(call.begin < structure.seq[row] for call in checked.calls_in_pass(row, holder))
            for place, holder in wrong
        )

    return [row for row, name in zip(births, blamed, strict=True) if not reads_it(row, name)]


def _is_after_step(row: int, structure: Structure) -> bool:
    """Whether a row is a parameter after an optimizer step, or a gradient that the optimizer got."""
    return structure.kind[row] == "step_grad" or (structure.kind[row] == "param" and structure.number[row] > 0)


def _is_misled(row: int, structure: Structure, first_wrong_gradient: Mapping[int, int]) -> bool:
    """Whether the optimizer worked on wrong gradients in this step or an earlier one."""
    rank, step, _ = structure.scope[row]
    return step >= first_wrong_gradient.get(rank, step + 1)


def _first_wrong_gradients(builder: FindingBuilder, alone: Collection[Key]) -> dict[int, int]:
    """Return by rank the first step in which the optimizer was given a wrong gradient, or one side alone had one.

    If the norm of the gradients is clipped, that moves every parameter; the optimizer's state moves them in later
    steps, too. The optimizer itself may be right.
    """
    structure, status = builder.structure, builder.judgement.status
    wrong = [row for row, kind in enumerate(structure.kind) if kind == "param_grad" and status[row] in WRONG_STATUSES]
    spots = [structure.scope[row][:2] for row in wrong]
    ranks = {structure.scope[row][0] for row in builder.judgement.born}
    spots += [(rank, key.step) for key in alone if key.kind == "param_grad" for rank in ranks]
    first: dict[int, int] = {}
    for rank, step in spots:
        first[rank] = min(step, first.get(rank, step))
    return first


def _inside(module: str, rank: int, known: Collection[tuple[int, str]]) -> bool:
    """Whether a module that is known to be at fault is a part of this one."""
    return any(r == rank and (not module or name.startswith(f"{module}.")) for r, name in known)
