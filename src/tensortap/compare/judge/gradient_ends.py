"""Where gradients end that never come: the modules whose own code detached a value, or sends nothing back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from tensortap.compare.judge.causes import is_within
from tensortap.compare.judge.counterparts import Pass, pass_of
from tensortap.compare.judge.isolation import Isolation
from tensortap.compare.judge.missing_rows import calls_reading, have_calls_with
from tensortap.compare.judge.newly_detached import find_newly_detached
from tensortap.compare.judge.shared_values import gradients_of_elements, lacks_shared_gradient
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.core.causes import Cause
from tensortap.core.records import Finding, Key

__all__ = ["find_cuts", "find_ends", "missing_finding", "names_around"]


def find_cuts(
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
            found[row] = missing_finding(matched, row, key, cut.module if cut.module != key.module else None)
    return found


def find_ends(
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
    search = _EndSearch(matched, structure, isolation, missing, lost, wrong)
    found: dict[int, Finding] = {}
    named: set[str] = set()
    around: set[str] = set()
    """All modules around those that are named."""
    frozen = matched.settings.loop.frozen_modules if rows else frozenset()
    numbers = np.array([row for row, _ in rows], np.int64)
    reached = have_calls_with(matched, numbers, "grad_output") if by_names else [None] * len(rows)
    for (row, key), is_reached in zip(rows, reached, strict=True):
        if key.module in named:
            continue
        if named and key.kind != "grad_output" and (*key[:5], "grad_output") in missing:
            continue  # one of its outputs gets none, either
        if (
            by_names
            and key.kind == "grad_output"
            and named
            and all(name in named or name in around for name in names_around(key.module))
        ):
            continue  # whichever of these modules called it, it is not to blame
        if key.kind == "grad_output" and key.module in frozen:
            module: str | None = key.module  # nothing that made its output requires a gradient
        elif is_reached is None or key.kind == "grad_output":
            module = search.end_of(key, int(matched.reference.rank[row]))
        else:
            module = key.module if is_reached else None
        if module is None or module in named:
            continue
        # A gradient that ends inside a module never reaches the modules before it: containers are not to blame, nor are
        # their own parameters, where the module inside sends nothing back.
        if module in around and (key.kind != "param_grad" or _is_starved(key, module, named, missing, lost)):
            continue
        named.add(module)
        around.update(names_around(module))
        found[row] = missing_finding(matched, row, key, module if module != key.module else None)
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


def missing_finding(
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


def names_around(module: str) -> Iterator[str]:
    """Yield the names of the modules around one, from the inside out."""
    while module:
        module = module.rpartition(".")[0]
        yield module


@dataclass(frozen=True)
class _EndSearch:
    """Finds the module at which a gradient ends."""

    matched: Matched
    structure: Structure
    isolation: Isolation
    missing: Collection[tuple[object, ...]]
    """All gradients that the candidate should have and lacks, without their paths."""
    lost: Collection[Key] | None
    """All that it lacks; None if the reference recorded no gradients at inputs."""
    wrong: Collection[str]
    """Modules whose own code makes something wrong of values."""

    @cached_property
    def _lost_elements(self) -> Sequence[Key]:
        """Those of the lost gradients that modules send to elements of collections."""
        return gradients_of_elements(self.lost or ())

    def end_of(self, key: Key, rank: int) -> str | None:
        """Return the module at which a gradient ends; None if it already ended further on."""
        scope = rank, key.step, key.micro
        if key.kind == "param_grad":
            return self._end_at_parameter(key, scope)
        of_module = self.structure.calls_of_module.get((scope, key.module), ())
        calls = [call for call in of_module if call.number == key.call]
        return self._end_at_output(key, scope, calls) if key.kind == "grad_output" else self._end_at_input(key, calls)

    def _end_at_parameter(self, key: Key, scope: Pass) -> str | None:
        matched = self.matched
        tied = [user for user, owners in self.isolation.tied.items() if key.module in owners]
        if any(user in matched.reference.called and user not in matched.candidate.called for user in tied):
            return None  # one side alone uses it there
        reached = [c for c in calls_reading(matched, self.structure, scope, key.module) if c.of("grad_output")]
        if not reached:
            return None
        return key.module if key.module in matched.settings.loop.frozen_modules else reached[0].module

    def _end_at_output(self, key: Key, scope: Pass, calls: Sequence[CallRows]) -> str | None:
        structure = self.structure
        if any(self._lacks(user, "grad_input") for user in self._users_of(key, calls)):
            return None
        caller = self.isolation.callers.get((key.step, key.micro, key.module, key.call))
        around = [call.parent for call in calls if call.parent is not None and call.parent.module == caller]
        if not around and caller is not None:
            around = structure.calls_of_module.get((scope, caller), [])
        if not any(call.of("grad_output") for call in around):
            return None
        if (detacher := self._find_detacher(key, calls)) is not None:
            return detacher or caller
        if any(lacks_shared_gradient(call, self._lost_elements, structure) for call in calls):
            return None  # it ended at the module that takes the value from a collection
        if any(self._gets_less(call) for call in around):
            return None  # the output that it was made for lacks its gradient, too: it ended further on
        if self._ends_inside(key, calls) or self._is_returned_without(key, calls):
            return None
        return caller

    def _end_at_input(self, key: Key, calls: Sequence[CallRows]) -> str | None:
        if not any(call.of("grad_output") for call in calls):
            return None
        if self.wrong and any(self._gets_less(call) for call in calls):
            return None
        if key._replace(phase="forward", kind="input") in self.isolation.cut_off:
            cutter = self.isolation.cutter(calls[0], key.path, self.structure, self.lost or ())
            return key.module if cutter is None else cutter
        return None if self._ends_further_in(key, calls) else key.module

    def _ends_further_in(self, key: Key, calls: Sequence[CallRows]) -> bool:
        """Whether a module inside is given the same input, as an element of a collection that is handed on, and sends
        no gradient back for it, although it gets one."""
        structure, lost = self.structure, self.lost or ()
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

    def _gets_less(self, call: CallRows) -> bool:
        """Whether a call lacks the gradient of an output that is in the graph, and something after it sends none back:
        later calls that are given the output, or code around that makes something wrong. An output that neither is
        given may be used by the code of the call itself."""
        structure, isolation, wrong = self.structure, self.isolation, self.wrong
        if not self._lacks(call, "grad_output") or not isolation.knows_graph:
            return False
        came = {structure.path[row] for row in call.of("grad_output")}
        for row in call.of("output"):
            path, users = structure.path[row], structure.consumers.get(structure.tensor[row], ())
            if path in came or isolation.is_detached(call, path):
                continue
            if any(user.begin > call.end for user in users) or isolation.caller(call) in wrong:
                return True
            if wrong and call.parent is not None and self._gets_less(call.parent):
                return True
        return False

    def _is_returned_without(self, key: Key, calls: Sequence[CallRows]) -> bool:
        """Whether the module around returns the same tensor, and gets no gradient for it, either: it ended further on.

        Not if that module is the model and the gradient of a loss that it returns comes: its own code makes the loss.
        """
        structure = self.structure
        tensors = {structure.tensor[r] for call in calls for r in call.of("output") if structure.path[r] == key.path}
        around = [call.parent for call in calls if call.parent is not None]
        around = [each for each in around if each.parent is not None or not self._gets_a_loss(each)]
        returned = [each for each in around if any(structure.tensor[r] in tensors for r in each.of("output"))]
        return any(self._lacks(each, "grad_output") for each in returned)

    def _gets_a_loss(self, call: CallRows) -> bool:
        """Whether a call is sent the gradient of a single number."""
        return any(prod(self.structure.shape(row)) == 1 for row in call.of("grad_output"))

    def _find_detacher(self, key: Key, calls: Sequence[CallRows]) -> str | None:
        """Return the module that detached an output: the one that returns it, or one that its inputs come from.

        None if the output is in the graph: then the code that used it has detached it.
        """
        structure, isolation, lost = self.structure, self.isolation, self.lost
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

    def _ends_inside(self, key: Key, calls: Sequence[CallRows]) -> bool:
        """Whether a module most likely cut off the gradient of its output itself: it uses the output inside as well, as
        a list of hidden states that it returns only for information.

        Then a module inside lacks its gradient, too, while other outputs get theirs, and nothing outside is given this
        one.
        """
        structure = self.structure
        if not any(call.of("grad_output") for call in calls):
            return False
        if any(not is_within(user.module, key.module) for user in self._users_of(key, calls)):
            return False
        place, rows = key[:3], [row for call in calls for row in call.of("output") if structure.path[row] == key.path]
        makers = [maker for row in rows for maker, _ in structure.makers.get(structure.tensor[row], ())]
        inside = [maker for maker in makers if is_within(maker.module, key.module)]
        if inside and not any(child.begin > inside[-1].end for call in calls for child in call.children):
            return False  # nothing inside runs after the module that makes it
        same = {maker.module for maker in makers}
        lacking = (str(other[3]) for other in self.missing if other[:3] == place and other[5] == "grad_output")
        return any(is_within(module, key.module) and module not in same for module in lacking)

    def _users_of(self, key: Key, calls: Sequence[CallRows]) -> list[CallRows]:
        """Return the calls that were given the output whose gradient a key is."""
        structure = self.structure
        rows = [row for call in calls for row in call.of("output") if structure.path[row] == key.path]
        return [user for row in rows for user in structure.consumers.get(structure.tensor[row], ())]

    def _lacks(self, call: CallRows, kind: str) -> bool:
        """Whether a call lacks a gradient of this kind."""
        _, step, micro = call.scope
        return (step, micro, "backward", call.module, call.number, kind) in self.missing
