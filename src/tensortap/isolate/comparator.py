"""Measures every tensor of a running model against its record in the reference; keeps the numbers, not the tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.capture.coverage import CoverageBook
from tensortap.capture.modules.tree import Site
from tensortap.capture.recording.unique_keys import UniqueKeys
from tensortap.capture.selection import Keep
from tensortap.capture.watching.clock import ModuleCall
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.judge.unpassed import measure_passed
from tensortap.compare.measure.edges import without_edges
from tensortap.compare.measure.gelu import SHORT_DTYPES, are_other_gelus
from tensortap.compare.measure.hidden import EXPLAINS, HiddenPositions, see_nothing
from tensortap.compare.measure.kinks import CrossedKink, crossed_kink, few_steps
from tensortap.compare.measure.masks import (
    MaskDifference,
    equal_mask,
    mask_difference,
    padding_mask,
    reshaped_mask_difference,
)
from tensortap.compare.measure.step_noise import step_noise
from tensortap.compare.measure.token_order import LEAST_REORDERED, are_reordered
from tensortap.core import dtypes
from tensortap.core.records import GRADIENT_KINDS, Key, Record
from tensortap.frameworks.base import Framework
from tensortap.isolate.backwards import FirstParts, PartialGradient
from tensortap.isolate.choices import LiveChoices
from tensortap.isolate.loss_scale import times
from tensortap.isolate.reference import Counterpart, ReferenceRecords
from tensortap.kernels import summarize
from tensortap.kernels.pairs.cpu import PairMeasure, difference
from tensortap.store.formats.live import LiveRun

__all__ = ["Comparator"]

_NO_SKETCH = np.empty(0, np.float32)
_LEAST_KINK = 2.0**-20
"""Smaller errors of a gradient are rounding."""


class Comparator:
    """The sink of a check: measures each tensor at once, and does not retain it."""

    def __init__(
        self,
        framework: Framework,
        model: str,
        reference: ReferenceRecords,
        tolerances: tuple[float | None, float | None],
    ) -> None:
        self.where = f"a check against {reference.run.path}"
        self.measured: dict[int, PairMeasure] = {}
        """Row → difference from the reference, if it was measured element by element."""
        self.shares: set[int] = set()
        """Rows that were measured against a share of the recorded gradient."""
        self._nonfinite: set[int] = set()
        """Rows with elements that are not finite."""
        self.parts: set[int] = set()
        """Rows of gradients of one backward alone; see `is_part`."""
        self._summed_calls: set[tuple[object, ...]] = set()
        """Calls of which a gradient at an output was compared as the sum over several backwards."""
        self._first_parts = FirstParts()
        self._off: set[int] = set()
        """Rows that were measured, and differ by more than their own rounding."""
        self.masks: dict[int, MaskDifference] = {}
        """Row → difference of a mask from the reference's, which may have another convention."""
        self.shown: dict[int, bool] = {}
        """Rows measured without the positions that a mask hides → whether these are what makes them differ."""
        self.kinks: dict[int, CrossedKink] = {}
        """Row → how a gradient differs without the elements that crossed a kink."""
        self.step_noise: dict[int, float] = {}
        """Row → the error of an optimizer's step that a gradient explains."""
        self.unpassed: set[int] = set()
        """Rows of gradients that differ where their module passes nothing on."""
        self.differentiated: set[tuple[int, int]] = set()
        """Steps and micro steps with a backward that was differentiated again."""
        self.choices = LiveChoices()
        self.reordered: set[int] = set()
        """Rows of lists of tokens that have the reference's in another order."""
        self._chosen: set[int] = set()
        """Numbers of the reference's tensors of integers that modules return, such as choices of experts."""
        self._given_choices: set[tuple[int, str]] = set()
        """(micro step, module) that is given such integers; in the reference's names."""
        self.other_gelus: set[int] = set()
        """Rows of outputs that one side computes by a GELU with erf and the other by one with tanh."""
        self._given: dict[tuple[int, str, int], Counterpart] = {}
        """(micro step, module, call) → the last tensor in a short dtype that the call was given, or got from inside."""
        self.forced: set[int] = set()
        """Rows whose tensor was replaced by the reference's after it was measured."""
        self.used_inside: set[int] = set()
        """Rows of wrong gradients of outputs that the module itself uses, too."""
        self.same: list[list[int]] = []
        """Groups of rows of one gradient, of an output that several calls return unchanged; innermost call first."""
        self.cut_off: set[Key] = set()
        self.outside: set[Key] = set()
        """Inputs, and outputs that should be differentiable, that autograd does not reach; in the reference's names."""
        self.kept_inside: set[Key] = set()
        """Outputs whose gradient stays inside a module; in the reference's names."""
        self.callers: dict[tuple[int, int, str, int], str | None] = {}
        """(step, micro step, module, call) → the module whose code made the call; in the reference's names."""
        self.holders: set[str] = set()
        """Modules that pass on tensors by their attributes; in the reference's names."""
        self.differs: Callable[[int, Key, npt.NDArray[Any]], None] = lambda *_: None
        """Called with the row, key and values of a tensor that differs from the reference's."""
        self.loss_scale: Callable[[int], float] = lambda _: 1.0
        """Step → by how much a scaler makes the model's gradients larger than the reference's."""
        self._framework = framework
        self._reference = reference
        self._tolerances = tolerances
        self._keys = UniqueKeys()
        about: dict[str, Any] = {"framework": framework.name, "model": model, "world": framework.world()}
        about["environment"] = framework.environment()
        self.run = LiveRun(f"{model}, as it runs", about, reference.rank)
        self._rows: dict[Key, int] = {}
        self._hidden: dict[tuple[int, int], HiddenPositions] = {}
        """By step and micro step: positions that masks hide."""
        self._padding: dict[tuple[int, int], dict[int, MaskDifference]] = {}
        """By step and micro step: rows of masks of padding, some of which sees nothing if attention is causal or has a
        window."""

    def record(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        self.measure(tensor, key, site)

    def record_step_gradient(self, tensor: Any, key: Key, site: Site, keep: Keep) -> None:
        """Measure a gradient as the optimizer sees it, if the reference has one: where its own is that from backward, a
        wrong one shows in the parameters."""
        if self._reference.get(key) is not None:
            self.measure(tensor, key, site)

    def measure(
        self, tensor: Any, key: Key, site: Site, share: Counterpart | None = None
    ) -> tuple[Key, Counterpart | None]:
        """Measure a tensor; return its key, numbered if it is repeated, and its counterpart in the reference.

        share: a part of the recorded gradient, or a sum of such parts, which is its counterpart if the tensor is nearer
        to that.
        """
        key = Key(*self._keys.unique(key))
        sum_of_backwards = None
        array = self._framework.host(tensor)
        dtype = dtypes.name_of(array.dtype)
        if key.kind in GRADIENT_KINDS:
            array = times(array, 1 / self.loss_scale(key.step))
            sum_of_backwards = self._reference.over_backwards(key)
            share = share or sum_of_backwards
        summary = summarize(array)
        found = self._reference.get(key)
        row = len(self.run)
        if summary.nan or summary.posinf or summary.neginf:
            self._nonfinite.add(row)
        if found is not None and found.location is not None and found.shape == array.shape:
            equal = summary.digest == found.digest and dtype == found.dtype
            if array.dtype.kind in "iu":
                self._note_choices(key, found)
            self.choices.see(row, key, array, lambda: self._reference.values(found), equal)
            if equal and key.kind == "input":
                mask = equal_mask(array, summary)
                self._take_mask(row, key, mask)
                if mask is None and (padding := padding_mask(array)) is not None:
                    masks = self._padding.setdefault((key.step, key.micro), {})
                    if not self.masks.keys().isdisjoint(masks):  # it was found out that it sees nothing
                        self._take_mask(row, key, padding)
                    masks[row] = padding
            if not equal and share is not None and self._is_nearer(array, share, found):
                self.shares.add(row)
                self._measure_pair(row, key, share, array)
                if share is sum_of_backwards:
                    self._summed_calls.add(_call_of(key))
            elif not equal:
                self._measure_pair(row, key, found, array)
                self._find_other_gelu(row, key, found, array)
                # The gradient that arrives at a compiled layer lacks what its own code adds inside the graph.
                if not (site.compiled and key.kind == "grad_output" and row in self._off):
                    self.differs(row, key, array)
            # What a call sends is recorded once, so that a later part of it is only known if the first lacks it.
            is_first = key.kind in GRADIENT_KINDS and row not in self.shares
            if is_first and (key.kind != "grad_input" or row in self._off):
                self._first_parts.keep(PartialGradient(key, row, found, array if row in self._off else None))
            summary = replace(summary, sketch=_NO_SKETCH)  # needed only if the reference kept no tensor
        elif found is not None and found.location is not None and key.kind == "input":
            self._take_mask(row, key, reshaped_mask_difference(self._reference.values(found), array))
        elif found is None:
            self._add_part(key, array)
        if found is not None and found.location is not None and key.phase == "forward" and dtype in SHORT_DTYPES:
            self._note_given(key, found)
        self._rows[key] = row
        self.run.append(Record(key, self._reference.rank, row, site.cls, dtype, array.shape, row, summary))
        return key, share if row in self.shares else found

    def was_added(self, key: Key) -> bool:
        """Whether a gradient is a later part of one, of another backward, and was added to the first."""
        return self._first_parts.was_added(key)

    def is_part(self, key: Key) -> bool:
        """Whether a gradient is that of one backward alone on one side, where only the sum over all is comparable: what
        a call sends is recorded once."""
        return (
            key.kind == "grad_input"
            and _call_of(key) in self._summed_calls
            and self._rows.get(key) not in self.shares
            and self._rows.get(key) not in self._nonfinite
        )

    def _add_part(self, key: Key, array: npt.NDArray[Any]) -> None:
        """Add a gradient that the reference has not to that of an earlier backward, and measure their sum."""
        if (key.step, key.micro) not in self.differentiated:
            total = self._first_parts.add(key, array, self._reference.values)
            if total is not None:
                self._measure_again(total)

    def _measure_again(self, part: PartialGradient) -> None:
        """Measure a gradient of several backwards by its sum so far."""
        self.shares.add(part.row)
        self._summed_calls.add(_call_of(part.key))
        if part.values is None:  # too many to keep
            self.parts.add(part.row)
            return
        self._off.discard(part.row)
        self.kinks.pop(part.row, None)
        self.unpassed.discard(part.row)
        self._measure_pair(part.row, part.key, part.found, part.values)
        self.differs(part.row, part.key, part.values)

    def called(self, call: ModuleCall, step: int, caller: str | None) -> None:
        """Note which module calls another; None if the call comes from outside the model."""
        rename = self._reference.rename
        identity = step, call.micro, rename(call.module), call.number
        self.callers[identity] = None if caller is None else rename(caller)

    def note_inner_use(self, key: Key, from_outside: Any | None, gradient: Any) -> None:
        """Note a wrong gradient of an output if the module itself uses that output, too.

        from_outside: the part of the gradient that comes from outside the module.
        gradient: the whole gradient, without the parts that modules inside add.
        """
        if (row := self._rows[key]) not in self.measured:
            return
        if from_outside is not None:
            parts = (self._framework.host(each) for each in (from_outside, gradient))
            if difference(*parts).difference.equal:
                return
        self.used_inside.add(row)

    def note_same(self, keys: Sequence[Key]) -> None:
        """Note that several records hold the same gradient."""
        if len(keys) > 1:
            self.same.append([self._rows[key] for key in keys])

    def note_detached(self, key: Key, from_inside: bool) -> None:
        """Note an input or output that autograd does not reach; `from_inside` if it should."""
        found = self.cut_off if from_inside else self.outside
        found.add(key._replace(module=self._reference.rename(key.module)))

    def note_kept_inside(self, key: Key) -> None:
        """Note an output whose gradient stays inside a module; see `Isolation.kept_inside`."""
        self.kept_inside.add(key._replace(module=self._reference.rename(key.module)))

    def note_holder(self, module: str) -> None:
        """Note a module that passes on a tensor by an attribute."""
        self.holders.add(self._reference.rename(module))

    def is_off(self, key: Key) -> bool:
        """Whether a tensor differs from the reference's by more than its own rounding."""
        return self._rows[key] in self._off

    def is_mask(self, key: Key) -> bool:
        """Whether a tensor and the reference's are masks that were compared by what they hide."""
        return self._rows.get(key) in self.masks

    def is_reordered(self, key: Key) -> bool:
        """Whether a tensor has the reference's tokens in another order, which the code around it knows alone."""
        return self._rows.get(key) in self.reordered

    def mark_forced(self, key: Key) -> None:
        """Note that the reference's values replace this tensor."""
        if (row := self._rows.get(key)) is not None:
            self.forced.add(row)

    def _measure_lone_parts(self) -> None:
        """Measure gradients that match the first of the reference's backwards, and whose others never came, by all."""
        for key, row in list(self._rows.items()):
            if key.kind not in GRADIENT_KINDS or row in self.shares or row in self._off:
                continue
            whole = self._reference.over_backwards(key)
            if whole is None or key._replace(path=f"{key.path}~2") in self._rows:
                continue
            self.shares.add(row)
            self._measure_pair(row, key, whole, self._reference.values(whole.parts[0]))

    def end_step(self, step: int, book: CoverageBook) -> None:
        self._measure_lone_parts()
        self.parts |= {row for key, row in self._rows.items() if self.is_part(key)}
        self._summed_calls.clear()
        self._keys.clear()
        self._rows.clear()
        self._first_parts.clear()
        self._hidden.clear()
        self._padding.clear()
        self._given.clear()
        self._chosen.clear()
        self._given_choices.clear()

    def close(self, status: str, reason: str, book: CoverageBook) -> None:
        self.run.close_with(status, reason, book.notices)

    def _measure_pair(self, row: int, key: Key, found: Counterpart, array: npt.NDArray[Any]) -> None:
        rtol, atol = self._tolerances
        if ("complex" in found.dtype) != (array.dtype.kind == "c"):
            return
        values = self._reference.values(found)
        if key.phase == "forward" and self._take_mask(row, key, mask_difference(values, array)):
            return
        measure = difference(values, array, rtol=rtol, atol=atol, size=found.l2)
        if summarize(array).edge:
            measure = replace(measure, difference=without_edges(measure.difference, values, array, rtol, atol))
        if measure.difference.rel_l2 > LEAST_REORDERED and self._is_made_by_choices(key):
            self.reordered |= {row} if are_reordered(values, array) else set()
        measure = self._without_hidden(row, key, measure, values, array)
        measure = self._without_unpassed(row, key, measure, values, array)
        self.measured[row] = measure
        if not measure.difference.rel_l2 <= Policy.base(found.dtype, dtypes.name_of(array.dtype)):
            self._off.add(row)
        if key.kind in ("param_grad", "step_grad"):
            self.step_noise[row] = step_noise(values, array)
        if key.kind == "param" and (few := crossed_kink(values, array, 0, few_steps(array.size))) is not None:
            self.kinks[row] = few
        is_large = key.phase == "backward" and measure.difference.rel_l2 > _LEAST_KINK
        if is_large and (kink := crossed_kink(values, array)) is not None:
            self.kinks[row] = kink

    def _is_nearer(self, array: npt.NDArray[Any], share: Counterpart, whole: Counterpart) -> bool:
        """Whether a gradient is nearer to a share of the recorded one than to the whole."""
        off = [difference(self._reference.values(each), array).difference.max_abs for each in (share, whole)]
        return bool(off[0] < off[1])

    def _note_choices(self, key: Key, found: Counterpart) -> None:
        """Note integers that a module returns, and what they are given to."""
        if key.kind == "output":
            self._chosen.add(found.tensor)
        elif key.kind == "input" and found.tensor in self._chosen:
            self._given_choices.add((key.micro, self._reference.rename(key.module)))

    def _is_made_by_choices(self, key: Key) -> bool:
        """Whether a value is given to, or made by, a module inside one that was given choices."""
        module = self._reference.rename(key.module)
        while key.phase == "forward" and (module := module.rpartition(".")[0]):
            if (key.micro, module) in self._given_choices:
                return True
        return False

    def _without_unpassed(
        self, row: int, key: Key, measure: PairMeasure, values: npt.NDArray[Any], array: npt.NDArray[Any]
    ) -> PairMeasure:
        """Leave out gradients at zeros of the output, if these are all that differs."""
        if key.kind != "grad_output" or not measure.difference.rel_l2 > _LEAST_KINK:
            return measure
        output = self._reference.get(key._replace(kind="output", phase="forward"))
        if output is None or output.location is None:
            return measure
        passed = measure_passed(self._reference.values(output), values, array)
        base = Policy.base(*(dtypes.name_of(each.dtype) for each in (values, array)))
        if passed is None or not passed.difference.rel_l2 <= base:
            return measure
        self.unpassed.add(row)
        return replace(passed, difference=replace(passed.difference, equal=False))

    def _note_given(self, key: Key, found: Counterpart) -> None:
        """Note a tensor as what its own call is given, or the call around it gets."""
        module = self._reference.rename(key.module)
        if key.kind == "input":
            self._given[key.micro, module, key.call] = found
        elif key.kind == "output":
            caller = self.callers.get((key.step, key.micro, module, key.call))
            if caller is not None:  # a container whose calls are counted from 0
                self._given[key.micro, caller, 0] = found

    def _find_other_gelu(self, row: int, key: Key, found: Counterpart, array: npt.NDArray[Any]) -> None:
        """Find out whether an output is a GELU of another kind. What it is computed from is the reference's."""
        module = self._reference.rename(key.module)
        given = self._given.get((key.micro, module, key.call))
        if key.phase != "forward" or key.kind != "output" or given is None or given.shape != array.shape:
            return
        names = {found.dtype, given.dtype, dtypes.name_of(array.dtype)}
        if names <= SHORT_DTYPES and row in self.measured:
            x = self._reference.values(given)
            if are_other_gelus((x, x), (self._reference.values(found), array)):
                self.other_gelus.add(row)

    def _take_mask(self, row: int, key: Key, mask: MaskDifference | None) -> bool:
        """Keep the difference of two masks, and the positions that they hide; return whether they are masks."""
        if mask is None:
            return False
        self.masks[row] = mask
        if mask.frees_positions:
            self._hidden.setdefault((key.step, key.micro), HiddenPositions()).add(mask.positions)
        return True

    def _find_padding(self, key: Key, values: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
        """Find out whether a value differs because padding sees nothing, and keep its masks."""
        masks = self._padding.get((key.step, key.micro), {})
        if any(mask.positions is not None and see_nothing(mask.positions, values, array) for mask in masks.values()):
            for row, mask in masks.items():
                self._take_mask(row, key, mask)

    def _without_hidden(
        self, row: int, key: Key, measure: PairMeasure, values: npt.NDArray[Any], array: npt.NDArray[Any]
    ) -> PairMeasure:
        """Leave out positions that a mask hides, if the pair differs there by more than rounding."""
        off, names = measure.difference.rel_l2, (dtypes.name_of(each.dtype) for each in (values, array))
        if key.phase != "forward" or off <= Policy.base(*names):
            return measure
        if (key.step, key.micro) not in self._hidden:
            self._find_padding(key, values, array)
        if not (hidden := self._hidden.get((key.step, key.micro))):
            return measure
        shown = hidden.measure_shown(values, array, *self._tolerances)
        if shown is None:
            return measure
        self.shown[row] = not off <= EXPLAINS * shown.difference.rel_l2
        return shown


def _call_of(key: Key) -> tuple[object, ...]:
    return key.step, key.micro, key.module, key.call
