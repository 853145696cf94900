"""Save the outputs of chosen layers, and the gradients of their parameters, as .npy files while a model trains.

    model = register_saving_hook(model, path="./tmp_tensors", target_class_names=["Linear", "LayerNorm"])
    ...                                     # train as usual
    remove_saving_hook(model)               # or let the process end

`store.formats.npy_names` says how the files are called, `hook_result_checker` compares two such trees.
"""

from __future__ import annotations

import logging
import os
import secrets
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap import dtypes
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.observer import Observer
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.tree import Site
from tensortap.compat.micro_steps import MicroSteps
from tensortap.errors import StoreWriteError, UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework
from tensortap.records import Key
from tensortap.store.formats.npy_names import GRADS, TENSORS, files_in, grad_file, tensor_file

__all__ = ["register_hook", "register_saving_hook", "remove_saving_hook"]

_log = logging.getLogger("tensortap")


def register_saving_hook(
    model: Any,
    path: str | os.PathLike[str] = "./tmp_tensors",
    target_class_names: str | Sequence[str] | None = None,
    max_saved_tensors: int = 50,
    max_saved_grads: int = 100,
    *,
    max_saved_tensors_per_step: int | None = None,
    max_saved_grads_per_step: int | None = None,
) -> Any:
    """Save what the layers of these classes put out, and their parameters' gradients, below `path`. Returns the model.

    target_class_names: one class name or several; None is every class.
    max_saved_tensors, max_saved_grads: how many files of each to write in the whole run; a negative number is all of
        them, 0 is none.
    max_saved_tensors_per_step, max_saved_grads_per_step: the same for each micro step, in place of the one above it:
        the count, and with it the index in the files' names, starts again with every forward of the model.

    Nothing in the training changes. If the disk is full, saving stops with a warning and training goes on.

    >>> model = register_saving_hook(model, path="./tmp_tensors", target_class_names=["Linear"], max_saved_tensors=100)
    """
    network = network_of(model)
    framework = framework_of(network)
    tensors = _Counter("max_saved_tensors", max_saved_tensors, max_saved_tensors_per_step)
    grads = _Counter("max_saved_grads", max_saved_grads, max_saved_grads_per_step)
    selection = Selection(keep="tensors", kinds=("output", "param_grad"), classes=_class_names(target_class_names))
    try:
        hook = SavingHook(network, Path(os.path.abspath(path)), selection, tensors, grads)  # noqa: PTH100  # keeps links
    except UsageError as error:
        # A stage of a pipeline need not have a layer of every kind; it must not be the one that ends the job.
        if framework.world() < 2:
            raise
        _log.warning("tensortap: this rank saves nothing: %s", error)
        return model
    _live.add(hook)
    return model


register_hook = register_saving_hook


def remove_saving_hook(model: Any) -> int:
    """Take the saving hooks of a model off. Returns how many registrations there were.

    >>> remove_saving_hook(model)
    1
    """
    network = network_of(model)
    framework_of(network)  # raises if it is no model
    found = [hook for hook in list(_live) if hook.watches(network)]
    for hook in found:
        _live.discard(hook)
        hook.close()
    return len(found)


def _class_names(given: Any) -> list[str] | None:
    if given is None:
        return None
    names = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise UsageError(f'target_class_names takes names of classes, like "Linear" or ["Linear"], not {wrong[0]!r}')
    return names


class SavingHook(Observer):
    """One registration."""

    def __init__(self, model: Any, path: Path, selection: Selection, tensors: _Counter, grads: _Counter) -> None:
        self._given = weakref.ref(model)
        self._arming: tuple[tuple[int, bool], ...] = ()
        self._files: NpyFiles

        def open_files() -> NpyFiles:
            self._files = NpyFiles(self._framework, path, tensors, grads)
            with ExitStack() as undo:
                # Placed before the observer's own hooks, so that a micro step begins before its first call is seen.
                micro_steps = MicroSteps(self._framework, self._begin)
                micro_steps.watch(self._tree.sites[0], self._chosen, undo)
                self._files.undo = undo.pop_all()
            return self._files

        super().__init__(model, selection, open_files, on_error="warn")
        self._say_missing()
        try:
            # Gradient hooks run in the order in which they were placed, and one that keeps master gradients empties
            # what it is given. It comes with the trainer; so ours are placed now, and stay.
            self._arm()
        except BaseException:
            self.close("failed")
            raise

    def watches(self, model: Any) -> bool:
        root = self._tree.sites[0]
        return any(model is known for known in (self._given(), root.module, root.owner))

    @cached_property
    def _chosen(self) -> list[Site]:
        return [s for s in self._tree.sites if self._selection.wants_module(s.name, s.cls, s.owner)]

    def _begin(self, first: bool) -> None:
        """A micro step begins. To the clock it is a step, so that nothing is remembered from one to the next."""
        try:
            with self._lock:
                if not first:
                    self._clock.next_step()
                if self._files.full:
                    self._listening = False
                if self._listening:
                    self._arm()
        except Exception as error:
            self._stop(error)
        self._tell()

    def _arm(self) -> None:
        """Parameters may have been replaced or unfrozen since they were looked at last."""
        own = [p for site in self._chosen for _, p in self._framework.parameters(site.owner)]
        found = tuple((id(parameter), self._framework.requires_gradient(parameter)) for parameter in own)
        if found != self._arming:
            self._watcher.drop()
            self._watcher.arm()
            self._arming = found

    def _say_missing(self) -> None:
        classes = {site.cls for site in self._tree.sites}
        wanted = self._selection.classes or ()
        if missing := [name for name in wanted if name not in classes]:
            _log.warning("tensortap: the model has no layer of class %s", ", ".join(missing))


