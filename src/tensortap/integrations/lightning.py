"""A callback for Lightning.

>>> from tensortap.integrations.lightning import TapCallback                   # doctest: +SKIP
>>> lightning.Trainer(callbacks=[TapCallback("runs/a")]).fit(model, data)
"""

from __future__ import annotations

from typing import Any

from tensortap.integrations.fits import FitRecorder

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

__all__ = ["TapCallback"]


class TapCallback(FitRecorder, Callback):  # type: ignore[misc]  # its class has no types
    """Records each `trainer.fit()`. The arguments are those of `tensortap.capture`.

    Steps are optimizer steps and begin at 0 in each run; the run notes the `global_step` at which a training was
    resumed. A second `fit()` records into path-2. An exception closes the run as failed.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers = trainer.optimizers
        chosen = (optimizers if len(optimizers) > 1 else optimizers[0]) if optimizers else None
        self._fits.begin(pl_module, chosen, trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._fits.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._fits.fail(exception)
