"""Findings of a run whose modules were all fed from the reference: nothing is handed on, so each fault is its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.findings import Case, Place, place_of
from tensortap.compare.judge.judging import Judgement
from tensortap.compare.judge.structure import Call, Structure
from tensortap.core.records import WRONG_STATUSES, Finding, Key

__all__ = ["Isolation", "isolated_findings"]


@dataclass(frozen=True)
class Isolation:
    """What is known of a run whose modules were fed from the reference. Names are the reference's."""

    forced: Collection[int] = ()
    """The candidate's rows that the reference's values took the place of, once they were measured."""
    used_inside: Collection[int] = ()
    """Its rows of gradients at an output that the module itself uses further: a part of them is its own."""
    same: Collection[Sequence[int]] = ()
    """Its rows of one gradient at an output that several calls return as it is, the innermost first."""
    callers: Mapping[tuple[int, int, str, int], str | None] = field(default_factory=dict)
    """By step, micro step, module and number: whose code made the call; None if it came from outside the model."""
    cut_off: Collection[Key] = ()
    """Inputs that took no part in autograd; and outputs that did not, though something they were made from did."""
    tied: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Modules whose parameters a module uses too."""

    def caller(self, call: Call) -> str | None:
        _, step, micro = call.scope
        return self.callers.get((step, micro, call.module, call.number))

    def is_cut_off(self, call: Call, kind: str, path: str) -> bool:
        _, step, micro = call.scope
        return Key(step, micro, "forward", call.module, call.number, kind, path) in self.cut_off

    def cutter(self, call: Call, path: str, structure: Structure) -> str | None:
        """Whose code took the past from an input: the module that returned it so, or whoever made the call with it."""
        tensors = {structure.tensor[row] for row in call.of("input") if structure.path[row] == path}
        makers = [
            (maker, structure.path[row])
            for tensor in tensors
            for maker, row in structure.makers.get(tensor, ())
            if maker.end < call.begin  # one that ran inside only hands it on
        ]
        for maker, output in reversed(makers):
            if self.is_cut_off(maker, "output", output):
                return maker.module
        for maker, _ in makers[:1]:
            paths = [structure.path[row] for row in maker.of("input")]
            # Some inputs take no part by right, such as tables of angles; if none does, the past ended further back.
            if paths and all(self.is_cut_off(maker, "input", each) for each in paths):
                return self.cutter(maker, paths[0], structure)
        # Whoever made the call may itself have been given the value without a past; what the model is given has none.
        around = call.parent
        if around is not None and around.parent is not None and around.module == self.caller(call):
            for row in around.of("input"):
                if structure.tensor[row] in tensors and self.is_cut_off(around, "input", structure.path[row]):
                    return self.cutter(around, structure.path[row], structure)
        return self.caller(call)


@dataclass(frozen=True)
class _Faults:
    """Lays wrong rows to modules."""

    judgement: Judgement
    structure: Structure
    isolation: Isolation
    forced: npt.NDArray[np.bool_]
    own: Collection[int]
    """Rows that `used_inside` means."""
    same: Mapping[int, Sequence[int]]
    """By row: all those that `same` has together with it."""
    lost: Collection[Key]
    """What only the reference has."""
    explained: bool
    """Whether it is told where these end."""

    def place(self, row: int) -> Place:
        """Whose doing a wrong row is. What goes into a module, or comes back to it, was made by the code that calls."""
        kind, call = self.structure.kind[row], self.structure.call_of(row)
        if kind == "param_grad" and (reader := self._reader(row)) is not None:
            return Place(reader, True)
        if call is None or kind not in ("input", "grad_output"):
            return place_of(row, self.structure, self.judgement)
        if kind == "input":
            caller = self.isolation.caller(call)
            return Place(caller, None if caller is None else True)
        tensors = self.structure.returned(row, call)
        users = [user for tensor in tensors for user in self.structure.consumers.get(tensor, ()) if user is not call]
        if (culprit := self._loser(tensors, users) or self._changer(users)) is not None:
            return Place(culprit, True)
        rows = self.same.get(row, (row,))
        outermost = self.structure.call_of(rows[-1]) or call
        caller = self.isolation.caller(outermost)
        own = next((each for each in rows if each in self.own), None)
        if own is not None and (caller is not None or own != rows[-1]):
            return Place(self.structure.module[own], True)
        if caller is None:
            return Place(outermost.module, None, enters=True)
        # A user of the output whose own gradient was not replaced may have sent the wrong one just as well.
        unforced = [user for user in users if not any(self.forced[r] for r in user.of("grad_input"))]
        if any(user in unforced for user in self.structure.users(row, call)):
            return place_of(row, self.structure, self.judgement)
        return Place(caller, True)

    def follows(self, row: int) -> bool:
        """Whether a wrong row only follows from what is not among the pairs: a gradient that never came, or parameters
        that are recorded with another module."""
        kind, module, (rank, step, _) = (
            self.structure.kind[row],
            self.structure.module[row],
            self.structure.scope[row],
        )
        if kind == "param":
            calls = self.structure.calls_in_step.get((rank, step, module), ())
            reached = any(call.of("grad_output") for call in calls)
            return not reached and any(
                (key.step, key.module, key.kind, key.path) == (step, module, "param_grad", self.structure.path[row])
                for key in self.lost
            )
        if kind == "param_grad" and self.explained:
            users = {module, *(user for user, owners in self.isolation.tied.items() if module in owners)}
            return any((key.step, key.kind) == (step, "grad_output") and key.module in users for key in self.lost)
        tied = [
            state
            for owner in self.isolation.tied.get(module, ())
            for state in self.structure.parameters_of.get((rank, step, owner), ())
        ]
        return any(self._wrong(state) for state in tied)

    def lacks_a_call(self, row: int) -> bool:
        """Whether a gradient is that of a parameter which the reference has used in further calls."""
        if self.structure.kind[row] != "param_grad":
            return False
        scope, module = self.structure.scope[row], self.structure.module[row]
        users = {self._reader(row) or module, *(u for u, owners in self.isolation.tied.items() if module in owners)}
        return any(
            (scope, user, number) not in self.structure.calls
            for user in users
            for number in self._lost_calls.get((*scope[1:], user), ())
        )

    @cached_property
    def _lost_calls(self) -> dict[tuple[int, int, str], set[int]]:
        """Numbers of the calls whose outputs only the reference has, by step, micro step and module."""
        found: dict[tuple[int, int, str], set[int]] = {}
        for key in self.lost:
            if key.kind == "output":
                found.setdefault((key.step, key.micro, key.module), set()).add(key.call)
        return found

    def _reader(self, row: int) -> str | None:
        """The module that uses the parameters of one which is never called itself."""
        calls = self.structure.users_of_own(row)
        return calls[0].module if calls and calls[0].module != self.structure.module[row] else None

    def _loser(self, tensors: Collection[int], users: Collection[Call]) -> str | None:
        """A user that sent no gradient back where the reference's did; or whoever gave it a value without a past."""
        for user in users:
            _, step, micro = user.scope
            for given in user.of("input"):
                if self.structure.tensor[given] not in tensors:
                    continue
                path = self.structure.path[given]
                key = Key(step, micro, "forward", user.module, user.number, "input", path)
                if key._replace(phase="backward", kind="grad_input") in self.lost:
                    cut_off = key in self.isolation.cut_off
                    return self.isolation.cutter(user, path, self.structure) if cut_off else user.module
        return None

    def _changer(self, users: Collection[Call]) -> str | None:
        """A user that should hand its input on as it is, and does not."""
        for user in users:
            if self.structure.hands_on(user) and any(self._wrong(row) for row in user.of("output")):
                return user.module
        return None

    def _wrong(self, row: int) -> bool:
        return self.judgement.status[row] in WRONG_STATUSES


