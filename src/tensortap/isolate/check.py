"""Check: an observer that compares a running model with a reference, module by module or as a whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tensortap.capture.loop.book import LoopBook
from tensortap.capture.loop.detached import DetachedValues
from tensortap.capture.loop.optimizers import Optimizers
from tensortap.capture.loop.recomputed import Recomputations
from tensortap.capture.messages import say
from tensortap.capture.modules.models import one_model
from tensortap.capture.modules.tree import Tree
from tensortap.capture.observer import Observer, Sink
from tensortap.capture.recording.slots import by_key
from tensortap.capture.selection import Selection
from tensortap.capture.watching.clock import Clock
from tensortap.capture.watching.watcher import Watcher
from tensortap.compare.align.alignment import Renames
from tensortap.compare.judge.isolation import Isolation
from tensortap.compare.measure.noise import check_noise
from tensortap.compare.options import ComparisonOptions
from tensortap.compare.say.zoom_hint import zoom_hint
from tensortap.compare.sources import Source, open_source
from tensortap.core.records import Comparison, Key
from tensortap.core.zooming import zooms
from tensortap.errors import UsageError
from tensortap.frameworks import Framework, framework_of, network_of, require
from tensortap.frameworks.capabilities import LossScaling, ValueWriting
from tensortap.isolate.comparator import Comparator
from tensortap.isolate.conclusion import conclude_live
from tensortap.isolate.isolator import Isolator
from tensortap.isolate.loss_scale import LossScale
from tensortap.isolate.perturbation import Perturbation
from tensortap.isolate.reference import ReferenceRecords
from tensortap.isolate.truth import Truth
from tensortap.store import Run
from tensortap.store.noise_file import is_noise, read_noise

__all__ = ["Check", "CheckOptions"]


@dataclass(frozen=True)
class CheckOptions:
    """The options of a check; see `tensortap.check`."""

    isolate: bool = True
    noise: tuple[Source, ...] = ()
    rename: tuple[str, ...] = ()
    modules: Any = "*"
    steps: Any = None
    rtol: float | None = None
    atol: float | None = None
    compiled: str = "boundary"
    on_error: str = "raise"
    truth: Any = None
    zoom: Any = None
    seed: int | None = None
    """Seed of the random perturbation of all recorded inputs and gradients; None perturbs nothing."""
    epsilons: int = 1
    """Size of the perturbation in epsilons."""
    lowered: Mapping[str, str] = field(default_factory=dict)
    """Module → coarser dtype in which it computes internally; its perturbation uses that dtype's epsilon."""

    def __post_init__(self) -> None:
        if self.compiled not in ("boundary", "eager"):
            raise UsageError(f'compiled: {self.compiled!r} is neither "boundary" nor "eager"')
        for name, given in (("rtol", self.rtol), ("atol", self.atol)):
            if given is not None and not given >= 0:
                raise UsageError(f"{name} must be 0 or more, not {given}")
        if self.zoom is True and (self.truth is None or isinstance(self.truth, str)):
            raise UsageError("zoom=True needs the reference's model: pass it as zoom=, or as truth=")

    @property
    def zoom_reference(self) -> Any:
        """The reference's model, or what builds it; None without `zoom`."""
        return self.truth if self.zoom is True else self.zoom or None


