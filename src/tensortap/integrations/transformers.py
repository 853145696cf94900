"""A callback for the Trainer of transformers, and for that of PaddleNLP, which has the same events.

>>> from tensortap.integrations.transformers import TapCallback                # doctest: +SKIP
>>> Trainer(model, args, train_dataset=data, callbacks=[TapCallback("runs/a")]).train()
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tensortap.frameworks.hooks import Detour
from tensortap.integrations.fits import FitRecorder

try:
    from transformers import TrainerCallback
except ImportError:  # PaddleNLP takes any object that has the methods of its events
    TrainerCallback = object

__all__ = ["TapCallback"]


class TapCallback(FitRecorder, TrainerCallback):  # type: ignore[misc]  # its class has no types
    """Records each call of `trainer.train()`. The arguments are those of `tensortap.capture`.

    Steps are optimizer steps and begin at 0 in each run; the run notes the `global_step` at which a training was
    resumed. A second `train()` records into path-2. An exception closes the run as failed.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch `train` for exceptions: the Trainer has no event for them."""
        if (trainer := _caller(self)) is not None:
            Detour(trainer, "train", self._train)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._fits.begin(kwargs["model"], kwargs["optimizer"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._fits.end()

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        except BaseException as error:
            self._fits.fail(error)
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # an event of another version
            return lambda *args, **kwargs: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _caller(callback: TapCallback) -> Any:
    """Return the trainer that is calling a callback: events do not name it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        callbacks = getattr(getattr(found, "callback_handler", None), "callbacks", ())
        if any(each is callback for each in callbacks) and callable(getattr(found, "train", None)):
            return found
        frame = frame.f_back
    return None
