"""Gradients as they come, are cleared and are used: what a training loop does with them, in order.

Only what is certain is said. A backward more than one before a step is accumulation and fine; a backward that adds to
gradients which a step has already used is what a forgotten zero_grad looks like, and is said with "looks like".
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks.ownership import Ownership
from tensortap.model.inspect.concerns import Concern

__all__ = ["Live"]


class Live:
    """Watches one model and its optimizer. A context manager; `warnings` can be read at any time.

    >>> with tensortap.inspect(model, optimizer).watch() as live:
    ...     train(model, optimizer)
    >>> print(live)
    """

    def __init__(self, ownership: Ownership, model: Any, optimizer: Any, tensors: Mapping[str, Any]) -> None:
        if optimizer is None:
            raise UsageError("watch() needs the optimizer too: tensortap.inspect(model, optimizer).watch()")
        self._own = ownership
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._tensors = {
            self._names.get(id(tensor), f"optimizer[{number}]"): tensor
            for number, tensor in enumerate(t for group in ownership.groups(optimizer) for t in group)
            if ownership.framework.requires_gradient(tensor)
        }
        self._model, self._optimizer = model, optimizer
        self._said: dict[str, Concern] = {}
        self._at: dict[str, list[int]] = {}
        self.steps = 0
        """Steps of the optimizer so far."""
        self._arrived: set[str] = set()  # gradients since the last step
        self._cleared: dict[str, str] = {}  # of those, the ones that were cleared again, and by whom
        self._used: set[str] = set()  # gradients that a step has used and nobody has cleared
        self._ever: set[str] = set()
        self._undo: ExitStack | None = None

    def __enter__(self) -> Live:
        if self._undo is not None:
            raise UsageError("this watch is on already; call watch() again for another one")
        with ExitStack() as undo:
            for name, tensor in self._tensors.items():
                remove = self._own.framework.on_parameter_gradient(tensor, partial(self._gradient, name))
                if remove is not None:
                    undo.callback(remove)
            undo.callback(self._own.around_step(self._optimizer, self._before_step, self._after_step))
            for owner, word, methods in (
                (self._model, "model", self._own.clears_on_model),
                (self._optimizer, "optimizer", self._own.clears_on_optimizer),
            ):
                undo.callback(self._own.on_clearing(owner, methods, partial(self._clearing, word)))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything back. Calling it twice does no harm."""
        if self._undo is not None:
            self._undo.close()

    @property
    def warnings(self) -> list[Concern]:
        found = [
            Concern(code, concern.text + self._when(self._at[code]), concern.names)
            for code, concern in self._said.items()
        ]
        never = [name for name in self._tensors if name not in self._ever]
        if self.steps and never and self._ever:
            listed = ", ".join(never[:3]) + (f" and {len(never) - 3} more" if len(never) > 3 else "")
            found.append(
                Concern("no-gradient", f"no gradient ever came for {listed}: not used by the loss?", tuple(never))
            )
        return found

    def __str__(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps != 1)} watched"
        if not (warnings := self.warnings):
            return f"{steps}: gradients came, were used and were cleared in order" if self.steps else steps
        from tensortap.report.wording import wrap  # loads rich; importing tensortap must not

        return "\n".join([steps, *("! " + "\n  ".join(wrap(str(concern), 78)) for concern in warnings)])

    # --- what happens ------------------------------------------------------------------------------------------
    def _gradient(self, name: str, gradient: Any | None) -> None:
        if gradient is None:
            return
        if name in self._used:
            # Asked of the tensor itself: it may have been cleared by hand.
            if name not in self._arrived and self._own.gradient(self._tensors[name]) == "set":
                self._say(
                    "not-cleared",
                    "backward added to gradients that a step had already used: "
                    f"this looks like a forgotten {self._own.clearing}",
                    (name,),
                )
            self._used.discard(name)
        self._ever.add(name)
        self._arrived.add(name)
        self._cleared.pop(name, None)

    def _clearing(self, owner: str, method: str) -> None:
        for name in self._arrived | self._used:
            if self._own.gradient(self._tensors[name]) == "set":
                continue  # it was another's to clear
            self._used.discard(name)
            if name in self._arrived:
                self._cleared[name] = f"{owner}.{method}()"

    def _before_step(self, closure: bool) -> None:
        if closure:  # it clears and computes inside the step
            return
        lost = {name: self._cleared.get(name, "") for name in sorted(self._arrived)}
        for name in list(lost):
            if not lost[name] and self._own.gradient(self._tensors[name]) != "none":
                del lost[name]
        if lost:
            who = next(filter(None, lost.values()), "") or "something"
            whole = "the step has none to use" if len(lost) == len(self._arrived) else "the step cannot use those"
            self._say(
                "cleared-before-step",
                f"{who} came between backward and step and cleared {len(lost)} of {len(self._arrived)} "
                f"gradients: {whole}",
                tuple(lost),
            )
        elif not self._arrived:
            self._say("step-without-backward", "step without a backward before it: there is no new gradient to use", ())

    def _after_step(self) -> None:
        self._used |= {name for name in self._arrived if name not in self._cleared}
        self._arrived.clear()
        self._cleared.clear()
        self.steps += 1

    def _say(self, code: str, text: str, names: tuple[str, ...]) -> None:
        known = self._said.get(code)
        self._said[code] = Concern(code, text, tuple(dict.fromkeys((known.names if known else ()) + names)))
        at = self._at.setdefault(code, [])
        if not at or at[-1] != self.steps:
            at.append(self.steps)

    @staticmethod
    def _when(steps: list[int]) -> str:
        if len(steps) <= 3:
            return f" (step {', '.join(map(str, steps))})"
        return f" ({len(steps)} steps, first {steps[0]})"
