"""Separates forwards of training from those of an evaluation, and from traces that compute no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from tensortap.frameworks.base import Framework

__all__ = ["Mode", "Modes"]

Mode = Literal["train", "eval", "trace"]


class Modes:
    """Decides the mode of each outermost call of a model; the calls inside it have the same one.

    A call belongs to evaluation if autograd is off, or if the model is in eval mode although it was trained in training
    mode before. Nothing belongs to evaluation until the run is known to train, so an inference-only run is recorded
    whole. A call is a trace if its tensors have no values: `torch.jit.trace`, fake tensors.

    If a training forward is the first after such calls, they were a trial: a baseline evaluation, a sanity check.
    `discard_trial` is called before it runs.
    """

    def __init__(
        self, framework: Framework, root: Any, *, trains: bool = False, separate: bool = True, recorded: bool = False
    ) -> None:
        self._framework = framework
        self._root = root
        self._separate = separate
        """Whether evaluation is distinguished from training; otherwise only traces are."""
        self.recorded = recorded
        """Whether evaluation is recorded."""
        self._trains = trains
        """Whether the run is known to train: it has an optimizer, a gradient came, or a training forward ran."""
        self._uses_modes = False
        """Whether a forward in training mode has run. Some models are trained in eval mode all the time."""
        self._trial = 0
        """Forwards so far, as long as all of them may have been an evaluation before the training."""
        self._may_be_trial = separate
        self.discard_trial: Callable[[], None] = lambda: None
        """Drops all records so far."""
        self._open: list[str] = []
        """The modules of an evaluation or trace that is in progress."""
        self._mode: Mode = "train"
        self._forwards = {"eval": 0, "trace": 0}
        self._training_calls = 0
        self._eval_mode_calls = 0
        """Outermost calls of this step that count as evaluation only because the model was in eval mode."""

    def observe(self) -> None:
        """Take note of a forward that is not recorded: it may show that the run trains."""
        self._is_training_forward(self._framework.records_gradients())

    @property
    def settled(self) -> bool:
        """Whether `observe` has nothing left to determine."""
        return self._trains and self._uses_modes

    def gradient_came(self) -> None:
        """Take note of a gradient: the run trains."""
        self._trains = True
        self._may_be_trial = False

    def enter(self, module: str, outermost: bool) -> Mode:
        """Return the mode of the call that begins. `outermost`: no training call is in progress."""
        # An exception may have left calls of a trial open, in which a root cannot be.
        if not self._open and not outermost and not (module == "" and self._trial and self._may_be_trial):
            return "train"
        mode = self._classify(self._framework.records_gradients())
        if mode == "train":
            self._open.clear()  # an evaluation that was interrupted never left its modules
            self._training_calls += 1
            return mode
        if not self._open:
            self._forwards[mode] += 1
            self._mode = mode
        self._open.append(module)
        return self._mode

    def of_graph(self, outermost: bool, autograd: bool) -> Mode:
        """Return the mode of a compiled graph that runs, with `autograd` on or off."""
        if self._open:
            return self._mode
        if not outermost:
            return "train"
        mode = self._classify(autograd)
        if mode == "train":
            self._training_calls += 1
        else:
            self._forwards[mode] += 1
        return mode

    def leave(self, module: str) -> Mode:
        """Return the mode of the call that ends."""
        if module not in self._open:
            return "train"
        while self._open.pop() != module:
            pass  # a call that an exception ended without its hook
        return self._mode

    def end_step(self) -> str:
        """Return a notice about the step; usually an empty text."""
        self._may_be_trial = False
        trained_in_eval_mode = self._eval_mode_calls > 0 and not self._training_calls
        self._eval_mode_calls = self._training_calls = 0
        if not trained_in_eval_mode:
            return ""
        self._uses_modes = False
        return (
            f"a step ended after forwards in eval mode alone, which were treated as an evaluation"
            f"{'' if self.recorded else ' and not recorded'}; from then on forwards in eval mode count as training"
        )

    @property
    def evaluations(self) -> int:
        """Number of forwards of an evaluation so far."""
        return self._forwards["eval"]

    @property
    def traces(self) -> int:
        """Number of forwards without values so far."""
        return self._forwards["trace"]

    def notices(self) -> list[str]:
        """Return notices about the run."""
        found = []
        if self._trial and not self._may_be_trial and self.recorded:
            found.append(
                f"{_forwards(self._trial)} before the training began not recorded: that they were an evaluation showed "
                "only then; pass optimizer= to record them"
            )
        if self._forwards["eval"] and not self.recorded:
            found.append(
                f"{_forwards(self._forwards['eval'])} of an evaluation (autograd off, or the model in eval mode) not "
                "recorded"
            )
        if self._forwards["trace"]:
            found.append(
                f"{_forwards(self._forwards['trace'])} without values (torch.jit.trace, fake tensors) not recorded"
            )
        return found

    def _is_training_forward(self, autograd: bool) -> bool:
        if getattr(self._root, "training", True) and autograd:
            self._trains = self._uses_modes = True
            return True
        return False

    def _classify(self, autograd: bool) -> Mode:
        if self._framework.tracing():
            return "trace"
        if self._may_be_trial and not self._open:
            self._check_trial(autograd)
        return "eval" if self._separate and self._is_evaluation(autograd) else "train"

    def _check_trial(self, autograd: bool) -> None:
        """Count a forward before the run is known to train, or end the trial."""
        if self._is_training_forward(autograd):
            self._may_be_trial = False
            if self._trial:
                self._forwards["eval"] += self._trial
                self.discard_trial()
        elif autograd or not (self._trains or self._framework.is_fitting(self._root)):  # else it is known to be one
            self._trial += 1

    def _is_evaluation(self, autograd: bool) -> bool:
        if self._is_training_forward(autograd):
            return False
        if autograd:
            if not self._uses_modes or self._framework.recomputing():
                return False
            self._eval_mode_calls += not self._open
            return True
        self._trains = self._trains or self._framework.is_fitting(self._root)
        # A reentrant checkpoint runs its first forward without autograd, inside an autograd function.
        return self._trains and not self._framework.recomputing() and not self._framework.inside_function()


def _forwards(count: int) -> str:
    return "1 forward" if count == 1 else f"{count} forwards"
