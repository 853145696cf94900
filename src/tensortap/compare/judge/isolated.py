"""Findings of a run whose modules all ran on the reference's own inputs: no error propagates from one to the next."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensortap.compare.judge.attribution import Attribution, attribute
from tensortap.compare.judge.causes import is_within
from tensortap.compare.judge.findings import FindingBuilder
from tensortap.compare.judge.isolation import Isolation
from tensortap.compare.judge.judgement import Judgement
from tensortap.compare.judge.random_draws import without_out_of_step
from tensortap.compare.judge.shared_values import gradients_of_elements, lacks_shared_gradient
from tensortap.compare.judge.structure import CallRows, Structure
from tensortap.core.records import GRADIENT_KINDS, WRONG_STATUSES, Finding, Key

__all__ = ["Attributor", "isolated_findings"]


@dataclass(frozen=True)
class Attributor:
    """Attributes wrong rows to modules."""

    judgement: Judgement
    structure: Structure
    isolation: Isolation
    forced: npt.NDArray[np.bool_]
    own: Collection[int]
    """The pairs of `Isolation.used_inside`."""
    one_gradient: Mapping[int, Sequence[int]]
    """By pair: all pairs of the same gradient, the innermost call's first."""
    only_reference: Collection[Key]
    """Records that only the reference has."""
    only_candidate: Collection[Key]
    """Records that only the candidate has."""
    explained: bool
    """Whether a finding reports where the gradients among these end."""
    untied: Collection[tuple[str, str]] = ()
    """Parameters that are tied on one side alone, by module and name there."""

    @classmethod
    def of(
        cls,
        builder: FindingBuilder,
        isolation: Isolation,
        rows: npt.NDArray[np.int64],
        only_reference: Collection[Key],
        only_candidate: Collection[Key],
        explained: bool,
        untied: Collection[tuple[str, str]] = (),
    ) -> Attributor:
        """Return the attributor of a check.

        rows: the candidate's rows of the pairs.
        only_reference, only_candidate: records that one side alone has.
        explained: whether another finding reports where gradients that only the reference has end.
        untied: parameters that are tied on one side alone.
        """
        numbers = rows.tolist()
        forced = np.array([row in isolation.forced for row in numbers], bool)
        own = {pair for pair, row in enumerate(numbers) if row in isolation.used_inside}
        groups = _pairs_of_one_gradient(isolation, numbers)
        of_pairs = builder.judgement, builder.structure, isolation, forced, own, groups
        return cls(*of_pairs, only_reference, only_candidate, explained, untied)

    def attribute(self, row: int) -> Attribution:
        """Attribute a wrong row. The caller makes the inputs of a module, and the gradients at its outputs."""
        kind, call = self.structure.kind[row], self.structure.call_of(row)
        if kind == "param_grad" and (reader := self._reader(row)) is not None:
            return Attribution(reader, True)
        if call is None or kind not in ("input", "grad_output"):
            return attribute(row, self.structure, self.judgement)
        if kind == "input":
            caller = self.isolation.caller(call)
            return Attribution(caller, None if caller is None else True)
        tensors = self.structure.returned(row, call)
        users = [user for tensor in tensors for user in self.structure.consumers.get(tensor, ()) if user is not call]
        rows = self.one_gradient.get(row, (row,))
        finders = self._find_detacher(tensors, users), self._find_changer(users), self._find_misleader(tensors, users)
        blamed = next((each for each in (*finders, self._find_cut_beside(rows[0])) if each is not None), None)
        if blamed is not None:
            return Attribution(blamed, True)
        if (wrong := self._find_wrong_code(rows)) is not None:
            return Attribution(wrong, True)
        outermost = self.structure.call_of(rows[-1]) or call
        caller = self.isolation.caller(outermost)
        own = next((each for each in rows if each in self.own), None)
        if own is not None and (caller is not None or own != rows[-1]):
            return Attribution(self.structure.module[own], True)
        if caller is None:
            return Attribution(outermost.module, None, from_outside=True)
        # A user of the output whose own gradient was not replaced may have sent the wrong one just as well.
        sending = [user for user in users if user.of("grad_output", "grad_input")]
        unforced = [user for user in sending if not any(self.forced[r] for r in user.of("grad_input"))]
        if any(user in unforced for user in self.structure.users(row, call)):
            return attribute(row, self.structure, self.judgement)
        return Attribution(caller, True)

    def is_consequence(self, row: int) -> bool:
        """Whether a wrong row follows from records outside the pairs: from a missing gradient, or from parameters that
        are recorded with another module."""
        kind, module, (rank, step, _) = (
            self.structure.kind[row],
            self.structure.module[row],
            self.structure.scope[row],
        )
        if kind == "param" and not self.structure.number[row]:
            return False  # before the step, no gradient has moved it
        if kind == "param":
            calls = self.structure.calls_in_step.get((rank, step, module), ())
            reached = any(call.of("grad_output") for call in calls)
            return not reached and any(
                (key.step, key.module, key.kind, key.path) == (step, module, "param_grad", self.structure.path[row])
                for key in self.only_reference
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
        if kind == "grad_output" and self.explained and self._lacks_a_gradient_beside(row):
            return True
        if kind == "grad_output" and self.explained and self._lacks_a_share_of_code_around(row):
            return True
        call = self.structure.call_of(row) if kind == "grad_output" and self.explained else None
        if call is not None and lacks_shared_gradient(call, self._lost_elements, self.structure):
            return True
        same = self.one_gradient.get(row, (row,)) if kind == "grad_output" else ()
        if any(each in self.own and (self._is_misused_inside(each) or self._is_misused_around(each)) for each in same):
            return True
        if kind == "grad_output" and self._gets_more(row):
            return True
        if kind in ("grad_output", "grad_input") and self._lacks_what_a_wrong_module_sends(row):
            return True
        if kind == "param_grad" and self._is_untied(row):
            return True
        if kind == "buffer":  # one that a module updates when it is called
            return bool(self.structure.number[row]) and any(
                self._missing_calls.get((step, key_micro, module)) for key_micro in self._micros
            )
        if kind == "param_grad" and (
            self._is_misused(row) or self._is_read_beside_a_wrong_one(row) or self._is_read_around(row)
        ):
            return True
        if kind == "param_grad" and (reader := self._reader(row)) is not None and self.explained:
            # The gradient of a parameter that a container reads comes by way of the modules inside.
            return any(
                key.step == step and key.kind == "grad_output" and is_within(key.module, reader)
                for key in self.only_reference
            )
        if kind == "param_grad" and self.explained:
            users = {module, *(user for user, owners in self.isolation.tied.items() if module in owners)}
            return any(
                (key.step, key.kind) == (step, "grad_output") and key.module in users for key in self.only_reference
            )
        tied = [
            state
            for owner in self.isolation.tied.get(module, ())
            for state in self.structure.parameters_of.get((rank, step, owner), ())
        ]
        return any(self._wrong(state) for state in tied)

    def _is_misused(self, row: int) -> bool:
        """Whether a parameter is tied to a module that computes something wrong with it: that makes its gradient wrong,
        too, and it is recorded with its owner."""
        scope, module = self.structure.scope[row], self.structure.module[row]
        users = [user for user, owners in self.isolation.tied.items() if module in owners and user != module]
        calls = [call for user in users for call in self.structure.calls_of_module.get((scope, user), ())]
        if any(self._wrong(output) for call in calls for output in call.of("output")):
            return True
        uncalled = [user for user in users if (scope, user) not in self.structure.calls_of_module]
        return any(self._makes_wrong(call) for user in uncalled for call in self._calls_around(scope, user))

    def _calls_around(self, scope: tuple[int, int, int], module: str) -> Sequence[CallRows]:
        """Return the calls of the innermost called module around one: its code decides which of those inside run."""
        calls: Sequence[CallRows] = ()
        while module and not calls:
            module = module.rpartition(".")[0]
            calls = self.structure.calls_of_module.get((scope, module), ())
        return calls

    def _is_read_beside_a_wrong_one(self, row: int) -> bool:
        """Whether the code that reads a parameter also reads one that is wrong, such as a bias that was not loaded."""
        rank, step, _ = self.structure.scope[row]
        readers = {call.module for call in self.structure.users_of_own(row)}
        known = [state for reader in readers for state in self.structure.parameters_of.get((rank, step, reader), ())]
        return any(self._wrong(state) for state in known)

    def _is_read_around(self, row: int) -> bool:
        """Whether the module that a parameter belongs to returns what it should, and the code that calls it does not
        make what it should: that code may read the parameter as well, as by another method of the module."""
        scope, module = self.structure.scope[row], self.structure.module[row]
        calls = self.structure.calls_of_module.get((scope, module), ())
        if not calls or any(call.children or self._makes_wrong(call) for call in calls):
            return False
        callers = {self.isolation.caller(call) for call in calls} - {None}
        around = [call for caller in callers for call in self.structure.calls_of_module.get((scope, caller or ""), ())]
        return any(self._makes_wrong(call) for call in around)

    def _was_put_in_by_a_wrong_call(self, row: int) -> bool:
        """Whether an input is an element of a collection that an earlier module of the same list was given without it,
        and put it in, as layers do that share keys and values: if that one makes a wrong value, so may this be."""
        call, path = self.structure.call_of(row), self.structure.path[row]
        if call is None or call.parent is None or "." not in path:
            return False
        beside = call.module.rpartition(".")[0]
        earlier = [each for each in call.parent.children if each.begin < call.begin]
        without = [
            each
            for each in earlier
            if each.module.rpartition(".")[0] == beside
            and path not in {self.structure.path[given] for given in each.of("input")}
        ]
        return any(self._makes_wrong(inner) for each in without for inner in _all_inside(each))

    def _was_handed_on_inside(self, row: int) -> bool:
        """Whether a module returns the very tensor that code of a module inside has handed on, and that is wrong there
        already, as one that it changes in place."""
        structure, call = self.structure, self.structure.call_of(row)
        if call is None:
            return False
        tensor = structure.tensor[row]
        users = [user for user in structure.consumers.get(tensor, ()) if is_within(user.module, call.module)]
        makers = {
            self.isolation.caller(user)
            for user in users
            if any(structure.tensor[given] == tensor and self._wrong(given) for given in user.of("input"))
        }
        return any(maker is not None and is_within(maker, call.module) for maker in makers)

    def _lacks_a_gradient_around(self, row: int) -> bool:
        """Whether the code that made a gradient gets none for one of its own outputs, which is in the graph: what uses
        that output is at fault, and is reported."""
        call = self.structure.call_of(self.one_gradient.get(row, (row,))[-1])
        around = None if call is None else call.parent
        if around is None or not (self.explained or self._has_wrong_forward):
            return False
        return any(not self.isolation.is_detached(around, path) for path in self._outputs_without_gradient(around))

    def _lacks_a_share_of_code_around(self, row: int) -> bool:
        """Whether a module, or one around it, has detached one of its own outputs, such as an auxiliary loss made of
        values from modules inside: these lack the share of their gradient that came by way of that output."""
        around = self.structure.call_of(row)
        while around is not None:
            if any(self.isolation.is_detached(around, path) for path in self._outputs_without_gradient(around)):
                return True
            around = around.parent
        return False

    def _outputs_without_gradient(self, call: CallRows) -> Iterator[str]:
        """Yield the paths of a call's outputs of which only the reference has the gradient."""
        _, step, micro = call.scope
        for path in (self.structure.path[output] for output in call.of("output")):
            if Key(step, micro, "backward", call.module, call.number, "grad_output", path) in self.only_reference:
                yield path

    @cached_property
    def _has_wrong_forward(self) -> bool:
        rows = np.flatnonzero(self.judgement.having(*WRONG_STATUSES)).tolist()
        return any(self.structure.kind[row] in ("input", "output") for row in rows)

    def _follows_parameters_inside(self, row: int) -> bool:
        """Whether code that made the same value right before a step may read parameters which that step moved wrongly:
        a container's code may read those of all modules inside, and hand them to these."""
        structure, call = self.structure, self.structure.call_of(row)
        if call is None or structure.is_at_start(row):
            return False
        kind, module, path = structure.kind[row], structure.module[row], structure.path[row]
        container = module if kind == "output" else self.isolation.caller(call)
        if container is None:
            return False
        rank, step, _ = structure.scope[row]
        inside = [name for name in structure.module_words if is_within(name, container)]
        read = (state for name in inside for state in structure.parameters_of.get((rank, step, name), ()))
        if not any(self._wrong(state) for state in read):
            return False
        spots = zip(structure.kind, structure.module, structure.path, structure.scope, strict=True)
        before = [
            each
            for each, (*spot, scope) in enumerate(spots)
            if spot == [kind, module, path] and scope[0] == rank and scope[1] < step
        ]
        return bool(before) and not any(self._wrong(each) for each in before)

    @property
    def has_extra_gradients(self) -> bool:
        """Whether parameters get gradients in the candidate alone: a finding of its own reports them."""
        return any(key.kind == "param_grad" for key in self.only_candidate)

    def _is_untied(self, row: int) -> bool:
        """Whether a parameter is tied on one side alone, and the other side has a gradient for each of both."""
        if (self.structure.module[row], self.structure.path[row]) not in self.untied:
            return False
        alone = (*self.only_reference, *self.only_candidate)
        return any(key.kind == "param_grad" and (key.module, key.path) in self.untied for key in alone)

    def _lacks_what_a_wrong_module_sends(self, row: int) -> bool:
        """Whether code of a container made a gradient without a part that the reference has: a module that the code
        gave a value of its own sends nothing back for it, and a module inside the container is wrong.

        The value itself was not recorded, so that no name tells which tensors it was made from.
        """
        structure, call = self.structure, self.structure.call_of(row)
        if call is None or not self._own_values_without_gradient:
            return False
        returned = [structure.call_of(each) or call for each in self.one_gradient.get(row, (row,))]
        container, begin = self.isolation.caller(returned[-1]), returned[-1].end
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
        return self.explained or any(self._makes_wrong(each) for each in inside)

    @cached_property
    def _own_values_without_gradient(self) -> dict[tuple[tuple[int, int, int], str | None], list[CallRows]]:
        """By pass and caller: calls that get a value which the caller's own code made, and send no gradient back for
        it, while the reference's do."""
        lost = {key for key in self.only_reference if key.kind == "grad_input"}
        found: dict[tuple[tuple[int, int, int], str | None], list[CallRows]] = {}
        for call in self.structure.calls.values() if lost else ():
            _, step, micro = call.scope
            for given in call.of("input"):
                key = Key(step, micro, "backward", call.module, call.number, "grad_input", self.structure.path[given])
                if key in lost and not self.structure.makers.get(self.structure.tensor[given]):
                    found.setdefault((call.scope, self.isolation.caller(call)), []).append(call)
        return found

    def _makes_wrong(self, call: CallRows) -> bool:
        """Whether a call returns something wrong, or hands it to a module inside."""
        made = (*call.of("output"), *(given for child in call.children for given in child.of("input")))
        return any(self._wrong(each) for each in made)

    def _is_misused_inside(self, row: int) -> bool:
        """Whether a module uses one of its outputs inside, as a list of hidden states, and a module that it gives this
        output to computes something wrong with it, or lacks a gradient inside: that one is named by what it does."""
        call = self.structure.call_of(row)
        if call is None:
            return False
        users = [
            user
            for tensor in self.structure.returned(row, call)
            for user in self.structure.consumers.get(tensor, ())
            if user is not call and is_within(user.module, call.module)
        ]
        made = [r for user in users for r in (*user.of("output"), *(i for c in user.children for i in c.of("input")))]
        if any(self._wrong(each) for each in made):
            return True
        lacking = [key for key in self.only_reference if key.kind in GRADIENT_KINDS] if self.explained else []
        return any(
            key.step == user.scope[1] and (key.module == user.module or is_within(key.module, user.module))
            for key in lacking
            for user in users
        )

    def _is_misused_around(self, row: int) -> bool:
        """Whether a module that uses one of its outputs inside returns what it should, and the code that calls it makes
        something wrong: that code may use the output wrongly, too."""
        call = self.structure.call_of(row)
        around = None if call is None else call.parent
        if call is None or around is None or around.module != self.isolation.caller(call) or self._makes_wrong(call):
            return False
        return self._makes_wrong(around)

    def _gets_more(self, row: int) -> bool:
        """Whether a module that a gradient's tensor was given to is sent a gradient in the candidate alone, as its
        parameters show: it sends one back, too."""
        call = self.structure.call_of(row)
        if call is None or not any(key.kind == "param_grad" for key in self.only_candidate):
            return False
        tensors = self.structure.returned(row, call)
        users = [user for tensor in tensors for user in self.structure.consumers.get(tensor, ()) if user is not call]
        modules = [user.module for user in users if not user.of("grad_output")]
        return any(
            key.kind == "param_grad"
            and key.step == self.structure.scope[row][1]
            and any(key.module == module or is_within(key.module, module) for module in modules)
            for key in self.only_candidate
        )

    def is_of_other_uses(self, row: int) -> bool:
        """Whether a row is the gradient of a parameter whose module is sent none in the reference: it is that of other
        uses. If these are right, code around the module lets a gradient pass, which shows there."""
        structure, (rank, step, micro) = self.structure, self.structure.scope[row]
        if structure.kind[row] != "param_grad" or "grad_output" not in structure.kinds_in_step[rank, step]:
            return False
        calls = _calls_of_module(structure, row, structure.module[row])
        lost = step, micro, structure.module[row], "grad_output"
        return bool(calls) and not (
            any(call.of("grad_output") for call in calls)
            or any((key.step, key.micro, key.module, key.kind) == lost for key in self.only_reference)
        )

    def has_other_calls(self, row: int) -> bool:
        """Whether a row is the gradient of a parameter that one side uses in further calls."""
        if self.structure.kind[row] != "param_grad":
            return False
        scope, module = self.structure.scope[row], self.structure.module[row]
        users = {self._reader(row) or module, *(u for u, owners in self.isolation.tied.items() if module in owners)}
        return any(
            (scope, user, number) not in self.structure.calls
            for user in users
            for number in (
                *self._missing_calls.get((*scope[1:], user), ()),
                *self._extra_calls.get((*scope[1:], user), ()),
            )
        )

    @cached_property
    def _lost_elements(self) -> list[Key]:
        return gradients_of_elements(self.only_reference)

    @cached_property
    def _micros(self) -> set[int]:
        return {scope[2] for scope in self.structure.scope}

    @cached_property
    def _missing_calls(self) -> dict[tuple[int, int, str], set[int]]:
        """By step, micro step and module: numbers of the calls whose outputs only the reference has."""
        return _calls_of(self.only_reference)

    @cached_property
    def _extra_calls(self) -> dict[tuple[int, int, str], set[int]]:
        """The same of the candidate."""
        return _calls_of(self.only_candidate)

    def _reader(self, row: int) -> str | None:
        """Return the module that uses the parameters of one that is never called itself."""
        calls = self.structure.users_of_own(row)
        return calls[0].module if calls and calls[0].module != self.structure.module[row] else None

    def _find_detacher(self, tensors: Collection[int], users: Collection[CallRows]) -> str | None:
        """Return a user that sent no gradient back where the reference's did, or the module that detached its input."""
        for user in users:
            _, step, micro = user.scope
            for given in user.of("input"):
                if self.structure.tensor[given] not in tensors:
                    continue
                path = self.structure.path[given]
                key = Key(step, micro, "forward", user.module, user.number, "input", path)
                if key._replace(phase="backward", kind="grad_input") in self.only_reference:
                    cut_off = key in self.isolation.cut_off
                    return self.isolation.cutter(user, path, self.structure) if cut_off else user.module
        return None

    def _find_changer(self, users: Collection[CallRows]) -> str | None:
        """Return a user that should pass its input through unchanged and does not."""
        for user in users:
            if self.structure.passes_through(user) and any(self._wrong(row) for row in user.of("output")):
                return user.module
        return None

    def _find_misleader(self, tensors: Collection[int], users: Collection[CallRows]) -> str | None:
        """Return the code that gave a user something else in the place of these tensors: it sends no gradient to them,
        or a user of something else does."""
        for user in users:
            if any(self.structure.tensor[row] in tensors and self._wrong(row) for row in user.of("input")):
                return self.isolation.caller(user)
        return None

    def _follows_a_misled_user(self, row: int) -> bool:
        """Whether a module inside should have been given the input whose gradient a row is, and was given something
        else: that gradient comes from elsewhere."""
        call = self.structure.call_of(row)
        if call is None:
            return False
        given = [r for r in call.of("input") if self.structure.path[r] == self.structure.path[row]]
        inside = [
            user
            for r in given
            for user in self.structure.consumers.get(self.structure.tensor[r], ())
            if is_within(user.module, call.module)
        ]
        tensors = {self.structure.tensor[r] for r in given}
        return self._find_misleader(tensors, inside) not in (None, call.module)

    def _find_cut_beside(self, row: int) -> str | None:
        """Return the module that made a gradient's tensor, if it has detached another of its outputs: the gradient of
        that one would have come by way of this tensor."""
        call = self.structure.call_of(row)
        if call is None:
            return None
        lost = self._outputs_without_gradient(call)
        return call.module if any(self.isolation.is_cut_off(call, "output", path) for path in lost) else None

    def _lacks_a_gradient_beside(self, row: int) -> bool:
        """Whether another output of the module that made a gradient's tensor gets none, though the reference's does:
        what it would have added is missing here, too, if that output was made from this one."""
        call = self.structure.call_of(self.one_gradient.get(row, (row,))[0])
        if call is None:
            return False
        return any(path != self.structure.path[row] for path in self._outputs_without_gradient(call))

    def _find_wrong_code(self, rows: Sequence[int]) -> str | None:
        """Return the outermost module whose code makes a wrong value beside the tensor that it returns: such a code, as
        that of a loss, is wrong in the gradient at the tensor, too."""
        call = self.structure.call_of(rows[-1])
        if len(rows) < 2 or call is None:
            return None
        tensors = {self.structure.tensor[row] for row in call.of("output") if self._wrong(row)}
        made_inside = {self.structure.tensor[row] for child in call.children for row in child.of("output")}
        return call.module if tensors - made_inside else None

    def _wrong(self, row: int) -> bool:
        return self.judgement.status[row] in WRONG_STATUSES


def _calls_of(keys: Collection[Key]) -> dict[tuple[int, int, str], set[int]]:
    """Return by step, micro step and module the numbers of the calls whose outputs are among these records."""
    found: dict[tuple[int, int, str], set[int]] = {}
    for key in keys:
        if key.kind == "output":
            found.setdefault((key.step, key.micro, key.module), set()).add(key.call)
    return found


def isolated_findings(builder: FindingBuilder, attributor: Attributor) -> list[Finding]:
    """Return, for each module at fault on each rank, the earliest pair that shows it."""
    structure, explained = builder.structure, attributor.explained
    only_reference, only_candidate = attributor.only_reference, attributor.only_candidate
    found: list[Finding] = []
    known: set[tuple[int, str]] = set()
    optimizers: set[int] = set()
    first_wrong_gradient = _first_wrong_gradients(builder, [*only_reference, *only_candidate])
    # Without gradients at inputs, the gradient of a module at fault reaches the container's code unreplaced.
    feeds_back = "grad_input" in set(structure.kind)
    births = [row for row in builder.births() if not attributor.is_consequence(row)]
    births = [
        row
        for row in births
        if not _is_after_step(row, structure) or not _is_misled(row, structure, first_wrong_gradient)
    ] or ([] if explained or attributor.has_extra_gradients else births)  # one that nothing else reports
    births = _without_read_attributes(births, builder, attributor)
    births = without_out_of_step(births, structure, builder.class_of, builder.zeros_of)
    # Code that leaves out a call, adds one, or lets a gradient pass is found by its other values; these gradients count
    # only if there are none.
    follow = attributor.has_other_calls, attributor.is_of_other_uses
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


def _without_read_attributes(births: list[int], builder: FindingBuilder, attributor: Attributor) -> list[int]:
    """Return the births without those of containers around a wrong module that passes on a tensor by an attribute.

    Such a tensor cannot be replaced by the reference's, so that code which reads it makes something wrong, too.
    """
    holders, structure = set(attributor.isolation.holders), builder.structure
    if not holders:
        return births
    blamed = [builder.module_to_blame(row, attributor.attribute(row)) for row in births]
    wrong = {(structure.scope[row][:2], name) for row, name in zip(births, blamed, strict=True) if name in holders}

    def reads_it(row: int, name: str) -> bool:
        return any(
            place == structure.scope[row][:2]
            and is_within(holder, name)
            and any(call.begin < structure.seq[row] for call in _calls_of_module(structure, row, holder))
            for place, holder in wrong
        )

    return [row for row, name in zip(births, blamed, strict=True) if not reads_it(row, name)]


def _calls_of_module(structure: Structure, row: int, module: str) -> Sequence[CallRows]:
    """Return the calls of a module in the pass of a row."""
    return structure.calls_of_module.get((structure.scope[row], module), ())


def _all_inside(call: CallRows) -> Iterator[CallRows]:
    """Yield a call and all calls inside."""
    yield call
    for child in call.children:
        yield from _all_inside(child)


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


def _pairs_of_one_gradient(isolation: Isolation, numbers: Sequence[int]) -> dict[int, Sequence[int]]:
    """Return by pair all pairs of the very same gradient, the innermost call's first."""
    pair_of = {row: pair for pair, row in enumerate(numbers)} if isolation.same else {}
    groups = [[pair_of[row] for row in rows if row in pair_of] for rows in isolation.same]
    return {pair: group for group in groups for pair in group}


def _inside(module: str, rank: int, known: Collection[tuple[int, str]]) -> bool:
    """Whether a module that is known to be at fault is a part of this one."""
    return any(r == rank and (not module or name.startswith(f"{module}.")) for r, name in known)
