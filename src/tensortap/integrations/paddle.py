"""A callback for `paddle.Model.fit`.

>>> from tensortap.integrations.paddle import TapCallback                      # doctest: +SKIP
>>> model.fit(data, callbacks=[TapCallback("runs/a")])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle.callbacks import Callback

from tensortap.frameworks.hooks import Detour
from tensortap.integrations.fits import FitRecorder

__all__ = ["TapCallback"]


class TapCallback(FitRecorder, Callback):  # type: ignore[misc]  # its class has no types
    """Records each `model.fit()`. The arguments are those of `tensortap.capture`.

    Steps are optimizer steps and begin at 0 in each run. A second `fit()` records into path-2. An exception closes the
    run as failed. Evaluation between epochs is not training; `evaluation=True` records it, too.
    """

    _watched: Detour | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._release()
        self._fits.begin(self.model, self.model)
        self._watched = Detour(self.model, "_run_one_epoch", self._epoch)  # a fit has no event for exceptions

    def on_train_end(self, logs: Any = None) -> None:
        self._release()
        self._fits.end()

    def _epoch(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            self._release()
            self._fits.fail(error)
            raise

    def _release(self) -> None:
        if self._watched is not None:
            self._watched.remove()
            self._watched = None
