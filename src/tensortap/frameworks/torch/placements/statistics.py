"""Running statistics: buffers in which each process keeps statistics of its own samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensortap.core.placement import GUESS, PARTIAL, Placement

__all__ = ["running_statistic"]

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def running_statistic(
    module: torch.nn.Module, name: str, shape: tuple[int, ...], data_axes: Sequence[str]
) -> Placement | None:
    """Return the placement of a statistic over the samples of one process; None for any other buffer.

    Processes along data axes have other samples, so these buffers are no replicas. The mean of their running means is
    that of one process with all samples. SyncBatchNorm takes statistics over all samples.
    """
    own = isinstance(module, _BATCH_NORMS) and not isinstance(module, torch.nn.SyncBatchNorm) and module.training
    if not own or name not in ("running_mean", "running_var") or not data_axes:
        return None
    return Placement.of_whole(shape, dict.fromkeys(data_axes, PARTIAL + "mean"), GUESS)
