"""The classes of capture that exist in C, too."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from tensortap import native

__all__ = ["load"]


@cache
def load() -> ModuleType | None:
    """Return the module `following` that `native` builds, ready for use; None where only Python is available."""
    module = native.load()
    if module is None:
        return None
    # Imported here, since the modules of these classes import this one.
    from tensortap.capture.clock import ModuleCall
    from tensortap.capture.follower import NoGradient, PlannedCall, PlannedEnd
    from tensortap.capture.host_rows import CopiedTensor, HostRows
    from tensortap.capture.recorder import Recorder
    from tensortap.capture.slots import RecordSlot
    from tensortap.capture.templates import Template
    from tensortap.capture.tree import Site
    from tensortap.frameworks.tensor_kind import TensorKind
    from tensortap.kernels.summary.batch import SummaryBatch

    classes = (CopiedTensor, HostRows, ModuleCall, NoGradient, PlannedCall, PlannedEnd, RecordSlot, Recorder, Site)
    module.configure({cls.__name__: cls for cls in (*classes, SummaryBatch, Template, TensorKind)})
    return module
