"""Save the outputs of chosen layers, and the gradients of their parameters, as .npy files while a model trains.

    model = register_saving_hook(model, path="./tmp_tensors", target_class_names=["Linear", "LayerNorm"])
    ...                                     # train as usual
    remove_saving_hook(model)               # or let the process end

`tensortap.store.formats.npy.names` defines the names of the files; `hook_result_checker` compares two such trees.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tensortap.capture.modules.tree import Site
from tensortap.capture.observer import Observer
from tensortap.capture.selection import Selection
from tensortap.compat.micro_steps import ForwardMode, MicroSteps
from tensortap.compat.npy_files import FileLimit, NpyFiles
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of

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
    """Save the outputs of layers, and the gradients of their parameters, below `path`. Return the model.

    target_class_names: class name of the layers, or several; None is every class.
    max_saved_tensors, max_saved_grads: upper bounds on the files of the whole run. A negative number saves all, 0 none.
    max_saved_tensors_per_step, max_saved_grads_per_step: upper bounds per micro step, in place of those for the run.
        The index in the file names then starts at 0 in every micro step.

    Training stays bit-identical. Evaluation between training steps is neither counted nor saved. If the disk is full,
    saving stops with a warning and training continues.

    >>> model = register_saving_hook(model, path="./tmp_tensors", target_class_names=["Linear"], max_saved_tensors=100)
    """
    network = network_of(model)
    framework = framework_of(network)
    tensors = FileLimit("max_saved_tensors", max_saved_tensors, max_saved_tensors_per_step)
    grads = FileLimit("max_saved_grads", max_saved_grads, max_saved_grads_per_step)
    selection = Selection(
        keep="tensors",
        kinds=("output", "param_grad"),
        classes=_check_class_names(target_class_names),
        classes_argument="target_class_names",
    )
    try:
        hook = SavingHook(network, Path(os.path.abspath(path)), selection, tensors, grads)  # noqa: PTH100  # keeps links
    except UsageError as error:
        # A pipeline stage may lack the selected layers, and must not end the job of all ranks.
        if framework.world() < 2:
            raise
        _log.warning("tensortap: this rank saves nothing: %s", error)
        return model
    _live_hooks.add(hook)
    return model


register_hook = register_saving_hook


def remove_saving_hook(model: Any) -> int:
    """Remove the saving hooks of a model. Return the number of registrations removed.

    >>> remove_saving_hook(model)
    1
    """
    network = network_of(model)
    framework_of(network)  # raises UsageError if it is not a model
    found = [hook for hook in list(_live_hooks) if hook.watches(network)]
    for hook in found:
        _live_hooks.discard(hook)
        hook.close()
    return len(found)


def _check_class_names(given: Any) -> list[str] | None:
    if given is None:
        return None
    names = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise UsageError(f'target_class_names takes class names, such as "Linear" or ["Linear"], not {wrong[0]!r}')
    return names


class SavingHook(Observer):
    """The observer of one registration."""

    def __init__(self, model: Any, path: Path, selection: Selection, tensors: FileLimit, grads: FileLimit) -> None:
        self._model_given = weakref.ref(model)
        self._armed_parameters: tuple[tuple[int, bool], ...] = ()
        self._files: NpyFiles

        def open_files() -> NpyFiles:
            self._files = NpyFiles(self._framework, path, tensors, grads)
            with ExitStack() as undo:
                # Placed before the observer's own hooks, so that a micro step begins before its first call is seen.
                micro_steps = MicroSteps(self._framework, self._tree.sites[0], self)
                micro_steps.watch(self._selected_sites, undo)
                self._files.ignored = micro_steps.evaluating
                self._files.undo = undo.pop_all()
            return self._files

        super().__init__(model, selection, open_files, on_error="warn")
        try:
            # Gradient hooks run in the order of registration, and a trainer's hook for master gradients clears the
            # gradient. Registering now, before the trainer does, makes these hooks run first.
            self._arm()
        except BaseException:
            self.close("failed")
            raise

    def watches(self, model: Any) -> bool:
        root = self._tree.sites[0]
        return any(model is known for known in (self._model_given(), root.module, root.owner))

    @cached_property
    def _selected_sites(self) -> list[Site]:
        return [s for s in self._tree.sites if self._selection.wants_module(s.name, s.cls, s.owner)]

    # --- micro steps ---------------------------------------------------------------------------------------------
    def begin(self, first: bool, mode: ForwardMode) -> None:
        """Begin a micro step. The clock counts it as a step, so it keeps no calls of the previous one."""
        with self._errors_stop_saving():
            if mode is ForwardMode.TRAINING:
                self._files.keep_all()
            if not first:
                self._clock.next_step()
            if self._files.full:
                self._files.report_limits()
                self._guard.listening = False
            if self._guard.listening:
                self._arm()

    def restart(self) -> None:
        """Set aside all saved files, and count from 0 again."""
        with self._errors_stop_saving():
            self._files.set_aside()
            self._forget_calls(step=0)
            self._begin_step()  # evaluation may have reached the limits

    def skip(self) -> None:
        """Keep the micro step during an evaluation."""
        with self._errors_stop_saving():
            self._forget_calls(self._clock.step)

    def _forget_calls(self, step: int) -> None:
        """Make the clock forget the calls of an evaluation: they never recur, and would fill the memory."""
        self._clock.next_step()
        self._clock.step = step

    @contextmanager
    def _errors_stop_saving(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except Exception as error:
            self._handle(error)
        self._report_error()

    def _arm(self) -> None:
        """Place the hooks on parameters again if one was replaced or unfrozen since the last time."""
        own = [p for site in self._selected_sites for _, p in self._framework.parameters(site.owner)]
        found = tuple((id(parameter), self._framework.requires_gradient(parameter)) for parameter in own)
        if found != self._armed_parameters:
            self._watcher.drop()
            self._watcher.arm()
            self._armed_parameters = found

    def _report_unmatched(self, text: str) -> None:
        _log.warning("tensortap: %s", text)


_live_hooks: weakref.WeakSet[SavingHook] = weakref.WeakSet()  # the model's hooks keep them alive
