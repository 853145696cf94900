"""Dump every module's tensors of one training step, forward and backward, to one HDF5 file that plain h5py opens.

    dumper = HookerAndDumper(file_path="dumps/")
    dumper.register_hooks(model=model, epoch=0, step=3)
    loss = criterion(model(images), labels); loss.backward()
    dumper.remove_hooks()                       # dumps/0-epoch_3-step_dump.hdf5
    dumper.read_h5py_data()
    open_dump("dumps/0-epoch_3-step_dump.hdf5")["018_BatchNorm2d/grad_input0"][:]

Capture observes the model, and the store writes the file. `tensortap.open` and `tensortap compare` read it.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tensortap.capture.modules.tree import Site
from tensortap.capture.observer import Observer
from tensortap.capture.selection import Selection
from tensortap.capture.watching.flatten import open_arguments, open_value
from tensortap.compat.dump_file import Array, DumpedTensor, DumpFile, dump_path, is_finished
from tensortap.compat.dump_reading import DumpContents, open_dump, print_contents
from tensortap.compat.dump_sink import DumpSink
from tensortap.core.records import display_name
from tensortap.errors import RunNotFound, StoreWriteError, UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework
from tensortap.report.wording import clean

__all__ = ["DumpHandle", "HookerAndDumper", "open_dump"]

_KINDS = ("input", "output", "grad_output", "grad_input")
_MAX_LISTED = 8


class HookerAndDumper:
    """Dumps the modules of a torch or paddle model, from `register_hooks` to `remove_hooks`.

    `file_path` is a prefix of the file's name: a folder must end in "/", and is created if it does not exist.
    `is_screen_display` prints every tensor that is written.
    """

    def __init__(self, file_path: str | os.PathLike[str] = "", is_screen_display: bool = False) -> None:
        self.file_path = file_path
        self.is_screen_display = is_screen_display
        self._observer: _DumpObserver | None = None
        self._manual_file: DumpFile | None = None
        self._last: Path | None = None
        self._finished = False
        """Whether `remove_hooks` has finished a file since hooks were registered."""
        self._warned_manual = False
        """Whether a warning has said that hooks placed by the user dump nothing more."""

    def register_hooks(self, model: Any, epoch: int = 0, step: int = 0, recursive: bool = True) -> DumpHandle:
        """Place hooks on every module below `model`, or only on its direct children if not `recursive`.

        First remove hooks that are still registered, and finish their file. Replace a file of the same name. The
        returned handle has `remove()` and works as a context manager.
        """
        model = network_of(model)
        framework = framework_of(model)  # checked first: a wrong argument must not end the dump under way
        epoch, step = (_number(name, value) for name, value in (("epoch", epoch), ("step", step)))
        path = dump_path(self.file_path, epoch, step, framework.rank())
        if self._manual_file is not None and self._manual_file.path == path:
            raise UsageError(
                f"{path} is being written by hooks that you placed yourself: register with another epoch or step, "
                "or choose another file_path"
            )
        if (open_file := self._open_file()) is not None:
            self._print(f"hooks were still registered: finishing {open_file.path}")
            self.remove_hooks()
        is_single = not framework.children(model)

        def wanted(name: str, module: Any) -> bool:
            return (is_single or bool(name)) and (recursive or "." not in name)

        attributes = {"epoch": epoch, "step": step, "framework": framework.name, "model": type(model).__name__}
        self._observer = _DumpObserver(model, Selection("tensors", _KINDS, wanted), path, attributes, self)
        self._last, self._finished = path, False
        self._print(_describe_registration(self._observer.sites, type(model).__name__, self.is_screen_display))
        self._print(f"dumping to {path}")
        return DumpHandle(self, self._observer)

    def remove_hooks(self) -> None:
        """Remove all hooks, finish the file and print its path. Idempotent.

        Hooks that the user placed stay, but dump nothing more.
        """
        if self._manual_file is not None:
            file, self._manual_file, self._finished = self._manual_file, None, True
            with suppress(StoreWriteError):  # the report says it
                file.close(True)
            self._report_file(file)
        if self._observer is not None:
            observer, self._observer, self._finished = self._observer, None, True
            observer.close()
            self._report_removal(observer)

    def read_h5py_data(self, path: str | os.PathLike[str] | None = None) -> DumpContents:
        """Print and return the groups and datasets of the last dump, or of the file at `path`, with dtype and shape.

        The result is {group: {dataset: (dtype, shape)}}. It finds groups with any number of digits:
        `contents["018_BatchNorm2d/grad_input0"]`. `open_dump` reads the values.
        """
        file = self._open_file() if path is None else None
        if file is not None:  # still being written: HDF5 cannot open it a second time
            return print_contents(file.path, file.contents())
        where = Path(path) if path is not None else self._last
        if where is None:
            raise RunNotFound("nothing was dumped yet: call register_hooks and run the model first.")
        with open_dump(where) as contents:
            return print_contents(where, contents)

    # --- hooks that the user places ------------------------------------------------------------------------------
    def forward_hook_fn(self, module: Any, input: Any, output: Any) -> None:
        """Dump a call, as a plain forward hook: `module.register_forward_hook(dumper.forward_hook_fn)`.

        The hook runs after the module, so it sees inputs that the module changed in place with their new values. It
        writes to the file of `register_hooks`, or else to that of epoch 0 and step 0. After `remove_hooks` it writes
        nothing, and it never replaces a finished file.
        """
        framework = framework_of(module)

        def leaf(value: Any) -> bool:
            return value is None or framework.is_tensor(value)

        args = input if isinstance(input, tuple) else (input,)
        found = [("feat_input", open_arguments(args, {}, leaf).tensors, False)]
        found.append(("feat_output", open_value(output, leaf).tensors, leaf(output)))
        self._dump_from_hook(module, "forward", found)

    def backward_hook_fn(self, module: Any, grad_input: Any, grad_output: Any) -> None:
        """Dump gradients, as a plain backward hook: `module.register_full_backward_hook(dumper.backward_hook_fn)`."""
        framework = framework_of(module)

        def leaf(value: Any) -> bool:
            return value is None or framework.is_tensor(value)

        found = [("grad_output", open_value(grad_output, leaf).tensors, False)]
        found.append(("grad_input", open_value(grad_input, leaf).tensors, False))
        self._dump_from_hook(module, "backward", found)

    def _dump_from_hook(
        self, module: Any, phase: str, found: Sequence[tuple[str, list[tuple[str, Any]], bool]]
    ) -> None:
        framework = framework_of(module)
        file = self._open_file() or self._open_manual_file(framework)
        if file is None or file.failure:
            return

        def values(tensor: Any) -> Array | None:
            return None if tensor is None or framework.unreadable(tensor) else framework.host(tensor)

        datasets = [
            DumpedTensor(name if single else f"{name}{place}", path, values(tensor), file.tick())
            for name, tensors, single in found
            for place, (path, tensor) in enumerate(tensors)
        ]
        try:
            file.group(type(module).__name__, {"phase": phase}, datasets)
        except StoreWriteError as error:  # a hook must not end the training
            warnings.warn(
                f"tensortap stopped dumping: {error}; training continues without it", RuntimeWarning, stacklevel=4
            )

    def _open_manual_file(self, framework: Framework) -> DumpFile | None:
        """Create the file of hooks that the user placed. Return None, with one warning, if the dump is finished."""
        path = dump_path(self.file_path, 0, 0, framework.rank())
        if self._finished or is_finished(path):
            if not self._warned_manual:
                self._warned_manual = True
                why = "remove_hooks has finished the dump" if self._finished else f"{path} is a finished dump"
                warnings.warn(
                    f"tensortap: hooks of HookerAndDumper that you placed yourself dump nothing more: {why}. Remove "
                    "these hooks, call register_hooks for another step, or choose another file_path.",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return None
        self._manual_file = DumpFile(path, {"epoch": 0, "step": 0, "framework": framework.name}, self._print_detail)
        self._last = path
        self._print(f"dumping to {path}")
        return self._manual_file

    # --- printing ------------------------------------------------------------------------------------------------
    def _print(self, text: str) -> None:
        print(f"[tensortap] {text}", flush=True)

    def _print_detail(self, text: str) -> None:
        if self.is_screen_display:
            print(text, flush=True)

    def _report_removal(self, observer: _DumpObserver) -> None:
        if self.is_screen_display:
            for row in observer.coverage:
                if row.status != "seen" or row.reason:
                    self._print_detail(clean(f"  {display_name(row.module)} ({row.cls}): {row.status}. {row.reason}"))
        self._print("all hooks removed")
        self._report_file(observer.file)

    def _report_file(self, file: DumpFile) -> None:
        if file.failure:
            self._print(f"{file.groups} groups written, then no more: {file.failure}; file incomplete: {file.path}")
        else:
            why = "" if file.groups else " (no hooked module ran before remove_hooks)"
            self._print(f"{file.groups} groups written{why}, file closed: {file.path}")

    def _open_file(self) -> DumpFile | None:
        return self._observer.file if self._observer is not None else self._manual_file


class DumpHandle:
    """The hooks of one `register_hooks`. As a context manager, it removes them also after an error."""

    def __init__(self, dumper: HookerAndDumper, observer: _DumpObserver) -> None:
        self._dumper = dumper
        self._observer = observer
        self.path = observer.path

    def remove(self) -> None:
        """Remove these hooks, if they are still registered."""
        if self._dumper._observer is self._observer:
            self._dumper.remove_hooks()

    def __enter__(self) -> DumpHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._observer.__exit__(kind, error, trace)  # records in the file why it is not complete
        self.remove()


class _DumpObserver(Observer):
    """An observer that writes to a dump."""

    def __init__(
        self, model: Any, selection: Selection, path: Path, attributes: dict[str, Any], dumper: HookerAndDumper
    ) -> None:
        self.path = path
        self.sites: list[Site] = []
        self._attributes = attributes
        self._print_detail = dumper._print_detail
        super().__init__(model, selection, self._open_dump)

    def _open_dump(self) -> DumpSink:
        wants = self._selection.wants_module
        self.sites = [s for s in self._tree.sites if s.inside is None and wants(s.name, s.cls, s.owner)]
        self.file = DumpFile(self.path, self._attributes, self._print_detail)
        return DumpSink(self._framework, self.sites, self._guard, self.file)


def _number(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"{name} takes an integer of 0 or more, because it is part of the file's name, not {value!r}")
    return number


def _describe_registration(sites: Sequence[Site], model: str, list_all: bool) -> str:
    names = [f"{display_name(site.name)} ({site.cls})" for site in sites if site.callable]
    shown = names if list_all else names[:_MAX_LISTED]
    more = f", … and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return clean(f"hooks registered on {len(names)} modules of {model}: {', '.join(shown)}{more}")
