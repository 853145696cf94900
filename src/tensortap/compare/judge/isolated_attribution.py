"""Attribute a wrong record of a check to a module: to the one that made it, or to the code that called that one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tensortap.compare.judge.attribution import Attribution, attribute
from tensortap.compare.judge.checked_pairs import CheckedPairs
from tensortap.compare.judge.steps.calls import CallRows
from tensortap.core.records import Key

__all__ = ["IsolatedAttributor"]


class IsolatedAttributor:
    """Attributes wrong rows of a check to modules."""

    def __init__(self, checked: CheckedPairs) -> None:
        self._checked = checked
        self._structure = checked.structure
        self._isolation = checked.isolation

    def attribute(self, row: int) -> Attribution:
        """Attribute a wrong row. The caller makes the inputs of a module, and the gradients at its outputs."""
        kind, call = self._structure.kind[row], self._structure.call_of(row)
        if kind == "param_grad" and (reader := self._checked.reader(row)) is not None:
            return Attribution(reader, True)
        if call is None or kind not in ("input", "grad_output"):
            return attribute(row, self._structure, self._checked.judgement)
        if kind == "input":
            caller = self._isolation.caller(call)
            return Attribution(caller, None if caller is None else True)
        tensors = self._structure.returned(row, call)
        users = [user for tensor in tensors for user in self._structure.consumers.get(tensor, ()) if user is not call]
        rows = self._checked.one_gradient.get(row, (row,))
        finders = (
            self._find_detacher(tensors, users),
            self._find_changer(users),
            self._checked.find_misleader(tensors, users),
        )
        blamed = next((each for each in (*finders, self._find_cut_beside(rows[0])) if each is not None), None)
        if blamed is not None:
            return Attribution(blamed, True)
        if (wrong := self._find_wrong_code(rows)) is not None:
            return Attribution(wrong, True)
        outermost = self._structure.call_of(rows[-1]) or call
        caller = self._isolation.caller(outermost)
        own = next((each for each in rows if each in self._checked.used_inside), None)
        if own is not None and (caller is not None or own != rows[-1]):
            return Attribution(self._structure.module[own], True)
        if caller is None:
            return Attribution(outermost.module, None, from_outside=True)
        # A user of the output whose own gradient was not replaced may have sent the wrong one just as well.
        sending = [user for user in users if user.of("grad_output", "grad_input")]
        unforced = [user for user in sending if not any(self._checked.forced[r] for r in user.of("grad_input"))]
        if any(user in unforced for user in self._structure.users(row, call)):
            return attribute(row, self._structure, self._checked.judgement)
        return Attribution(caller, True)

    def _find_detacher(self, tensors: Collection[int], users: Collection[CallRows]) -> str | None:
        """Return a user that sent no gradient back where the reference's did, or the module that detached its input."""
        for user in users:
            _, step, micro = user.scope
            for given in user.of("input"):
                if self._structure.tensor[given] not in tensors:
                    continue
                path = self._structure.path[given]
                key = Key(step, micro, "forward", user.module, user.number, "input", path)
                if key._replace(phase="backward", kind="grad_input") in self._checked.only_reference:
                    cut_off = key in self._isolation.cut_off
                    return self._isolation.cutter(user, path, self._structure) if cut_off else user.module
        return None

    def _find_changer(self, users: Collection[CallRows]) -> str | None:
        """Return a user that should pass its input through unchanged and does not."""
        for user in users:
            if self._structure.passes_through(user) and any(self._checked.is_wrong(row) for row in user.of("output")):
                return user.module
        return None

    def _find_cut_beside(self, row: int) -> str | None:
        """Return the module that made a gradient's tensor, if it has detached another of its outputs: the gradient of
        that one would have come by way of this tensor."""
        call = self._structure.call_of(row)
        if call is None:
            return None
        lost = self._checked.outputs_without_gradient(call)
        return call.module if any(self._isolation.is_cut_off(call, "output", path) for path in lost) else None

    def _find_wrong_code(self, rows: Sequence[int]) -> str | None:
        """Return the outermost module whose code makes a wrong value beside the tensor that it returns: such a code, as
        that of a loss, is wrong in the gradient at the tensor, too."""
        call = self._structure.call_of(rows[-1])
        if len(rows) < 2 or call is None:
            return None
        tensors = {self._structure.tensor[row] for row in call.of("output") if self._checked.is_wrong(row)}
        made_inside = {self._structure.tensor[row] for child in call.children for row in child.of("output")}
        return call.module if tensors - made_inside else None