class Check(Observer):
    """The context manager that `tensortap.check` returns; after the block, `result` is the comparison."""

    _separates_evaluation = True

    def __init__(self, model: Any, reference: Source, options: CheckOptions, optimizer: Any = None) -> None:
        self._options = options
        self._result: Comparison | None = None
        self._comparator: Comparator | None = None
        model = network_of(one_model(model))
        framework = framework_of(model)
        if options.zoom_reference is not None:
            zooms().check_models((options.zoom_reference, model))
        renames = Renames.of(options.rename)
        with ExitStack() as files:
            run = open_source(reference, files)
            if (recorded_with := run.info.get("framework", framework.name)) != framework.name:
                raise UsageError(
                    f"{run.path} is a run of {recorded_with}, and the model is a {framework.name} model: capture both "
                    "and compare the runs with tensortap.compare, which maps names and layouts"
                )
            self._reference = ReferenceRecords(run, framework.rank(), renames)
            self._loss_scale = LossScale(run, framework.rank())
            sites = Tree(framework, model).sites
            self._reference.check_names(site.name for site in sites)
            wanted = Selection(modules=options.modules, steps=options.steps)
            found = sum(wanted.wants_module(site.name, site.cls, site.owner) for site in sites)
            for text in wanted.check_found(found, [site.name for site in sites], {site.cls for site in sites}):
                say(text)
            self._unkept = self._reference.unkept() if options.isolate else set[str]()
            if options.isolate:
                self._reference.check_kept()
            # Unreadable noise must raise before the step runs, not after it.
            known = self._reference.modules
            self._noise = tuple(
                source if _is_noise_file(source, known) else open_source(source, files) for source in options.noise
            )
            self._perturbation = self._make_perturbation(options)
            self._truth = self._make_truth(framework, sites[0].owner, options)
            super().__init__(
                model,
                self._select(wanted),
                self._open_comparator,
                on_error=options.on_error,
                eager=options.compiled == "eager",
                optimizer=optimizer,
            )
            self._files = files.pop_all()

    def _make_perturbation(self, options: CheckOptions) -> Perturbation | None:
        def coarsest(key: Key) -> str | None:
            return options.lowered.get(key.module) or self._reference.coarsest(key)

        return None if options.seed is None else Perturbation(options.seed, options.epsilons, coarsest)

    def _make_truth(self, framework: Framework, model: Any, options: CheckOptions) -> Truth | None:
        if options.truth is None:
            return None
        if not options.isolate:
            raise UsageError("truth= needs isolate=True: the float64 result of a module is that on the same inputs")
        return Truth(framework, model, self._reference, options.truth)

    def _select(self, wanted: Selection) -> Selection:
        known = self._reference

        def chosen(name: str, module: Any) -> bool:
            if known.rename(name) in self._unkept:
                return False
            return known.has(name) and wanted.wants_module(name, type(module).__name__, module)

        steps = [step for step in known.steps if wanted.wants_step(step)]
        if not steps:
            existing = ", ".join(map(str, known.steps[:8])) or "none at all"
            raise UsageError(f"steps: {known.run.path} has none of these; it has {existing}")
        kinds = known.kinds
        after_alone = bool((known.run.info.get("config") or {}).get("params_after_alone"))
        return Selection(kinds=kinds, modules=chosen, steps=steps, params_after_alone=after_alone)

    def _open_comparator(self) -> Comparator:
        tolerances = self._options.rtol, self._options.atol
        self._comparator = Comparator(self._framework, self._tree.sites[0].cls, self._reference, tolerances)
        self._comparator.loss_scale = self._loss_scale.factor
        return self._comparator

    def _watch(self, sink: Sink, chosen: list[str], optimizer: Any, undo: ExitStack) -> None:
        super()._watch(sink, chosen, optimizer, undo)
        scaling: LossScaling = require(self._framework, LossScaling, "a check")
        undo.callback(scaling.on_scaled_backward(self._guard(self._scaled_backward_begins), self._loss_scale.end))

    def _scaled_backward_begins(self, scale: float) -> None:
        """Take note of a scaler's scale, by which all gradients of a backward are larger."""
        if not self._loss_scale.begin(self._clock.step, scale) and scale != 1:
            self._book.notice(
                f"a scaler multiplies the loss by {scale:g}, and the reference does not tell whether one did the same: "
                "capture it with optimizer="
            )

    def _new_watcher(self, sink: Sink, chosen: list[str]) -> Watcher:
        self._chosen = chosen
        watcher = self._new_isolator(chosen) if self._options.isolate else super()._new_watcher(sink, chosen)
        assert self._comparator is not None
        destination = watcher.destination
        destination.called_with = self._comparator.run.called
        destination.record_gradient = by_key(self._comparator.record_step_gradient)
        # Dropout draws other numbers from another random state.
        destination.step_begins = self._new_loop_book(()).step_begins
        if not self._options.isolate:
            watcher.detached = DetachedValues(self._framework, self._comparator.run.loop_fact)
        watcher.recomputations = Recomputations(self._framework, self._clock, self._comparator.run.loop_fact)
        return watcher

    def _new_optimizers(self, optimizer: Any) -> Optimizers:
        """Note the settings of optimizers, and compare the gradients that they get."""
        optimizers = super()._new_optimizers(optimizer)
        book = self._new_loop_book([*self._selection.kinds])
        optimizers.before = partial(book.optimizer_begins, self._watcher)
        optimizers.after, optimizers.ends = book.optimizer_ended, book.step_ends
        return optimizers

    def _new_loop_book(self, kinds: Sequence[str]) -> LoopBook:
        assert self._comparator is not None
        return LoopBook(self._framework, lambda: self._tree, self._clock, self._comparator.run.loop_fact, kinds)

    def _new_isolator(self, chosen: list[str]) -> Isolator:
        assert self._comparator is not None
        if self._unkept:
            self._book.notice(
                f"the reference kept no tensors of {len(self._unkept)} of its {len(self._reference.modules)} modules: "
                "they were not checked, and ran as parts of the modules around them"
            )
        isolator = Isolator(
            self._framework,
            self._tree,
            chosen,
            self._selection,
            self._clock,
            self._book,
            self._comparator,
            self._reference,
            self._perturbation,
        )
        isolator.loss_scale = self._loss_scale.factor
        if self._truth is not None:
            self._truth.loss_scale = self._loss_scale.factor
            isolator.truth, self._comparator.differs = self._truth, self._truth.differs
            self._truth.is_mask, self._truth.is_reordered = self._comparator.is_mask, self._comparator.is_reordered
        return isolator

    def close(self, status: str = "finished", reason: str = "") -> None:
        if self._closed:
            return
        try:
            super().close(status, reason)
        finally:
            self._conclude()

    def _conclude(self) -> None:
        options, comparator = self._options, self._comparator
        assert comparator is not None
        rename = self._reference.rename
        self._note_settings(comparator)
        isolation = self._isolation(comparator) if options.isolate else None
        some = callable(options.modules) or self._unkept
        asked = ComparisonOptions(
            rename=options.rename,
            modules=[rename(name) for name in self._chosen] if some else options.modules,
            steps=self._selection.steps,
            rtol=options.rtol,
            atol=options.atol,
            noise=self._noise,
        )
        with self._files:
            self._result = conclude_live(
                self._reference.run,
                comparator,
                isolation,
                self._parameters(),
                asked,
                self._truth,
            )
            self._result = self._zoomed(self._result)

    def _zoomed(self, result: Comparison) -> Comparison:
        """Zoom into the module that is wrong, or say how."""
        run, reference = self._reference.run, self._options.zoom_reference
        if reference is None:
            hint = [] if run.in_memory else zoom_hint(result, run, "")
            return replace(result, notes=[*result.notes, *hint])
        module = None if result.first is None else result.first.module
        own = next((site.name for site in self._tree.sites if self._reference.rename(site.name) == module), None)
        return zooms().zoom_comparison(result, run, None, (reference, self._model), own)

    def _note_settings(self, comparator: Comparator) -> None:
        """Note attributes and ties of the model, as a capture does."""
        first = Clock(step=self._reference.steps[0])
        book = LoopBook(self._framework, lambda: self._tree, first, comparator.run.loop_fact, ())
        book.forward_ended([site for site in self._tree.sites if site.name in self._chosen])

    def _parameters(self) -> set[tuple[str, str]]:
        rename, names = self._reference.rename, self._framework.parameters
        return {(rename(site.name), name) for site in self._tree.sites for name, _ in names(site.owner)}

    def _isolation(self, comparator: Comparator) -> Isolation:
        rename, owners = self._reference.rename, dict[int, str]()
        tied: dict[str, list[str]] = {}
        for site in self._tree.sites:
            for _, parameter in self._framework.parameters(site.owner):
                if (owner := owners.setdefault(id(parameter), site.name)) != site.name:
                    tied.setdefault(rename(site.name), []).append(rename(owner))
        return Isolation(
            forced=comparator.forced,
            used_inside=comparator.used_inside,
            same=comparator.same,
            callers=comparator.callers,
            cut_off=comparator.cut_off,
            kept_inside=comparator.kept_inside,
            outside=comparator.outside,
            tied=tied,
            holders=comparator.holders,
            differentiated=comparator.differentiated,
        )

    # --- for noise ---------------------------------------------------------------------------------------------
    def perturb_parameters(self) -> None:
        """Perturb the model's parameters in place; the caller restores them."""
        moved: set[int] = set()
        writing: ValueWriting = require(self._framework, ValueWriting, "measuring noise")
        for site in self._tree.sites:
            for name, parameter in self._framework.parameters(site.owner):
                if id(parameter) not in moved and self._perturbation is not None:
                    moved.add(id(parameter))
                    key = Key(self._clock.step, 0, "state", site.name, 0, "param", name)
                    values = self._perturbation.apply(self._framework.host(parameter), key)
                    writing.fill(parameter, values)

    def coarsest(self) -> dict[str, str | None]:
        """Return the coarsest dtype among the inputs and outputs of each module."""
        step = self._reference.steps[0]
        keys = [Key(step, 0, "forward", site.name, 0, "output", "0") for site in self._tree.sites]
        return {key.module: self._reference.coarsest(key) for key in keys}

    def errors(self) -> Iterator[tuple[Key, float, float]]:
        """Yield key, relative error and relative error of the worst row of every record that differs."""
        assert self._comparator is not None
        for record in self._comparator.run.records():
            if (measure := self._comparator.measured.get(record.seq)) is not None:
                off = measure.difference
                yield record.key, off.rel_l2, off.row_rel_l2

    @property
    def result(self) -> Comparison:
        """The comparison, as from `tensortap.compare`; available after the block."""
        if self._result is None:
            raise UsageError("the check is not over: `result` is available after the with block, or after close()")
        return self._result


def _is_noise_file(source: Source, modules: Collection[str]) -> bool:
    """Whether a source is a noise file, not a run; raise UsageError if it is not one of these modules."""
    if isinstance(source, Run) or not is_noise(source):
        return False
    check_noise(source, read_noise(source), modules)
    return True
