"""The classes of capture that exist in C, too."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from tensortap import native
from tensortap.frameworks.base import Framework
from tensortap.frameworks.device_reader import DeviceReader

__all__ = ["load", "load_for_device", "use_access"]


@cache
def load() -> ModuleType | None:
    """Return the module `following` that `native` builds, ready for use; None where only Python is available."""
    module = native.load()
    if module is None:
        return None
    # Imported here, since the modules of these classes import this one.
    from tensortap.capture.modules.tree import Site
    from tensortap.capture.placement.placer import Placer
    from tensortap.capture.recording.host_rows import CopiedTensor, HostRows
    from tensortap.capture.recording.recorder import Recorder
    from tensortap.capture.recording.slots import RecordSlot
    from tensortap.capture.watching.clock import ModuleCall
    from tensortap.capture.watching.follower import NoGradient, PlannedCall, PlannedEnd
    from tensortap.capture.watching.hook_guard import HookGuard
    from tensortap.capture.watching.templates import Template
    from tensortap.frameworks.device_reader import SlotPlacement
    from tensortap.frameworks.tensor_kind import TensorKind
    from tensortap.kernels.summary.batch import SummaryBatch

    calls = HookGuard, ModuleCall, NoGradient, PlannedCall, PlannedEnd, Site, Template
    records = CopiedTensor, HostRows, Placer, RecordSlot, Recorder, SlotPlacement, SummaryBatch, TensorKind
    classes: tuple[type, ...] = *calls, *records
    module.configure({cls.__name__: cls for cls in classes})
    return module


def use_access(framework: Framework) -> bool:
    """Let the C code ask the framework itself about tensors, if it can. Return whether that may change later."""
    module = load()
    if module is None or not framework.plain_tensors:
        return False
    access, pending = framework.tensor_access()
    if access is not None:
        module.configure_access(access, framework.plain_tensors)
    return pending


def load_for_device(device_reader: DeviceReader, most_pending: int) -> ModuleType | None:
    """Return the module, ready for deferred reads of this reader; None if only Python can run them."""
    module, reads = load(), device_reader.native_reads
    if module is None or reads is None:
        return None
    from tensortap.capture.recording.deferred.pending import PendingRows
    from tensortap.capture.recording.deferred.read_order import ReadOrder, ReadSlot

    classes = {cls.__name__: cls for cls in (*reads.classes, PendingRows, ReadOrder, ReadSlot)}
    module.configure_device(classes, reads.core, *reads.limits, most_pending)
    return module
