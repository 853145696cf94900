"""Wrong records of a check that are no fault of the module that made them: they follow from other records."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import numpy as np

from tensortap.compare.judge.causes import is_within
from tensortap.compare.judge.checked_pairs import CheckedPairs
from tensortap.compare.judge.shared_values import gradients_of_elements, lacks_shared_gradient
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.core.records import GRADIENT_KINDS, WRONG_STATUSES, Key

__all__ = ["Consequences"]


class Consequences:
    """Recognises wrong rows that follow from others."""

    def __init__(self, checked: CheckedPairs) -> None:
        self._checked = checked
        self._structure = checked.structure
        self._isolation = checked.isolation

    def is_consequence(self, row: int) -> bool:
        """Whether a wrong row follows from records outside the pairs: from a missing gradient, or from parameters that
        are recorded with another module."""
        kind, module, (rank, step, _) = (
            self._structure.kind[row],
            self._structure.module[row],
            self._structure.scope[row],
        )
        if kind == "param" and not self._structure.number[row]:
            return False  # before the step, no gradient has moved it
        if kind == "param":
            calls = self._structure.calls_in_step.get((rank, step, module), ())
            reached = any(call.of("grad_output") for call in calls)
            return not reached and any(
                (key.step, key.module, key.kind, key.path) == (step, module, "param_grad", self._structure.path[row])
                for key in self._checked.only_reference
            )
        if kind == "input" and self._was_put_in_by_a_wrong_call(row):
            return True
        if kind in ("input", "output") and self._follows_parameters_inside(row):
            return True
        if kind == "output" and self._was_handed_on_inside(row):
            return True
        if kind == "grad_input" and self._follows_a_misled_user(row):
            return True
        if kind == "grad_output" and self._lacks_a_gradient_around(row):
            return True
        if kind == "grad_output" and self._checked.explained and self._lacks_a_gradient_beside(row):
            return True
        if kind == "grad_output" and self._checked.explained and self._lacks_a_share_of_code_around(row):
            return True
        call = self._structure.call_of(row) if kind == "grad_output" and self._checked.explained else None
        if call is not None and lacks_shared_gradient(call, self._lost_elements, self._structure):
            return True
        same = self._checked.one_gradient.get(row, (row,)) if kind == "grad_output" else ()
        if any(
            each in self._checked.used_inside and (self._is_misused_inside(each) or self._is_misused_around(each))
            for each in same
        ):
            return True
        if kind == "grad_output" and self._gets_more(row):
            return True
        if kind in ("grad_output", "grad_input") and self._lacks_what_a_wrong_module_sends(row):
            return True
        if kind == "param_grad" and self._is_untied(row):
            return True
        if kind == "buffer":  # one that a module updates when it is called
            return bool(self._structure.number[row]) and any(
                self._missing_calls.get((step, key_micro, module)) for key_micro in self._micros
            )
        if kind == "param_grad" and (
            self._is_misused(row) or self._is_read_beside_a_wrong_one(row) or self._is_read_around(row)
        ):
            return True
        if kind == "param_grad" and (reader := self._checked.reader(row)) is not None and self._checked.explained:
            # The gradient of a parameter that a container reads comes by way of the modules inside.
            return any(
                key.step == step and key.kind == "grad_output" and is_within(key.module, reader)
                for key in self._checked.only_reference
            )
        if kind == "param_grad" and self._checked.explained:
            users = {module, *(user for user, owners in self._isolation.tied.items() if module in owners)}
            return any(
                (key.step, key.kind) == (step, "grad_output") and key.module in users
                for key in self._checked.only_reference
            )
        tied = [
            state
            for owner in self._isolation.tied.get(module, ())
            for state in self._structure.parameters_of.get((rank, step, owner), ())
        ]
        return any(self._checked.is_wrong(state) for state in tied)

    def is_of_other_uses(self, row: int) -> bool:
        """Whether a row is the gradient of a parameter whose module is sent none in the reference: it is that of other
        uses. If these are right, code around the module lets a gradient pass, which shows there."""
        structure, (rank, step, micro) = self._structure, self._structure.scope[row]
        if structure.kind[row] != "param_grad" or "grad_output" not in structure.kinds_in_step[rank, step]:
            return False
        calls = self._checked.calls_in_pass(row, structure.module[row])
        lost = step, micro, structure.module[row], "grad_output"
        return bool(calls) and not (
            any(call.of("grad_output") for call in calls)
            or any((key.step, key.micro, key.module, key.kind) == lost for key in self._checked.only_reference)
        )

    def has_other_calls(self, row: int) -> bool:
        """Whether a row is the gradient of a parameter that one side uses in further calls."""
        if self._structure.kind[row] != "param_grad":
            return False
        scope, module = self._structure.scope[row], self._structure.module[row]
        users = {
            self._checked.reader(row) or module,
            *(u for u, owners in self._isolation.tied.items() if module in owners),
        }
        return any(
            (scope, user, number) not in self._structure.calls
            for user in users
            for number in (
                *self._missing_calls.get((*scope[1:], user), ()),
                *self._extra_calls.get((*scope[1:], user), ()),
            )
        )

    def _was_put_in_by_a_wrong_call(self, row: int) -> bool:
        """Whether an input is an element of a collection that an earlier module of the same list was given without it,
        and put it in, as layers do that share keys and values: if that one makes a wrong value, so may this be."""
        call, path = self._structure.call_of(row), self._structure.path[row]
        if call is None or call.parent is None or "." not in path:
            return False
        beside = call.module.rpartition(".")[0]
        earlier = [each for each in call.parent.children if each.begin < call.begin]
        without = [
            each
            for each in earlier
            if each.module.rpartition(".")[0] == beside
            and path not in {self._structure.path[given] for given in each.of("input")}
        ]
        return any(self._makes_wrong(inner) for each in without for inner in _all_inside(each))

    def _follows_parameters_inside(self, row: int) -> bool:
        """Whether code that made the same value right before a step may read parameters which that step moved wrongly:
        a container's code may read those of all modules inside, and hand them to these."""
        structure, call = self._structure, self._structure.call_of(row)
        if call is None or structure.is_at_start(row):
            return False
        kind, module, path = structure.kind[row], structure.module[row], structure.path[row]
        container = module if kind == "output" else self._isolation.caller(call)
        if container is None:
            return False
        rank, step, _ = structure.scope[row]
        inside = [name for name in structure.module_words if is_within(name, container)]
        read = (state for name in inside for state in structure.parameters_of.get((rank, step, name), ()))
        if not any(self._checked.is_wrong(state) for state in read):
            return False
        spots = zip(structure.kind, structure.module, structure.path, structure.scope, strict=True)
        before = [
            each
            for each, (*spot, scope) in enumerate(spots)
            if spot == [kind, module, path] and scope[0] == rank and scope[1] < step
        ]
        return bool(before) and not any(self._checked.is_wrong(each) for each in before)

    def _was_handed_on_inside(self, row: int) -> bool:
        """Whether a module returns the very tensor that code of a module inside has handed on, and that is wrong there
        already, as one that it changes in place."""
        structure, call = self._structure, self._structure.call_of(row)
        if call is None:
            return False
        tensor = structure.tensor[row]
        users = [user for user in structure.consumers.get(tensor, ()) if is_within(user.module, call.module)]
        makers = {
            self._isolation.caller(user)
            for user in users
            if any(structure.tensor[given] == tensor and self._checked.is_wrong(given) for given in user.of("input"))
        }
        return any(maker is not None and is_within(maker, call.module) for maker in makers)

    def _follows_a_misled_user(self, row: int) -> bool:
        """Whether a module inside should have been given the input whose gradient a row is, and was given something
        else: that gradient comes from elsewhere."""
        call = self._structure.call_of(row)
        if call is None:
            return False
        given = [r for r in call.of("input") if self._structure.path[r] == self._structure.path[row]]
        inside = [
            user
            for r in given
            for user in self._structure.consumers.get(self._structure.tensor[r], ())
            if is_within(user.module, call.module)
        ]
        tensors = {self._structure.tensor[r] for r in given}
        return self._checked.find_misleader(tensors, inside) not in (None, call.module)

    def _lacks_a_gradient_around(self, row: int) -> bool:
        """Whether the code that made a gradient gets none for one of its own outputs, which is in the graph: what uses
        that output is at fault, and is reported."""
        call = self._structure.call_of(self._checked.one_gradient.get(row, (row,))[-1])
        around = None if call is None else call.parent
        if around is None or not (self._checked.explained or self._has_wrong_forward):
            return False
        return any(
            not self._isolation.is_detached(around, path) for path in self._checked.outputs_without_gradient(around)
        )

    def _lacks_a_gradient_beside(self, row: int) -> bool:
        """Whether another output of the module that made a gradient's tensor gets none, though the reference's does:
        what it would have added is missing here, too, if that output was made from this one."""
        call = self._structure.call_of(self._checked.one_gradient.get(row, (row,))[0])
        if call is None:
            return False
        return any(path != self._structure.path[row] for path in self._checked.outputs_without_gradient(call))

    def _lacks_a_share_of_code_around(self, row: int) -> bool:
        """Whether a module, or one around it, has detached one of its own outputs, such as an auxiliary loss made of
        values from modules inside: these lack the share of their gradient that came by way of that output."""
        around = self._structure.call_of(row)
        while around is not None:
            if any(
                self._isolation.is_detached(around, path) for path in self._checked.outputs_without_gradient(around)
            ):
                return True
            around = around.parent
        return False

    def _is_misused_inside(self, row: int) -> bool:
        """Whether a module uses one of its outputs inside, as a list of hidden states, and a module that it gives this
        output to computes something wrong with it, or lacks a gradient inside: that one is named by what it does."""
        call = self._structure.call_of(row)
        if call is None:
            return False
        users = [
            user
            for tensor in self._structure.returned(row, call)
            for user in self._structure.consumers.get(tensor, ())
            if user is not call and is_within(user.module, call.module)
        ]
        made = [r for user in users for r in (*user.of("output"), *(i for c in user.children for i in c.of("input")))]
        if any(self._checked.is_wrong(each) for each in made):
            return True
        lost = self._checked.only_reference if self._checked.explained else ()
        lacking = [key for key in lost if key.kind in GRADIENT_KINDS]
        return any(
            key.step == user.scope[1] and (key.module == user.module or is_within(key.module, user.module))
            for key in lacking
            for user in users
        )

    def _is_misused_around(self, row: int) -> bool:
        """Whether a module that uses one of its outputs inside returns what it should, and the code that calls it makes
        something wrong: that code may use the output wrongly, too."""
        call = self._structure.call_of(row)
        around = None if call is None else call.parent
        if call is None or around is None or around.module != self._isolation.caller(call) or self._makes_wrong(call):
            return False
        return self._makes_wrong(around)

    def _gets_more(self, row: int) -> bool:
        """Whether a module that a gradient's tensor was given to is sent a gradient in the candidate alone, as its
        parameters show: it sends one back, too."""
        call = self._structure.call_of(row)
        if call is None or not self._checked.has_extra_gradients:
            return False
        tensors = self._structure.returned(row, call)
        users = [user for tensor in tensors for user in self._structure.consumers.get(tensor, ()) if user is not call]
        modules = [user.module for user in users if not user.of("grad_output")]
        return any(
            key.kind == "param_grad"
            and key.step == self._structure.scope[row][1]
            and any(key.module == module or is_within(key.module, module) for module in modules)
            for key in self._checked.only_candidate
        )

    def _lacks_what_a_wrong_module_sends(self, row: int) -> bool:
        """Whether code of a container made a gradient without a part that the reference has: a module that the code
        gave a value of its own sends nothing back for it, and a module inside the container is wrong.

        The value itself was not recorded, so that no name tells which tensors it was made from.
        """
        structure, call = self._structure, self._structure.call_of(row)
        if call is None or not self._own_values_without_gradient:
            return False
        returned = [structure.call_of(each) or call for each in self._checked.one_gradient.get(row, (row,))]
        container, begin = self._isolation.caller(returned[-1]), returned[-1].end
        if structure.kind[row] == "grad_input":
            container, begin = call.module, call.begin
        given = self._own_values_without_gradient
        users = [user for user in given.get((call.scope, container), ()) if user.begin > begin]
        if structure.kind[row] == "grad_output":  # the code that returns it may use it as well
            users += [user for each in returned for user in given.get((call.scope, each.module), ())]
        if not any(user is not call for user in users):
            return False
        around = structure.calls_of_module.get((call.scope, container or ""), ())
        inside = [each for outer in around for child in outer.children for each in _all_inside(child)]
        return self._checked.explained or any(self._makes_wrong(each) for each in inside)

    def _is_untied(self, row: int) -> bool:
        """Whether a parameter is tied on one side alone, and the other side has a gradient for each of both."""
        if (self._structure.module[row], self._structure.path[row]) not in self._checked.untied:
            return False
        alone = (*self._checked.only_reference, *self._checked.only_candidate)
        return any(key.kind == "param_grad" and (key.module, key.path) in self._checked.untied for key in alone)

    def _is_misused(self, row: int) -> bool:
        """Whether a parameter is tied to a module that computes something wrong with it: that makes its gradient wrong,
        too, and it is recorded with its owner."""
        scope, module = self._structure.scope[row], self._structure.module[row]
        users = [user for user, owners in self._isolation.tied.items() if module in owners and user != module]
        calls = [call for user in users for call in self._structure.calls_of_module.get((scope, user), ())]
        if any(self._checked.is_wrong(output) for call in calls for output in call.of("output")):
            return True
        uncalled = [user for user in users if (scope, user) not in self._structure.calls_of_module]
        return any(self._makes_wrong(call) for user in uncalled for call in self._calls_around(scope, user))

    def _calls_around(self, scope: tuple[int, int, int], module: str) -> Sequence[CallRows]:
        """Return the calls of the innermost called module around one: its code decides which of those inside run."""
        calls: Sequence[CallRows] = ()
        while module and not calls:
            module = module.rpartition(".")[0]
            calls = self._structure.calls_of_module.get((scope, module), ())
        return calls

    def _is_read_beside_a_wrong_one(self, row: int) -> bool:
        """Whether the code that reads a parameter also reads one that is wrong, such as a bias that was not loaded."""
        rank, step, _ = self._structure.scope[row]
        readers = {call.module for call in self._structure.users_of_own(row)}
        known = [state for reader in readers for state in self._structure.parameters_of.get((rank, step, reader), ())]
        return any(self._checked.is_wrong(state) for state in known)

    def _is_read_around(self, row: int) -> bool:
        """Whether the module that a parameter belongs to returns what it should, and the code that calls it does not
        make what it should: that code may read the parameter as well, as by another method of the module."""
        scope, module = self._structure.scope[row], self._structure.module[row]
        calls = self._structure.calls_of_module.get((scope, module), ())
        if not calls or any(call.children or self._makes_wrong(call) for call in calls):
            return False
        callers = {self._isolation.caller(call) for call in calls} - {None}
        around = [call for caller in callers for call in self._structure.calls_of_module.get((scope, caller or ""), ())]
        return any(self._makes_wrong(call) for call in around)

    def _makes_wrong(self, call: CallRows) -> bool:
        """Whether a call returns something wrong, or hands it to a module inside."""
        made = (*call.of("output"), *(given for child in call.children for given in child.of("input")))
        return any(self._checked.is_wrong(each) for each in made)

    @cached_property
    def _has_wrong_forward(self) -> bool:
        rows = np.flatnonzero(self._checked.judgement.having(*WRONG_STATUSES)).tolist()
        return any(self._structure.kind[row] in ("input", "output") for row in rows)

    @cached_property
    def _own_values_without_gradient(self) -> dict[tuple[tuple[int, int, int], str | None], list[CallRows]]:
        """By pass and caller: calls that get a value which the caller's own code made, and send no gradient back for
        it, while the reference's do."""
        lost = {key for key in self._checked.only_reference if key.kind == "grad_input"}
        found: dict[tuple[tuple[int, int, int], str | None], list[CallRows]] = {}
        for call in self._structure.calls.values() if lost else ():
            _, step, micro = call.scope
            for given in call.of("input"):
                key = Key(step, micro, "backward", call.module, call.number, "grad_input", self._structure.path[given])
                if key in lost and not self._structure.makers.get(self._structure.tensor[given]):
                    found.setdefault((call.scope, self._isolation.caller(call)), []).append(call)
        return found

    @cached_property
    def _lost_elements(self) -> list[Key]:
        return gradients_of_elements(self._checked.only_reference)

    @cached_property
    def _micros(self) -> set[int]:
        return {scope[2] for scope in self._structure.scope}

    @cached_property
    def _missing_calls(self) -> dict[tuple[int, int, str], set[int]]:
        """By step, micro step and module: numbers of the calls whose outputs only the reference has."""
        return _calls_of(self._checked.only_reference)

    @cached_property
    def _extra_calls(self) -> dict[tuple[int, int, str], set[int]]:
        """The same of the candidate."""
        return _calls_of(self._checked.only_candidate)


def _calls_of(keys: Collection[Key]) -> dict[tuple[int, int, str], set[int]]:
    """Return by step, micro step and module the numbers of the calls whose outputs are among these records."""
    found: dict[tuple[int, int, str], set[int]] = {}
    for key in keys:
        if key.kind == "output":
            found.setdefault((key.step, key.micro, key.module), set()).add(key.call)
    return found


def _all_inside(call: CallRows) -> Iterator[CallRows]:
    """Yield a call and all calls inside."""
    yield call
    for child in call.children:
        yield from _all_inside(child)
