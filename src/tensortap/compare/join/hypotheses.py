"""Causes that only parallel layouts have: each hypothesis about a birth is tested on sketches, digests or bytes.

A hypothesis predicts the reference's record from what the ranks hold: their sum, a multiple, the same numbers in
another order, the record of another module. If the prediction is right within rounding, it is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tensortap.compare.join.members import AxisMembers, MemberReader, shard_axes
from tensortap.compare.join.order import Reordering, find_reordering
from tensortap.compare.join.resolve import rounding_of
from tensortap.compare.join.source import JoinedSource, joined_source
from tensortap.compare.judge.structure import Structure
from tensortap.compare.matched import Matched
from tensortap.compare.say.formatting import rounded
from tensortap.core.causes import Cause
from tensortap.core.records import Finding, Key, LayoutFact, display_name

__all__ = ["explain"]

Floats = npt.NDArray[np.float64]
_MOST = 64
_SAME_NUMBERS = 1e-5
_STATE = ("param", "buffer")
_EXPERT = re.compile(r"expert", re.IGNORECASE)
_GRADIENT = ("grad_output", "grad_input", "param_grad", "step_grad")


def explain(births: Sequence[Finding], matched: Matched, structure: Structure) -> list[Finding]:
    """Return the births, with the cause of those that a parallel layout explains."""
    joined = joined_source(matched.candidate.run)
    if joined is None or len(joined.run.ranks) < 2:
        return list(births)
    explainer = _Explainer(matched, joined, structure)
    explainer.prepare([birth.row for birth in births[:_MOST] if birth.row is not None])
    return [explainer.explained(birth) if at < _MOST else birth for at, birth in enumerate(births)]


class _Explainer:
    """Tests hypotheses about pairs."""

    def __init__(self, matched: Matched, joined: JoinedSource, structure: Structure) -> None:
        self._matched = matched
        self._joined = joined
        self._structure = structure
        self._reader = MemberReader(joined)

    def prepare(self, pairs: list[int]) -> None:
        self._reader.prepare([self._group(pair) for pair in pairs])

    def explained(self, birth: Finding) -> Finding:
        if birth.row is None or birth.status == "nonfinite":
            return birth
        tests: tuple[Callable[[Finding], Finding | None], ...] = (
            self._padded,
            self._of_another_module,
            self._reduced,
            self._reordered,
            self._unreduced_source,
            self._unreduced_gradient,
        )
        return next((found for test in tests if (found := test(birth)) is not None), birth)

    # --- what a pair is ----------------------------------------------------------------------------------------------
    def _group(self, pair: int) -> int:
        side = self._matched.candidate
        return int(self._joined.groups[side.row[self._matched.alignment.candidate[pair]]])

    def _target(self, pair: int) -> Floats | None:
        """Return the sketch of the reference's record."""
        side, row = self._matched.reference, int(self._matched.alignment.reference[pair])
        if not side.has_sketch[row]:
            return None
        found = side.sketches_at(np.array([row]))[0].astype(np.float64)
        return found if np.isfinite(found).all() and np.any(found) else None

    def _rounding(self, pair: int) -> float:
        left, right, alignment = self._matched.reference, self._matched.candidate, self._matched.alignment
        words = left.dtype[int(alignment.reference[pair])], right.dtype[int(alignment.candidate[pair])]
        return 4 * max(rounding_of(word) for word in words)

    # --- hypotheses --------------------------------------------------------------------------------------------------
    def _padded(self, birth: Finding) -> Finding | None:
        """The whole is longer along a sharded dimension than the reference's: it was padded to divide by the ranks."""
        if birth.row is None or birth.status != "shape":
            return None
        left, right, alignment = self._matched.reference, self._matched.candidate, self._matched.alignment
        ours = left.shape(int(alignment.reference[birth.row]))
        theirs = right.shape(int(alignment.candidate[birth.row]))
        if len(ours) != len(theirs):
            return None
        longer = [at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
        if len(longer) != 1 or theirs[longer[0]] < ours[longer[0]]:
            return None
        at, pieces = longer[0], self._joined.layout.pieces
        mesh = next(iter(pieces.meshes.values()), None)
        axes = [axis for axis, cut in shard_axes(self._joined.layout, self._group(birth.row)).items() if cut == at]
        for axis, size in zip(mesh.names, mesh.sizes, strict=True) if mesh is not None else ():
            # The next multiple of the number of ranks, or of a power of two that kernels like.
            if size > 1 and any(theirs[at] == -(-ours[at] // unit) * unit for unit in (size, 8 * size, 64, 128 * size)):
                axes.append(axis)
        if not axes:
            return None
        words = f"dimension {at} has {theirs[at]:,} elements where the reference has {ours[at]:,}"
        return self._finding(birth, Cause.PADDING, axes[0], words)

    def _of_another_module(self, birth: Finding) -> Finding | None:
        """The record is that of the reference's module with another number: an expert or a layer."""
        if birth.row is None or birth.key.kind not in _STATE:
            return None
        left, right, alignment = self._matched.reference, self._matched.candidate, self._matched.alignment
        digest = right.digest[alignment.candidate[birth.row]]
        same = np.flatnonzero((left.digest == digest) & left.kind.among((birth.key.kind,)))
        own = self._matched.reference.key(int(alignment.reference[birth.row]))
        for row in same.tolist():
            key = left.key(row)
            place = _other_number(own, key)
            if place is None or key.path != own.path:
                continue
            parts = own.module.split(".")
            expert = place > 0 and bool(_EXPERT.search(parts[place - 1]))
            cause = Cause.EXPERT_PLACEMENT if expert else Cause.STAGE_OFFSET
            axis = _axis_of(self._joined, ("ep", "expert", "moe") if expert else ("pp", "pipe", "stage"))
            words = f"it is equal to that of {display_name(key.module)} in the reference"
            return self._finding(birth, cause, axis or ("ep" if expert else "pipeline"), words)
        return None

    def _reduced(self, birth: Finding) -> Finding | None:
        """The ranks hold summands, a multiple, or a mean of the reference's record."""
        if birth.row is None:
            return None
        target, rounding = self._target(birth.row), self._rounding(birth.row)
        if target is None:
            return None
        for members in self._reader.along_axes(self._group(birth.row)):
            found = _test_reduction(members, target, rounding, birth.key.kind)
            if found is not None:
                cause, words, residual = found
                named = self._at_consumer(birth)
                return self._finding(named, cause, members.axis, words, members.ranks, len(members), residual)
        return None

    def _at_consumer(self, birth: Finding) -> Finding:
        """Attribute a gradient that is sent back to the innermost module that was given the tensor."""
        if birth.row is None or birth.key.kind != "grad_output" or not birth.container:
            return birth
        own = self._structure.call_of(birth.row)
        outputs = own.of("output") if own is not None else []
        users = [call for row in outputs for call in self._structure.consumers.get(self._structure.tensor[row], ())]
        inside = [call.module for call in users if f"{call.module}.".startswith(f"{birth.container}.")]
        innermost = max(inside, key=len, default=birth.container)
        nested = all(f"{innermost}.".startswith(f"{module}.") for module in inside)
        return replace(birth, container=innermost) if nested else birth

    def _reordered(self, birth: Finding) -> Finding | None:
        """The ranks hold the reference's numbers in another order."""
        if birth.row is None or not self._has_the_same_numbers(birth.row):
            return None
        group = self._group(birth.row)
        cut = shard_axes(self._joined.layout, group)
        if not cut:
            return None
        found: Reordering | None = None
        for axis, dimension in cut.items():
            found = find_reordering(self._matched, self._joined, birth.row, group, axis, dimension)
            if found is not None:
                return self._finding(birth, found.cause, axis, found.words)
        return None

    def _has_the_same_numbers(self, pair: int) -> bool:
        """Whether both sides have the same counts, extremes and norms, so that only the order can differ."""
        left, right, alignment = self._matched.reference, self._matched.candidate, self._matched.alignment
        one, other = int(alignment.reference[pair]), int(alignment.candidate[pair])
        if any(getattr(left, name)[one] != getattr(right, name)[other] for name in ("elements", "nan", "posinf")):
            return False
        for name in ("min", "max", "l1", "l2"):
            ours, theirs = float(getattr(left, name)[one]), float(getattr(right, name)[other])
            if not abs(ours - theirs) <= _SAME_NUMBERS * max(abs(ours), abs(theirs), 1e-30):
                return False
        return True

    def _unreduced_source(self, birth: Finding) -> Finding | None:
        """A source of the record is a sum over ranks, which the code after it used without adding it up."""
        if birth.row is None or birth.key.kind not in ("output", "input"):
            return None
        target = self._target(birth.row)
        if target is None:
            return None
        for source in reversed(self._structure.sources(birth.row)):
            plan = self._joined.layout.plan_of(self._group(source))
            of_source = self._target(source)
            if not plan.reductions or of_source is None:
                continue
            axis = plan.reductions[0][0]
            own, parts = (self._members(pair, axis) for pair in (birth.row, source))
            if own is None or parts is None or len(own) != len(parts):
                continue
            # A sum with something else, as a residual connection, is off by what each rank's summand lacks.
            lacking = (own.sketches - target) - (parts.sketches - of_source)
            residual = float(np.linalg.norm(lacking) / max(np.linalg.norm(own.sketches - target), 1e-30))
            if residual > 0.2:
                continue
            key = self._matched.reference.key(int(self._matched.alignment.reference[source]))
            words = f"their sum is the reference's {key.kind}, and {display_name(birth.module)} uses it unreduced"
            found = self._finding(birth, Cause.MISSING_REDUCTION, axis, words, parts.ranks, len(parts), residual)
            return replace(found, key=key, row=source, container=None, cls=self._structure_class(source))
        return None

    def _unreduced_gradient(self, birth: Finding) -> Finding | None:
        """A gradient that is sent back is a sum of one that every rank has, as that of a residual connection, and of
        summands that were not added up. The sum over n ranks has the first n times."""
        if birth.row is None or birth.key.kind not in ("grad_output", "grad_input"):
            return None
        target, rounding = self._target(birth.row), self._rounding(birth.row)
        if target is None:
            return None
        scope, structure = self._structure.scope[birth.row], self._structure
        around = structure.calls_of_module.get((scope, birth.container or birth.key.module), ())
        sources = [*structure.sources(birth.row), *(row for call in around for row in call.of("grad_output"))]
        given = [row for row in sources if structure.kind[row] in ("grad_output", "grad_input") and row != birth.row]
        self._reader.prepare([self._group(row) for row in given])
        norm = float(np.linalg.norm(target))
        for members in self._reader.along_axes(self._group(birth.row)):
            sketches = _of_size(members.sketches, target.size)
            each = float((np.linalg.norm(sketches - target, axis=1) / norm).min())
            for row in given:
                common = self._target(row)
                if common is None or common.size != target.size or not np.isfinite(sketches).all():
                    continue
                rest = sketches.sum(axis=0) - (len(members) - 1) * common - target
                residual = float(np.linalg.norm(rest)) / norm
                if residual <= max(rounding, 0.05 * each) and residual <= 0.2 * each:
                    words = "their sum, with what all of them have counted once, is the reference's gradient"
                    found = self._finding(
                        birth, Cause.MISSING_REDUCTION, members.axis, words, members.ranks, len(members), residual
                    )
                    return self._at_summands(found, given, members.axis)
        return None

    def _at_summands(self, birth: Finding, given: Sequence[int], axis: str) -> Finding:
        """Attribute it to the module that sent summands back inside, if these were recorded."""
        for row in given:
            plan = self._joined.layout.plan_of(self._group(row))
            if not any(name == axis for name, _ in plan.reductions):
                continue
            key = self._matched.reference.key(int(self._matched.alignment.reference[row]))
            around = self._structure.call_of(row)
            container = around.parent.module if around is not None and around.parent is not None else birth.container
            layout = birth.layout and replace(birth.layout, words="their sum is the reference's gradient")
            inside = replace(
                birth, key=key, row=row, container=container, cls=self._structure_class(row), layout=layout
            )
            return self._at_consumer(inside)
        return birth

    def _members(self, pair: int, axis: str) -> AxisMembers | None:
        return self._reader._along(self._group(pair), axis) if self._prepared(pair) else None

    def _prepared(self, pair: int) -> bool:
        self._reader.prepare([self._group(pair)])
        return True

    def _structure_class(self, pair: int) -> str:
        return self._matched.reference.cls[int(self._matched.alignment.reference[pair])]

    def _finding(
        self,
        birth: Finding,
        cause: Cause,
        axis: str,
        words: str,
        ranks: tuple[int, ...] = (),
        count: int = 0,
        residual: float = float("nan"),
    ) -> Finding:
        layout = self._joined.layout
        members = layout.pieces.rank[layout.members(self._group(birth.row or 0))]
        known = ranks or tuple(members.tolist())
        size = count or layout.pieces.size(axis) or len(known)
        return replace(birth, cause=cause, layout=LayoutFact(axis, known, size, words, residual))


def _test_reduction(
    members: AxisMembers, target: Floats, rounding: float, kind: str
) -> tuple[Cause, str, float] | None:
    """Return the cause, words and residual if the members are summands, multiples or means of the target."""
    sketches = _of_size(members.sketches, target.size)
    if not np.isfinite(sketches).all():
        return None
    count, norm = len(members), float(np.linalg.norm(target))
    each = np.linalg.norm(sketches - target, axis=1) / norm
    total = sketches.sum(axis=0)
    known = {"sum": float(np.linalg.norm(total - target)) / norm}
    if kind in _GRADIENT:
        known["mean"] = float(np.linalg.norm(total / count - target)) / norm
    alike = float(np.linalg.norm(sketches - sketches[0], axis=1).max()) <= rounding * norm
    for factor, cause in ((float(count), Cause.REPEATED_REDUCTION), (1.0 / count, Cause.MEAN_FOR_SUM)):
        off = np.linalg.norm(sketches - factor * target, axis=1) / (factor * norm)
        if alike and float(off.max()) <= rounding:
            return cause, f"{rounded(factor)} times", float(off.max())
    best = min(known, key=lambda name: known[name])
    if known[best] <= max(rounding, 0.05 * float(each.min())) and known[best] <= 0.2 * float(each.min()):
        what = "gradient" if kind in _GRADIENT else kind
        return Cause.MISSING_REDUCTION, f"their {best} is the reference's {what}", known[best]
    return None


def _of_size(sketches: Floats, size: int) -> Floats:
    if sketches.shape[1] <= size:
        return sketches
    found: Floats = sketches.reshape(len(sketches), size, -1).sum(axis=2)
    return found


def _other_number(own: Key, other: Key) -> int | None:
    """Return the place of the one part, a number, in which two module names differ; None if they differ otherwise."""
    left, right = own.module.split("."), other.module.split(".")
    if len(left) != len(right):
        return None
    places = [at for at, (one, two) in enumerate(zip(left, right, strict=True)) if one != two]
    if len(places) != 1 or not (left[places[0]].isdecimal() and right[places[0]].isdecimal()):
        return None
    return places[0]


def _axis_of(joined: JoinedSource, names: tuple[str, ...]) -> str:
    known = next(iter(joined.layout.pieces.meshes.values()), None)
    return next((axis for axis in (known.names if known else ()) if axis.lower().startswith(names)), "")
