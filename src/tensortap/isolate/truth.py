"""The truth of a check: the model's own modules in float64, each on the reference's recorded inputs.

While the model runs, tensors that differ from the reference's are kept in their own dtype. When the outermost call
returns, a float64 copy of the model runs on the same arguments, fed from the reference like the model itself. Each
tensor of the copy is then the exact result of one module, or of the code of one container, and the distance of both
sides from it is measured. The copy does not run if nothing differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tensortap.capture.clock import Clock, ModuleCall
from tensortap.capture.coverage import CoverageBook
from tensortap.capture.selection import Keep, Selection
from tensortap.capture.tree import Site, Tree
from tensortap.core.interrupts import interrupt_in
from tensortap.core.records import Key, display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework, require
from tensortap.frameworks.capabilities import ExactExecution
from tensortap.isolate.comparator import Comparator
from tensortap.isolate.isolator import Isolator
from tensortap.isolate.reference import ReferenceRecords
from tensortap.kernels.pairs.truth import TruthMeasure, measure_truth

__all__ = ["FLOAT64", "Truth"]

FLOAT64 = "float64"
_KINDS = ("input", "output")

Array = npt.NDArray[Any]


class Truth:
    """Runs the float64 copy after each outermost call, and collects the distances of both sides from its results."""

    def __init__(self, framework: Framework, model: Any, reference: ReferenceRecords, given: Any) -> None:
        """Prepare the truth. `given` is "float64", or the reference's model, whose modules then run in float64."""
        self._framework = framework
        self._exact: ExactExecution = require(framework, ExactExecution, "a truth")
        if framework.world() > 1:
            raise UsageError("truth= needs a single process: its extra forward would wait for the other ranks")
        self._model = model
        self.of_reference = not isinstance(given, str)
        """Whether the reference's own model computes the truth, not the model that is checked."""
        self._rename = reference.rename
        if self.of_reference:
            self._model = _checked_model(given, framework)
            reference = ReferenceRecords(reference.run, reference.rank, lambda name: name)
        elif given != FLOAT64:
            raise UsageError(f'truth: {given!r} is neither "{FLOAT64}" nor a model')
        self._reference = reference
        self.measured: dict[int, TruthMeasure] = {}
        """Row → distances of both sides from the truth."""
        self.random: dict[str, None] = {}
        """Modules whose own code draws random numbers: they have no truth."""
        self.failures: dict[str, None] = {}
        """Why the copy could not be made, or could not run."""
        self._differing: dict[Key, tuple[int, Array]] = {}
        self._prepared: tuple[Any, Any, Clock] | None = None
        self.is_mask: Callable[[Key], bool] = lambda _: False
        """Returns whether a tensor of the candidate is a mask, which each model takes in its own convention."""

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], clock: Clock) -> None:
        """Copy the model and the arguments of an outermost call, before it can change either."""
        self._differing.clear()
        self._prepared = None
        try:
            twin = self._exact.exact_copy(self._model)
            self._prepared = twin, self._exact.exact_value((args, dict(kwargs))), clock.copy()
        except Exception as error:
            self._note_failure("the model cannot be copied", error)

    def differs(self, row: int, key: Key, values: Array) -> None:
        """Keep a tensor that differs from the reference's, until its truth is known. The row is the candidate's."""
        if key.kind in _KINDS and self._prepared is not None:
            own = key if not self.of_reference else key._replace(module=self._rename(key.module))
            self._differing[own] = row, np.array(values)

    def end(self, site: Site, chosen: Collection[str], raised: bool) -> None:
        """Run the copy of the outermost call that returned, if anything differed in it."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or not self._differing or raised:
            return
        name = self._rename(site.name) if self.of_reference else site.name
        if self.of_reference:
            chosen = [self._rename(each) for each in chosen]
        twin, (args, kwargs), clock = prepared
        tree = Tree(self._framework, twin)
        try:
            with ExitStack() as undo:
                exact = _ExactPass(self, tree, chosen, clock)
                exact.place(lambda hook: hook, undo)
                called = next((each for each in tree.sites if each.name == name), None)
                if called is None:
                    self.failures[f"the truth's model has no {display_name(name)}"] = None
                    return
                undo.enter_context(self._exact.exactly(exact.drew))
                called.module(*args, **kwargs)
        except Exception as error:
            self._note_failure("the model does not run in float64", error)
        finally:
            self._differing.clear()

    def notes(self) -> list[str]:
        """Return what has no truth, and why."""
        found = [f"no truth: {why}" for why in self.failures]
        if self.random:
            some = ", ".join(map(display_name, list(self.random)[:3])) + ", ..." * (len(self.random) > 3)
            found.append(f"no truth for {len(self.random)} modules that draw random numbers: {some}")
        return found

    def seen(self, tensor: Any, key: Key, maker: ModuleCall | None, drawn: Collection[ModuleCall]) -> None:
        """Measure both sides against a tensor of the copy, unless random numbers went into it."""
        wanted = self._differing.get(key)
        found = self._reference.get(key)
        if wanted is None or found is None or found.location is None:
            return
        if maker is not None and maker in drawn:
            self.random[self._rename(maker.module) if not self.of_reference else maker.module] = None
            return
        row, candidate = wanted
        truth = self._framework.host(tensor)
        if truth.shape == candidate.shape == found.shape and truth.dtype.kind == "f":
            self.measured[row] = measure_truth(truth, self._reference.values(found), candidate)

    def pass_parts(self) -> tuple[Framework, ReferenceRecords]:
        return self._framework, self._reference

    def _note_failure(self, what: str, error: Exception) -> None:
        if (interrupt := interrupt_in(error)) is not None:
            raise interrupt
        text = str(error).strip().splitlines() or [""]
        self.failures[f"{what} ({type(error).__name__}: {text[0][:200]})"] = None


class _ExactPass(Isolator):
    """Feeds the float64 copy from the reference, as the isolator feeds the model."""

    def __init__(self, truth: Truth, tree: Tree, chosen: Collection[str], clock: Clock) -> None:
        framework, reference = truth.pass_parts()
        book = CoverageBook([], [], _KINDS)
        super().__init__(
            framework,
            tree,
            chosen,
            Selection(kinds=_KINDS),
            clock,
            book,
            cast(Comparator, _Recorder(self._seen, truth.is_mask)),
            reference,
            None,
        )
        self._truth = truth
        self._drawn: list[ModuleCall] = []
        self._left: ModuleCall | None = None

    def drew(self) -> None:
        """Note that the code of the innermost call draws random numbers."""
        if (call := self._clock.innermost) is not None and call not in self._drawn:
            self._drawn.append(call)

    def _leave(self, site: Site, call: ModuleCall, opened: Any) -> None:
        self._left = call
        super()._leave(site, call, opened)

    def _seen(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        maker = self._left if key.kind == "output" else self._clock.calling
        self._truth.seen(tensor, key, maker, self._drawn)


class _Recorder:
    """Takes the place of a comparator: the tensors go to `record`, the rest is of no interest."""

    def __init__(self, record: Any, is_mask: Callable[[Key], bool]) -> None:
        self.record = record
        self.is_mask = is_mask

    def called(self, *_: Any) -> None: ...

    def mark_forced(self, *_: Any) -> None: ...

    def note_detached(self, *_: Any, **__: Any) -> None: ...


def _checked_model(given: Any, framework: Framework) -> Any:
    model = network_of(given)
    if (found := framework_of(model).name) != framework.name:
        raise UsageError(f"truth: this is a {found} model, and the model that is checked is a {framework.name} model")
    return model
