"""One forward and backward of a float64 copy, each module on the reference's recorded inputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import numpy.typing as npt

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site, Tree
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.watching.clock import Clock, ModuleCall
from tensortap.capture.watching.flatten import Opened, open_value
from tensortap.core.records import Key
from tensortap.frameworks.base import Framework
from tensortap.frameworks.capabilities import ExactExecution
from tensortap.isolate.aliases import CallBoundary
from tensortap.isolate.comparator import Comparator
from tensortap.isolate.isolator import Isolator
from tensortap.isolate.reference import Counterpart, ReferenceRecords

__all__ = ["CalledOriginal", "ExactPass"]

_CallId = tuple[str, int, int]
"""Module, micro step and number of a call."""


class CalledOriginal(Exception):
    """The copy's code calls the model that it was copied from."""


class ExactPass(Isolator):
    """Feeds the float64 copy from the reference, as the isolator feeds the model, and shows each of its tensors."""

    def __init__(
        self,
        framework: Framework,
        tree: Tree,
        chosen: Collection[str],
        kinds: tuple[str, ...],
        clock: Clock,
        reference: ReferenceRecords,
        is_mask: Callable[[Key], bool],
        is_reordered: Callable[[Key], bool],
    ) -> None:
        receiver = cast(Comparator, _Receiver(self._show, is_mask, is_reordered, reference))
        book = CoverageBook([], [], kinds)
        super().__init__(framework, tree, chosen, Selection(kinds=kinds), clock, book, receiver, reference, None)
        self.seen: Callable[[Any, Key], None] = lambda *_: None
        """Called with each exact input, output and gradient, unless it is not exact."""
        self.parameter_gradient: Callable[[Key, Any], None] = lambda *_: None
        """Called with the gradient of each parameter, unless it is not exact."""
        self.spoilt: Callable[[str, Key, str], None] = lambda *_: None
        """Called with a module whose result is not exact, a tensor that it made, and the operation that has no float64
        kernel, which is empty if the code draws random numbers."""
        self.called_original = ""
        """A module of the model itself that the copy's code calls."""
        self._spoilt: dict[_CallId, str] = {}
        """Calls whose result is not exact → the operation that has no float64 kernel, or "" for random numbers."""
        self._left: _CallId | None = None
        self._callers: dict[_CallId, _CallId | None] = {}
        self._started: Collection[str] = ()
        self._from_outside = False

    def run(
        self,
        exact: ExactExecution,
        called: Site,
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
        gradients: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        """Call a module of the copy, and run backward from these gradients of its outputs, if there are any."""
        args, kwargs = arguments
        self._started = frozenset(gradients)
        with ExitStack() as undo:
            self.place(lambda hook: hook, undo)
            undo.enter_context(exact.exactly(partial(self._spoil, ""), bool(gradients), self._spoil))
            output = called.module(*args, **kwargs)
            tensors = dict(open_value(output, self._framework.is_tensor).tensors)
            del output
            if self.called_original:  # its gradients would go to the model's own parameters
                raise CalledOriginal(f"the copy still calls {self.called_original} of the model itself")
            starts = [(tensors[path], gradient) for path, gradient in gradients.items() if path in tensors]
            exact.exact_backward([each for each in starts if self._framework.requires_gradient(each[0])])
            self._record_pieces()

    def _spoil(self, operation: str) -> None:
        """Note that the code of the innermost call is not exact; in backward, its forward was not, either."""
        if (call := self._clock.innermost) is not None:
            self._spoilt.setdefault(_id_of(call), operation)

    def _enter(self, site: Site, opened: Opened) -> ModuleCall:
        call = super()._enter(site, opened)
        calling = self._clock.calling
        self._callers.setdefault(_id_of(call), None if calling is None else _id_of(calling))
        return call

    def _leave(self, site: Site, call: ModuleCall, opened: Any) -> None:
        self._left = _id_of(call)
        super()._leave(site, call, opened)

    def _measure(
        self, boundaries: Sequence[CallBoundary], kind: str, gradient: Any
    ) -> list[tuple[Key, Counterpart | None]]:
        keys = [key for boundary in boundaries for key in boundary.keys]
        self._from_outside = kind == "grad_output" and any(map(self._is_started, keys))
        return super()._measure(boundaries, kind, gradient)

    def _is_started(self, key: Key) -> bool:
        """Whether backward starts at an output: code outside the model, such as the loss, made its gradient."""
        return key.path in self._started and self._callers.get((key.module, key.micro, key.call)) is None

    def _show(self, tensor: Any, key: Key) -> None:
        if key.kind == "grad_output" and self._from_outside:
            return
        spoilt = [maker for maker in self._makers(key) if maker is not None and maker in self._spoilt]
        if spoilt:
            self.spoilt(spoilt[0][0], key, self._spoilt[spoilt[0]])
        elif key.kind == "param_grad":
            self.parameter_gradient(key, tensor)
        else:
            self.seen(tensor, key)

    def _makers(self, key: Key) -> list[_CallId | None]:
        """Return the calls whose code made a tensor; None is code outside the model."""
        own = key.module, key.micro, key.call
        if key.kind == "input":
            calling = self._clock.calling
            return [None if calling is None else _id_of(calling)]
        if key.kind == "output":
            return [self._left]
        if key.kind == "grad_input":
            return [own]
        if key.kind == "param_grad":  # summed over the calls of the module, or read by a module around it
            around = [call for call in self._callers if key.module.startswith(f"{call[0]}.") or not call[0]]
            own_calls = [call for call in self._callers if call[0] == key.module]
            return [*(own_calls or around)]
        if "grad_input" in self._watched_gradients:
            return [self._callers.get(own)]
        # The modules that got the output sent its gradient, and nothing replaced that.
        return [self._callers.get(own), *self._spoilt]


class _Receiver:
    """Takes the place of a comparator: the tensors go to `show`, the rest is of no interest."""

    def __init__(
        self,
        show: Callable[[Any, Key], None],
        is_mask: Callable[[Key], bool],
        is_reordered: Callable[[Key], bool],
        reference: ReferenceRecords,
    ) -> None:
        self._show = show
        self._reference = reference
        self.is_mask = is_mask
        self.is_reordered = is_reordered

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        self._show(tensor, key)

    def measure(
        self, tensor: Any, key: Key, site: Site, share: Counterpart | None = None
    ) -> tuple[Key, Counterpart | None]:
        self._show(tensor, key)
        return key, self._reference.get(key)

    def was_added(self, key: Key) -> bool:
        return False

    def is_part(self, key: Key) -> bool:
        return False

    def called(self, *_: Any) -> None: ...

    def mark_forced(self, *_: Any) -> None: ...

    def note_detached(self, *_: Any, **__: Any) -> None: ...

    def note_kept_inside(self, *_: Any) -> None: ...

    def note_inner_use(self, *_: Any) -> None: ...

    def note_same(self, *_: Any) -> None: ...


def _id_of(call: ModuleCall) -> _CallId:
    return call.module, call.micro, call.number