@dataclass(slots=True, eq=False)
class _Counter:
    """Hands out the next index until the limit is reached."""

    name: str
    limit: int
    each_step: int | None
    count: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.each_step is not None:
            self.limit, self.name = self.each_step, f"{self.name}_per_step"
        if not isinstance(self.limit, int):
            raise UsageError(f"{self.name} takes a whole number, not {self.limit!r}; a negative one means all")

    @property
    def full(self) -> bool:
        """For good."""
        return self.limit == 0 or (self.each_step is None and 0 < self.limit <= self.count)

    def next(self, step: int) -> int | None:
        if self.each_step is not None and step != self.step:
            self.step, self.count = step, 0
        if 0 <= self.limit <= self.count:
            return None
        self.count += 1
        return self.count - 1


class NpyFiles:
    """A sink that writes a file for each tensor."""

    def __init__(self, framework: Framework, path: Path, tensors: _Counter, grads: _Counter) -> None:
        self.where = str(path)
        self._framework = framework
        self._tensors, self._grads = tensors, grads
        self.undo = ExitStack()
        """Closed with the sink."""
        rank = f"rank_{framework.rank()}"
        self._folders = {kind: path / kind / rank for kind in (TENSORS, GRADS)}
        for folder in self._folders.values():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                old = len(files_in(folder))
            except OSError as error:
                raise StoreWriteError(f"{folder} cannot be made: {error.strerror}") from error
            if old:
                _log.warning(
                    "tensortap: %s holds %d files of an earlier run; those of the same names are replaced, "
                    "the others stay",
                    folder,
                    old,
                )

    @property
    def full(self) -> bool:
        return self._tensors.full and self._grads.full

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        gradient = key.kind == "param_grad"
        # With several forwards before a backward, a recomputation may repeat a call of an earlier micro step.
        if not gradient and self._framework.replaying():
            return
        index = (self._grads if gradient else self._tensors).next(key.step)
        if index is None:
            return
        if gradient:
            name = grad_file(index, self._parameter_name(site, key), key.step)
        else:
            name = tensor_file(index, site.cls, self._layer_name(site), key.path, key.step)
        self._save(self._folders[GRADS if gradient else TENSORS] / name, self._framework.host(tensor))

    def end_step(self, step: int, book: CoverageBook) -> None:
        pass  # every file is whole as soon as it is there

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        self.undo.close()
        for row in book.rows():
            if "is not recorded" in row.reason:
                _log.warning("tensortap: %s: %s", row.module or "(root)", row.reason)

    def _layer_name(self, site: Site) -> str:
        return str(site.owner.full_name()) if self._framework.name == "paddle" else site.name

    def _parameter_name(self, site: Site, key: Key) -> str:
        if self._framework.name == "paddle":
            return str(dict(self._framework.parameters(site.owner))[key.path].name)
        return f"{site.name}.{key.path}" if site.name else key.path

    def _save(self, file: Path, array: npt.NDArray[Any]) -> None:
        if dtypes.name_of(array.dtype).startswith(("bfloat", "float8")):  # NumPy alone could not read these back
            array = array.astype(np.float32)
        partial = file.with_name(f".{secrets.token_hex(6)}.partial")
        try:
            with partial.open("xb") as opened:
                np.save(opened, np.asarray(array, order="C"), allow_pickle=False)
            partial.replace(file)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


_live: weakref.WeakSet[SavingHook] = weakref.WeakSet()  # the hooks on the model keep them alive
