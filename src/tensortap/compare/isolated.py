"""Findings of a run whose modules were all fed from the reference: nothing is handed on, so each fault is its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge import Judgement
from tensortap.compare.structure import Call, Structure
from tensortap.compare.verdict import Place, place_of
from tensortap.records import Difference, Finding, Key

__all__ = ["Isolation", "isolated_findings", "lost_gradients"]

Spot = tuple[int, int, str, int]
"""A call: step, micro step, module, number."""
_BAD = ("diverged", "nonfinite", "shape")


@dataclass(frozen=True)
class Isolation:
    """What is known of a run whose modules were fed from the reference. Names are the reference's."""

    forced: Collection[int] = ()
    """The candidate's rows that the reference's values took the place of, once they were measured."""
    used_inside: Collection[int] = ()
    """Its rows of gradients at an output that the module itself uses further: a part of them is its own."""
    callers: Mapping[Spot, str | None] = field(default_factory=dict)
    """The module whose code made a call; None if it came from outside the model."""
    cut_off: Collection[Key] = ()
    """Inputs that took no part in autograd."""
    tied: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Modules whose parameters a module uses too."""


@dataclass(frozen=True)
class _Faults:
    """Lays wrong rows to modules."""

    judgement: Judgement
    structure: Structure
    isolation: Isolation
    forced: npt.NDArray[np.bool_]
    own: Collection[int]
    """Rows that `used_inside` means."""
    lost: Collection[Key]
    """What only the reference has."""

    def place(self, row: int) -> Place:
        """Whose doing a wrong row is. What goes into a module, or comes back to it, was made by the code that calls."""
        kind, call = self.structure.kind[row], self.structure.call_of(row)
        if kind == "param_grad" and (reader := self._reader(row)) is not None:
            return Place(reader, True)
        if call is None or kind not in ("input", "grad_output"):
            return place_of(row, self.structure, self.judgement)
        caller = self._caller(call)
        if kind == "input" or caller is None:
            return Place(caller, None if caller is None else True)
        tensors = self.structure.returned(row, call)
        users = [user for tensor in tensors for user in self.structure.consumers.get(tensor, ()) if user is not call]
        if (culprit := self._loser(tensors, users) or self._changer(users)) is not None:
            return Place(culprit, True)
        if row in self.own:
            return Place(None, True)
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
        tied = [
            state
            for owner in self.isolation.tied.get(module, ())
            for state in self.structure.parameters_of.get((rank, step, owner), ())
        ]
        return any(self._wrong(state) for state in tied)

    def _reader(self, row: int) -> str | None:
        """The module that uses the parameters of one which is never called itself."""
        scope, module = self.structure.scope[row], self.structure.module[row]
        name = module
        while name and (scope, name) not in self.structure.calls_of_module:
            name = name.rpartition(".")[0]
        return name if name != module and (scope, name) in self.structure.calls_of_module else None

    def _caller(self, call: Call) -> str | None:
        _, step, micro = call.scope
        return self.isolation.callers.get((step, micro, call.module, call.number))

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
                    return self._caller(user) if key in self.isolation.cut_off else user.module
        return None

    def _changer(self, users: Collection[Call]) -> str | None:
        """A user that should hand its input on as it is, and does not."""
        for user in users:
            if self.structure.hands_on(user) and any(self._wrong(row) for row in user.of("output")):
                return user.module
        return None

    def _wrong(self, row: int) -> bool:
        return self.judgement.status[row] in _BAD


def isolated_findings(
    judgement: Judgement,
    structure: Structure,
    isolation: Isolation,
    rows: npt.NDArray[np.int64],
    lost: Collection[Key],
    key: Callable[[int], Key],
    cls: Callable[[int], str],
    difference: Callable[[int], Difference | None],
) -> dict[int, Finding]:
    """For each module at fault, on each rank, the earliest pair that shows it.

    `rows` are the candidate's rows of the pairs, `lost` what only the reference has.
    """
    numbers = rows.tolist()
    forced = np.array([row in isolation.forced for row in numbers], bool)
    own = {pair for pair, row in enumerate(numbers) if row in isolation.used_inside}
    faults = _Faults(judgement, structure, isolation, forced, own, lost)
    found: dict[int, Finding] = {}
    known: set[tuple[int, str]] = set()
    # Without the gradients at inputs, what a module at fault sends back reaches the code around it as it is.
    feeds_back = "grad_input" in set(structure.kind)
    for row in sorted(judgement.born, key=lambda row: (structure.scope[row][1], structure.seq[row])):
        if faults.follows(row):
            continue
        place = faults.place(row)
        module = structure.module[row] if place.container is None else place.container
        rank = structure.scope[row][0]
        if (rank, module) in known:
            continue
        if structure.kind[row] == "grad_output" and not feeds_back and _inside(module, rank, known):
            continue
        known.add((rank, module))
        found[row] = Finding(
            key=key(row),
            rank=rank,
            cls=cls(row),
            status=judgement.status[row],
            difference=difference(row),
            tolerance=float(judgement.tolerance[row]),
            row_tolerance=float(judgement.row_tolerance[row]),
            rule=judgement.rule[row],
            inputs_matched=place.inputs_matched,
            container=place.container if place.container != structure.module[row] else None,
            inputs_rel_l2=judgement.sources_error[row],
        )
    return found


def lost_gradients(
    structure: Structure, isolation: Isolation, lost: Sequence[tuple[Key, int, str]], known: Collection[str]
) -> list[Finding]:
    """Where gradients end that the reference has: nothing is off there, they just never come.

    `lost` is what only the reference has, in its order, with rank and class; `known` the modules at fault already.
    """
    missing = {key for key, _, _ in lost}
    found: dict[str, Finding] = {}
    for key, rank, cls in lost:
        module = _end_of(key, structure, isolation, missing, rank)
        if module is None or {module, key.module} & {*known, *found}:
            continue
        found[module] = Finding(
            key=key,
            rank=rank,
            cls=cls,
            status="missing",
            difference=None,
            tolerance=0.0,
            rule="the reference has one",
            inputs_matched=True,
            container=module if module != key.module else None,
        )
    return list(found.values())


def _end_of(key: Key, structure: Structure, isolation: Isolation, missing: Collection[Key], rank: int) -> str | None:
    """The module that lost a gradient itself; None if it never got as far."""
    if key.phase != "backward" or "~" in key.path:
        return None
    scope = rank, key.step, key.micro
    calls = [
        c
        for c in structure.calls_of_module.get((scope, key.module), ())
        if key.kind == "param_grad" or c.number == key.call
    ]
    caller = isolation.callers.get((key.step, key.micro, key.module, key.call))
    if key.kind == "grad_output":
        if caller is None or any(_sent_nothing(user, missing) for user in _users_of(key, structure, calls)):
            return None
        around = structure.calls_of_module.get((scope, caller), ())
        return caller if any(call.of("grad_output") for call in around) else None
    if not any(call.of("grad_output") for call in calls):
        return None
    given = key._replace(phase="forward", kind="input")
    return caller if key.kind == "grad_input" and given in isolation.cut_off else key.module


def _users_of(key: Key, structure: Structure, calls: Sequence[Call]) -> list[Call]:
    """The calls that were given the output whose gradient is meant."""
    rows = [row for call in calls for row in call.of("output") if structure.path[row] == key.path]
    return [user for row in rows for user in structure.consumers.get(structure.tensor[row], ())]


def _sent_nothing(user: Call, missing: Collection[Key]) -> bool:
    _, step, micro = user.scope
    place = step, micro, "backward", user.module, user.number, "grad_input"
    return any(key[:6] == place for key in missing)


def _inside(module: str, rank: int, known: Collection[tuple[int, str]]) -> bool:
    """Whether one of the modules that are known to be at fault is a part of this one."""
    return any(r == rank and (not module or name.startswith(f"{module}.")) for r, name in known)