def isolated_findings(
    case: Case,
    isolation: Isolation,
    rows: npt.NDArray[np.int64],
    lost: Collection[Key],
    explained: bool,
) -> dict[int, Finding]:
    """For each module at fault, on each rank, the earliest pair that shows it.

    `rows` are the candidate's rows of the pairs, `lost` what only the reference has, `explained` whether it is told
    where the gradients among these end.
    """
    numbers = rows.tolist()
    forced = np.array([row in isolation.forced for row in numbers], bool)
    own = {pair for pair, row in enumerate(numbers) if row in isolation.used_inside}
    structure = case.structure
    faults = _Faults(case.judgement, structure, isolation, forced, own, _same(isolation, numbers), lost, explained)
    found: dict[int, Finding] = {}
    known: set[tuple[int, str]] = set()
    optimizers: set[int] = set()
    misled = _misled(case, lost if explained else ())
    # Without the gradients at inputs, what a module at fault sends back reaches the code around it as it is.
    feeds_back = "grad_input" in set(structure.kind)
    births = [row for row in case.births() if not faults.follows(row)]
    births = [row for row in births if not _stepped(row, structure) or not _is_misled(row, structure, misled)]
    # Whoever left out a call is found by what it made instead; only if there is nothing of that, this tells of it.
    births = [row for row in births if not faults.lacks_a_call(row)] or births
    for row in births:
        place = faults.place(row)
        module, rank = case.blamed(row, place), structure.scope[row][0]
        stepped = _stepped(row, structure)
        if (rank, module) in known or (stepped and rank in optimizers):
            continue
        if structure.kind[row] == "grad_output" and not feeds_back and _inside(module, rank, known):
            continue
        if stepped:  # the optimizer is one thing, whichever parameters it moves wrongly
            optimizers.add(rank)
        known.add((rank, module))
        found[row] = case.finding(row, place, row)
    return found


def _stepped(row: int, structure: Structure) -> bool:
    """Whether it is a parameter as an optimizer has left it."""
    return structure.kind[row] == "param" and structure.number[row] > 0


def _is_misled(row: int, structure: Structure, misled: Mapping[int, int]) -> bool:
    rank, step, _ = structure.scope[row]
    return step >= misled.get(rank, step + 1)


def _misled(case: Case, lost: Collection[Key]) -> dict[int, int]:
    """By rank, the first step in which the optimizer was given a wrong gradient, or not all of them. If their norm is
    clipped, that moves every parameter, and what it remembers moves them in later steps, too: it may well be right."""
    structure, status = case.structure, case.judgement.status
    wrong = [row for row, kind in enumerate(structure.kind) if kind == "param_grad" and status[row] in WRONG_STATUSES]
    spots = [structure.scope[row][:2] for row in wrong]
    ranks = {structure.scope[row][0] for row in case.judgement.born}
    spots += [(rank, key.step) for key in lost if key.kind == "param_grad" for rank in ranks]
    first: dict[int, int] = {}
    for rank, step in spots:
        first[rank] = min(step, first.get(rank, step))
    return first


def _same(isolation: Isolation, numbers: Sequence[int]) -> dict[int, Sequence[int]]:
    """By pair, the pairs of the very same gradient, the innermost call's first."""
    pair_of = {row: pair for pair, row in enumerate(numbers)} if isolation.same else {}
    groups = [[pair_of[row] for row in rows if row in pair_of] for rows in isolation.same]
    return {pair: group for group in groups for pair in group}


def _inside(module: str, rank: int, known: Collection[tuple[int, str]]) -> bool:
    """Whether one of the modules that are known to be at fault is a part of this one."""
    return any(r == rank and (not module or name.startswith(f"{module}.")) for r, name in known)
