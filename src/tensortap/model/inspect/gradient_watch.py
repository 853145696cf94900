"""Watch when a training loop computes, uses and clears gradients, and warn about a wrong order.

The warnings claim only what is certain. Several backwards before a step are accumulation, which is fine. A backward
that adds to gradients which a step has already used "looks like" a forgotten zero_grad, and the warning says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks.ownership import Ownership
from tensortap.model.inspect.inspection_warnings import InspectionWarning

__all__ = ["GradientWatch"]


class GradientWatch:
    """A watch on one model and its optimizer. Use it as a context manager; read `warnings` at any time.

    >>> with tensortap.inspect(model, optimizer).watch() as live:
    ...     train(model, optimizer)
    >>> print(live)
    """

    def __init__(self, ownership: Ownership, model: Any, optimizer: Any, tensors: Mapping[str, Any]) -> None:
        if optimizer is None:
            raise UsageError("watch() needs the optimizer too: tensortap.inspect(model, optimizer).watch()")
        self._ownership = ownership
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._tensors = {
            self._names.get(id(tensor), f"optimizer[{number}]"): tensor
            for number, tensor in enumerate(t for group in ownership.groups(optimizer) for t in group)
            if ownership.framework.requires_gradient(tensor)
        }
        self._model, self._optimizer = model, optimizer
        self._warnings: dict[str, InspectionWarning] = {}
        self._steps_of: dict[str, list[int]] = {}
        self.steps = 0
        """Steps of the optimizer so far."""
        self._arrived: set[str] = set()  # gradients since the last step
        self._cleared: dict[str, str] = {}  # those of them that were cleared again → the call that cleared them
        self._used: set[str] = set()  # gradients that a step has used and that are not cleared yet
        self._ever_arrived: set[str] = set()
        self._undo: ExitStack | None = None

    def __enter__(self) -> GradientWatch:
        if self._undo is not None:
            raise UsageError("this watch was entered before: call watch() again for a new one")
        with ExitStack() as undo:
            for name, tensor in self._tensors.items():
                remove = self._ownership.framework.on_parameter_gradient(tensor, partial(self._on_gradient, name))
                if remove is not None:
                    undo.callback(remove)
            undo.callback(self._ownership.around_step(self._optimizer, self._before_step, self._after_step))
            for owner, owner_name, methods in (
                (self._model, "model", self._ownership.clears_on_model),
                (self._optimizer, "optimizer", self._ownership.clears_on_optimizer),
            ):
                undo.callback(self._ownership.on_clearing(owner, methods, partial(self._on_clearing, owner_name)))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove all hooks. Idempotent."""
        if self._undo is not None:
            self._undo.close()

    @property
    def warnings(self) -> list[InspectionWarning]:
        found = [
            InspectionWarning(code, warning.text + self._format_steps(self._steps_of[code]), warning.names)
            for code, warning in self._warnings.items()
        ]
        missing = tuple(name for name in self._tensors if name not in self._ever_arrived)
        if self.steps and missing and self._ever_arrived:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            text = f"no gradient ever came for {listed}: not used by the loss?"
            found.append(InspectionWarning("no-gradient", text, missing))
        return found

    def __str__(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps != 1)} watched"
        if not (warnings := self.warnings):
            return f"{steps}: gradients came, were used and were cleared in order" if self.steps else steps
        from tensortap.report.wording import wrap  # loads rich; importing tensortap must not

        return "\n".join([steps, *("! " + "\n  ".join(wrap(str(warning), 78)) for warning in warnings)])

    # --- events of the training loop ---------------------------------------------------------------------------
    def _on_gradient(self, name: str, gradient: Any | None) -> None:
        if gradient is None:
            return
        if name in self._used:
            # Read the tensor's own gradient: user code may have cleared it.
            if name not in self._arrived and self._ownership.gradient(self._tensors[name]) == "set":
                self._warn(
                    "not-cleared",
                    "backward added to gradients that a step had already used: "
                    f"this looks like a forgotten {self._ownership.clearing}",
                    (name,),
                )
            self._used.discard(name)
        self._ever_arrived.add(name)
        self._arrived.add(name)
        self._cleared.pop(name, None)

    def _on_clearing(self, owner: str, method: str) -> None:
        for name in self._arrived | self._used:
            if self._ownership.gradient(self._tensors[name]) == "set":
                continue  # this call does not clear it
            self._used.discard(name)
            if name in self._arrived:
                self._cleared[name] = f"{owner}.{method}()"

    def _before_step(self, closure: bool) -> None:
        if closure:  # the closure clears and computes gradients inside the step
            return
        cleared = {name: self._cleared.get(name, "") for name in sorted(self._arrived)}
        for name in list(cleared):
            if not cleared[name] and self._ownership.gradient(self._tensors[name]) != "none":
                del cleared[name]
        if cleared:
            who = next(filter(None, cleared.values()), "") or "something"
            consequence = (
                "the step has none to use" if len(cleared) == len(self._arrived) else "the step cannot use those"
            )
            self._warn(
                "cleared-before-step",
                f"{who} came between backward and step and cleared {len(cleared)} of {len(self._arrived)} "
                f"gradients: {consequence}",
                tuple(cleared),
            )
        elif not self._arrived:
            self._warn(
                "step-without-backward", "step without a backward before it: there is no new gradient to use", ()
            )

    def _after_step(self) -> None:
        self._used |= {name for name in self._arrived if name not in self._cleared}
        self._arrived.clear()
        self._cleared.clear()
        self.steps += 1

    def _warn(self, code: str, text: str, names: tuple[str, ...]) -> None:
        known = self._warnings.get(code)
        self._warnings[code] = InspectionWarning(
            code, text, tuple(dict.fromkeys((known.names if known else ()) + names))
        )
        steps = self._steps_of.setdefault(code, [])
        if not steps or steps[-1] != self.steps:
            steps.append(self.steps)

    @staticmethod
    def _format_steps(steps: list[int]) -> str:
        if len(steps) <= 3:
            return f" (step {', '.join(map(str, steps))})"
        return f" ({len(steps)} steps, first {steps[0]})"
