"""Tap the tensors that flow through a training run; find the first place where two runs diverge."""

from __future__ import annotations

from tensortap import starting as _starting  # noqa: F401  before all that takes time

# isort: split
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from tensortap.capture import capture
from tensortap.compare import compare
from tensortap.core import presentation as _presentation
from tensortap.core import zooming as _zooming
from tensortap.errors import TensortapError
from tensortap.health import health
from tensortap.isolate import check, check_compiled, noise
from tensortap.model.audit import audit
from tensortap.model.inspect import inspect
from tensortap.model.peek import peek
from tensortap.model.profile.annotate import annotate
from tensortap.model.profile.module_times import module_times
from tensortap.model.transfer import transfer
from tensortap.replay import replay
from tensortap.zoom import zoom

if _TYPE_CHECKING:
    from tensortap.capture.tap import Tap
    from tensortap.core.records import Comparison, Finding, Key
    from tensortap.store import Run

__all__ = [
    "Comparison",
    "Finding",
    "Key",
    "Run",
    "Tap",
    "TensortapError",
    "annotate",
    "audit",
    "capture",
    "check",
    "check_compiled",
    "compare",
    "health",
    "inspect",
    "module_times",
    "noise",
    "open",
    "peek",
    "replay",
    "transfer",
    "zoom",
]
__version__ = "0.1.0"

_TYPES = {
    "Comparison": "tensortap.core.records",
    "Finding": "tensortap.core.records",
    "Key": "tensortap.core.records",
    "Run": "tensortap.store.run",
    "Tap": "tensortap.capture.tap",
}
"""Classes for type hints. `__getattr__` imports them at their first use, because Run and Tap load pyarrow."""


def open(path: str | _os.PathLike[str] | Run) -> Run:
    """Open a run lazily: records, tensors and coverage are read when they are used.

    path: the folder of a run; or a checkpoint, an export, an .npz of one call of a module, an HDF5 dump or a folder of
        them, or a tree of .npy files. Nothing is unpickled. A run that is open already, such as one held in memory, is
        returned as it is.

    >>> run = tensortap.open("runs/a")
    >>> for record in run.records(module="layers.0.*", kind="output"):
    ...     print(record.key, record.summary.l2)
    """
    from tensortap.kernels import summarize
    from tensortap.store.formats import open_any

    return open_any(path, summarize)


def _load_reports() -> _presentation.Reports:
    from tensortap.report import notebook

    return notebook


_presentation.connect(_load_reports)


def _load_zooms() -> _zooming.Zooms:
    from tensortap.zoom import verdict

    return verdict


_zooming.connect(_load_zooms)


def __getattr__(name: str) -> _Any:
    if name in _TYPES:
        from importlib import import_module

        return getattr(import_module(_TYPES[name]), name)
    raise AttributeError(f"module 'tensortap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
