"""Every module's tensors of one training step, forward and backward, in one HDF5 file that plain h5py opens.

    dumper = HookerAndDumper(file_path="dumps/")
    dumper.register_hooks(model=model, epoch=0, step=3)
    loss = criterion(model(images), labels); loss.backward()
    dumper.remove_hooks()                       # dumps/0-epoch_3-step_dump.hdf5
    dumper.read_h5py_data()

A thin layer: capture watches the model, the store writes the file; `tensortap.open` and `tensortap compare` read it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py

from tensortap.capture.flatten import open_arguments, open_value
from tensortap.capture.observer import Observer
from tensortap.capture.selection import Selection
from tensortap.capture.tree import Site
from tensortap.compat.dump_file import Array, DumpFile, Seen, none, path_of
from tensortap.compat.dump_sink import DumpSink
from tensortap.errors import RunNotFound, RunUnreadable
from tensortap.frameworks import framework_of, network_of
from tensortap.records import shown
from tensortap.report.wording import clean

__all__ = ["DumpHandle", "HookerAndDumper"]

_KINDS = ("input", "output", "grad_output", "grad_input")
_FEW = 8
Contents = dict[str, dict[str, tuple[str, tuple[int, ...]]]]


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

    def register_hooks(self, model: Any, epoch: int = 0, step: int = 0, recursive: bool = True) -> DumpHandle:
        """Put hooks on every module below `model`; or on its direct children alone, if not `recursive`.

        Hooks that are still on are taken off first, and their file is finished. A file of the same name is replaced.
        What is returned has `remove()`, and works as a context manager.
        """
        model = network_of(model)
        framework = framework_of(model)  # asked first: a wrong argument must not end the dump that is being made
        if self._observer is not None:
            self._say(f"hooks were still registered: finishing {self._observer.path}")
            self.remove_hooks()
        path = path_of(self.file_path, epoch, step, framework.rank())
        lonely = not framework.children(model)

        def wanted(name: str, module: Any) -> bool:
            return (lonely or bool(name)) and (recursive or "." not in name)

        attributes = {"epoch": epoch, "step": step, "framework": framework.name, "model": type(model).__name__}
        self._observer = _DumpObserver(model, Selection("tensors", _KINDS, wanted), path, attributes, self)
        self._last = path
        self._say(_registered(self._observer.sites, type(model).__name__, self.is_screen_display))
        self._say(f"dumping to {path}")
        return DumpHandle(self, self._observer)

    def remove_hooks(self) -> None:
        """Take all hooks off, finish the file and say where it is. Calling it twice does no harm."""
        if self._by_hand is not None:
            file, self._by_hand = self._by_hand, None
            file.close(True)
            self._closed(file)
        if self._observer is not None:
            observer, self._observer = self._observer, None
            observer.close()
            self._told(observer)

    def read_h5py_data(self, path: str | os.PathLike[str] | None = None) -> Contents:
        """Print the groups and datasets of the last dump, or of the file at `path`, with dtype and shape.

        Returns them too: {group: {dataset: (dtype, shape)}}.
        """
        file = self._open_file() if path is None else None
        if file is not None:  # still being written: nobody else can open it
            return self._print_contents(file.path, file.contents())
        where = Path(path) if path is not None else self._last
        if where is None or not where.exists():
            raise RunNotFound(f"{where} does not exist." if where else "nothing was dumped yet: call register_hooks.")
        try:
            with h5py.File(where, "r") as contents:
                return self._print_contents(where, contents)
        except OSError as error:
            raise RunUnreadable(f"{where} cannot be read as HDF5: {error}") from error

    # --- hooks for those who place them by hand ------------------------------------------------------------------
    def forward_hook_fn(self, module: Any, input: Any, output: Any) -> None:
        """A plain forward hook: `module.register_forward_hook(dumper.forward_hook_fn)`. Called after the module, so
        the inputs of one that works in place show what became of them. It writes into the file of `register_hooks`,
        or else into that of epoch 0 and step 0 until `remove_hooks`."""
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
        file = self._open_file()
        if file is None:
            path = path_of(self.file_path, 0, 0, framework.rank())
            file = self._by_hand = DumpFile(path, {"epoch": 0, "step": 0, "framework": framework.name}, self._detail)
            self._last = path
            self._say(f"dumping to {path}")

        def values(tensor: Any) -> Array | None:
            return None if tensor is None or framework.unreadable(tensor) else framework.host(tensor)

        datasets = [
            Seen(name if single else f"{name}{place}", path, values(tensor), file.tick())
            for name, tensors, single in found
            for place, (path, tensor) in enumerate(tensors)
        ]
        file.group(type(module).__name__, {"phase": phase}, datasets)

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
                    self._detail(clean(f"  {shown(row.module)} ({row.cls}): {row.status}. {row.reason}"))
        self._say("all hooks removed")
        self._closed(observer.file)

    def _closed(self, file: DumpFile) -> None:
        self._say(f"{file.groups} groups written, file closed: {file.path}")

    def _open_file(self) -> DumpFile | None:
        return self._observer.file if self._observer is not None else self._by_hand

    def _print_contents(self, path: Path, contents: Any) -> Contents:
        found: Contents = {}
        print(path)
        for name, group in contents.items():
            if not isinstance(group, h5py.Group):
                continue
            module = group.attrs.get("module")
            print(
                clean(f"{name}" + (f"  {shown(module)} · {group.attrs.get('phase', '')}" if module is not None else ""))
            )
            found[name] = {}
            for inner, dataset in group.items():
                if isinstance(dataset, h5py.Dataset):
                    dtype, shape = str(dataset.attrs.get("dtype", dataset.dtype)), tuple(dataset.shape or ())
                    found[name][inner] = (dtype, shape)
                    empty, same_as = dataset.attrs.get("none", False), str(dataset.attrs.get("same_as", ""))
                    said = none(same_as) if empty else f"{dtype} {list(shape)}"
                    print(clean(f"    {inner}  {said}"))
        return found


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
    names = [f"{shown(site.name)} ({site.cls})" for site in sites if site.callable]
    listed = names if all_of_them else names[:_FEW]
    more = f", … and {len(names) - len(listed)} more" if len(listed) < len(names) else ""
    return clean(f"hooks registered on {len(names)} modules of {model}: {', '.join(listed)}{more}")
