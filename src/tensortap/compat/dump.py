"""Every module's tensors of one training step, forward and backward, in one HDF5 file that plain h5py opens.

    dumper = HookerAndDumper(file_path="dumps/")
    dumper.register_hooks(model=model, epoch=0, step=3)
    loss = criterion(model(images), labels); loss.backward()
    dumper.remove_hooks()                       # dumps/0-epoch_3-step_dump.hdf5
    dumper.read_h5py_data()
    open_dump("dumps/0-epoch_3-step_dump.hdf5")["018_BatchNorm2d/grad_input0"][:]

A thin layer: capture watches the model, the store writes the file; `tensortap.open` and `tensortap compare` read it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tensortap.capture.flatten import open_arguments, open_value
from tensortap.capture.observer import Observer
from tensortap.capture.selection import Selection
from tensortap.capture.tree import Site
from tensortap.compat.dump_file import Array, DumpFile, Seen, is_finished, path_of
from tensortap.compat.dump_reading import Contents, open_dump, printed_contents
from tensortap.compat.dump_sink import DumpSink
from tensortap.core.records import display_name
from tensortap.errors import RunNotFound, UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework
from tensortap.report.wording import clean

__all__ = ["DumpHandle", "HookerAndDumper", "open_dump"]

_KINDS = ("input", "output", "grad_output", "grad_input")
_FEW = 8


class HookerAndDumper:
    """Dumps the modules of a torch or paddle model. Hooks are on from `register_hooks` to `remove_hooks`.

    `file_path` is put before the file's name as it is: a folder ends in "/", and is made if it is not there.
    `is_screen_display` shows every tensor that is written.
    """

    def __init__(self, file_path: str | os.PathLike[str] = "", is_screen_display: bool = False) -> None:
        self.file_path = file_path
        self.is_screen_display = is_screen_display
        self._observer: _DumpObserver | None = None
        self._by_hand: DumpFile | None = None
        self._last: Path | None = None
        self._finished = False
        """Whether `remove_hooks` has finished a file since hooks were registered."""
        self._refused = False
        """Whether hooks placed by hand were told that they dump nothing."""

    def register_hooks(self, model: Any, epoch: int = 0, step: int = 0, recursive: bool = True) -> DumpHandle:
        """Put hooks on every module below `model`; or on its direct children alone, if not `recursive`.

        Hooks that are still on are taken off first, and their file is finished. A file of the same name is replaced.
        What is returned has `remove()`, and works as a context manager.
        """
        model = network_of(model)
        framework = framework_of(model)  # asked first: a wrong argument must not end the dump that is being made
        path = path_of(self.file_path, epoch, step, framework.rank())
        if self._by_hand is not None and self._by_hand.path == path:
            raise UsageError(
                f"{path} is being written by hooks that were placed by hand: register with another epoch or step, "
                "or choose another file_path"
            )
        if (open_file := self._open_file()) is not None:
            self._say(f"hooks were still registered: finishing {open_file.path}")
            self.remove_hooks()
        lonely = not framework.children(model)

        def wanted(name: str, module: Any) -> bool:
            return (lonely or bool(name)) and (recursive or "." not in name)

        attributes = {"epoch": epoch, "step": step, "framework": framework.name, "model": type(model).__name__}
        self._observer = _DumpObserver(model, Selection("tensors", _KINDS, wanted), path, attributes, self)
        self._last, self._finished = path, False
        self._say(_registered(self._observer.sites, type(model).__name__, self.is_screen_display))
        self._say(f"dumping to {path}")
        return DumpHandle(self, self._observer)

    def remove_hooks(self) -> None:
        """Take all hooks off, finish the file and say where it is. Calling it twice does no harm.

        Hooks that were placed by hand stay, but dump nothing more.
        """
        if self._by_hand is not None:
            file, self._by_hand, self._finished = self._by_hand, None, True
            file.close(True)
            self._closed(file)
        if self._observer is not None:
            observer, self._observer, self._finished = self._observer, None, True
            observer.close()
            self._told(observer)

    def read_h5py_data(self, path: str | os.PathLike[str] | None = None) -> Contents:
        """Print the groups and datasets of the last dump, or of the file at `path`, with dtype and shape.

        Returns them too, as {group: {dataset: (dtype, shape)}}. Groups are found with any number of digits:
        `contents["018_BatchNorm2d/grad_input0"]`. `open_dump` reads the values.
        """
        file = self._open_file() if path is None else None
        if file is not None:  # still being written: nobody else can open it
            return printed_contents(file.path, file.contents())
        where = Path(path) if path is not None else self._last
        if where is None:
            raise RunNotFound("nothing was dumped yet: call register_hooks.")
        with open_dump(where) as contents:
            return printed_contents(where, contents)

    # --- hooks for those who place them by hand ------------------------------------------------------------------
    def forward_hook_fn(self, module: Any, input: Any, output: Any) -> None:
        """A plain forward hook: `module.register_forward_hook(dumper.forward_hook_fn)`.

        It runs after the module, so it sees the inputs of a module that works in place as they became. It writes into
        the file of `register_hooks`, or else into that of epoch 0 and step 0. After `remove_hooks` it writes nothing,
        and it never replaces a finished file.
        """
        framework = framework_of(module)

        def leaf(value: Any) -> bool:
            return value is None or framework.is_tensor(value)

        args = input if isinstance(input, tuple) else (input,)
        found = [("feat_input", open_arguments(args, {}, leaf).tensors, False)]
        found.append(("feat_output", open_value(output, leaf).tensors, leaf(output)))
        self._dump_by_hand(module, "forward", found)

    def backward_hook_fn(self, module: Any, grad_input: Any, grad_output: Any) -> None:
        """A plain backward hook: `module.register_full_backward_hook(dumper.backward_hook_fn)`."""
        framework = framework_of(module)

        def leaf(value: Any) -> bool:
            return value is None or framework.is_tensor(value)

        found = [("grad_output", open_value(grad_output, leaf).tensors, False)]
        found.append(("grad_input", open_value(grad_input, leaf).tensors, False))
        self._dump_by_hand(module, "backward", found)

    def _dump_by_hand(self, module: Any, phase: str, found: Sequence[tuple[str, list[tuple[str, Any]], bool]]) -> None:
        framework = framework_of(module)
        file = self._open_file() or self._begin_by_hand(framework)
        if file is None:
            return

        def values(tensor: Any) -> Array | None:
            return None if tensor is None or framework.unreadable(tensor) else framework.host(tensor)

        datasets = [
            Seen(name if single else f"{name}{place}", path, values(tensor), file.tick())
            for name, tensors, single in found
            for place, (path, tensor) in enumerate(tensors)
        ]
        file.group(type(module).__name__, {"phase": phase}, datasets)

    def _begin_by_hand(self, framework: Framework) -> DumpFile | None:
        """Create the file of hooks that were placed by hand. None if there is to be none, with one warning."""
        path = path_of(self.file_path, 0, 0, framework.rank())
        if self._finished or is_finished(path):
            if not self._refused:
                self._refused = True
                why = "remove_hooks has finished the dump" if self._finished else f"{path} is a finished dump"
                warnings.warn(
                    f"tensortap: hooks of HookerAndDumper that were placed by hand dump nothing more: {why}. Remove "
                    "these hooks, call register_hooks for another step, or choose another file_path.",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return None
        self._by_hand = DumpFile(path, {"epoch": 0, "step": 0, "framework": framework.name}, self._detail)
        self._last = path
        self._say(f"dumping to {path}")
        return self._by_hand

    # --- the screen ----------------------------------------------------------------------------------------------
    def _say(self, text: str) -> None:
        print(f"[tensortap] {text}", flush=True)

    def _detail(self, text: str) -> None:
        if self.is_screen_display:
            print(text, flush=True)

    def _told(self, observer: _DumpObserver) -> None:
        if self.is_screen_display:
            for row in observer.coverage:
                if row.status != "seen" or row.reason:
                    self._detail(clean(f"  {display_name(row.module)} ({row.cls}): {row.status}. {row.reason}"))
        self._say("all hooks removed")
        self._closed(observer.file)

    def _closed(self, file: DumpFile) -> None:
        self._say(f"{file.groups} groups written, file closed: {file.path}")

    def _open_file(self) -> DumpFile | None:
        return self._observer.file if self._observer is not None else self._by_hand


class DumpHandle:
    """The hooks of one `register_hooks`. As a context manager it takes them off whatever happens inside."""

    def __init__(self, dumper: HookerAndDumper, observer: _DumpObserver) -> None:
        self._dumper = dumper
        self._observer = observer
        self.path = observer.path

    def remove(self) -> None:
        """Take these hooks off, if they still are on."""
        if self._dumper._observer is self._observer:
            self._dumper.remove_hooks()

    def __enter__(self) -> DumpHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._observer.__exit__(kind, error, trace)  # the file says why it is not complete
        self.remove()


class _DumpObserver(Observer):
    """An observer whose sink is a dump."""

    def __init__(
        self, model: Any, selection: Selection, path: Path, attributes: dict[str, Any], dumper: HookerAndDumper
    ) -> None:
        self.path = path
        self.sites: list[Site] = []
        self._attributes = attributes
        self._detail = dumper._detail
        super().__init__(model, selection, self._open_dump)

    def _open_dump(self) -> DumpSink:
        wants = self._selection.wants_module
        self.sites = [s for s in self._tree.sites if s.inside is None and wants(s.name, s.cls, s.owner)]
        self.file = DumpFile(self.path, self._attributes, self._detail)
        return DumpSink(self._framework, self.sites, self._guard, self.file)


def _registered(sites: Sequence[Site], model: str, all_of_them: bool) -> str:
    names = [f"{display_name(site.name)} ({site.cls})" for site in sites if site.callable]
    listed = names if all_of_them else names[:_FEW]
    more = f", … and {len(names) - len(listed)} more" if len(listed) < len(names) else ""
    return clean(f"hooks registered on {len(names)} modules of {model}: {', '.join(listed)}{more}")
