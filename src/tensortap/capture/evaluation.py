"""Separates forwards of an evaluation from those of training, so that only training counts micro steps."""

from __future__ import annotations

from typing import Any

from tensortap.frameworks.base import Framework

__all__ = ["Evaluation"]


class Evaluation:
    """Classifies each outermost call of a model.

    A call belongs to evaluation if autograd is off, or if the model is in eval mode although it was trained in training
    mode before. Nothing belongs to evaluation until the run is known to train, so an inference-only run is recorded
    whole.
    """

    def __init__(self, framework: Framework, root: Any, trains: bool = False) -> None:
        self._framework = framework
        self._root = root
        self._trains = trains
        """Whether the run is known to train: it has an optimizer, a gradient came, or a training forward ran."""
        self._uses_modes = False
        """Whether a forward in training mode has run. Some models are trained in eval mode all the time."""
        self._open: list[str] = []
        """The modules of an evaluation that is in progress."""
        self._forwards = 0
        self._training_calls = 0
        self._eval_mode_calls = 0
        """Outermost calls of this step that were ignored only because the model was in eval mode."""

    def observe(self) -> None:
        """Take note of a forward that is not recorded: it may show that the run trains."""
        self._is_training_forward()

    def gradient_came(self) -> None:
        """Take note of a gradient: the run trains."""
        self._trains = True

    def enter(self, module: str, outermost: bool) -> bool:
        """Return whether the call that begins belongs to evaluation. `outermost`: no training call is in progress."""
        if not self._open and not outermost:
            return False
        if not self._classify():
            self._open.clear()  # an evaluation that was interrupted never left its modules
            self._training_calls += 1
            return False
        self._forwards += not self._open
        self._open.append(module)
        return True

    def leave(self, module: str) -> bool:
        """Return whether the call that ends belongs to evaluation."""
        if module not in self._open:
            return False
        while self._open.pop() != module:
            pass  # a call that an exception ended without its hook
        return True

    def end_step(self) -> str:
        """Return what to report about the step: usually nothing."""
        trained_in_eval_mode = self._eval_mode_calls > 0 and not self._training_calls
        self._eval_mode_calls = self._training_calls = 0
        if not trained_in_eval_mode:
            return ""
        self._uses_modes = False
        return (
            "a step ended after forwards in eval mode alone, which were treated as an evaluation and not recorded; "
            "from then on forwards in eval mode count as training"
        )

    def notice(self) -> str:
        """Return what to report about the run."""
        if not self._forwards:
            return ""
        forwards = "1 forward" if self._forwards == 1 else f"{self._forwards} forwards"
        return f"{forwards} of an evaluation (autograd off, or the model in eval mode) not recorded"

    def _is_training_forward(self) -> bool:
        if getattr(self._root, "training", True) and self._framework.records_gradients():
            self._trains = self._uses_modes = True
            return True
        return False

    def _classify(self) -> bool:
        if self._is_training_forward():
            return False
        if self._framework.records_gradients():
            if not self._uses_modes or self._framework.recomputing():
                return False
            self._eval_mode_calls += not self._open
            return True
        # A reentrant checkpoint runs its first forward without autograd, inside an autograd function.
        return self._trains and not self._framework.recomputing() and not self._framework.inside_function()
