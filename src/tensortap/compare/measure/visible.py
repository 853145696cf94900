"""Pairs of summaries without the positions that a mask hides, from the sketches that runs keep of the others.

The first recorded step of a padded batch has these (`capture.loop.visible`). They are used where masks in two
conventions hide the same, as whole tensors are measured without hidden positions there.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.compare.align.alignment import Alignment
from tensortap.compare.align.side import Side
from tensortap.compare.judge.rules.rounding import Policy
from tensortap.compare.measure.hidden import EXPLAINS
from tensortap.compare.measure.measures import Measures
from tensortap.kernels.summary.visible import COPIES, SUMS

__all__ = ["have_same_padding", "is_padded_behind", "leave_out_hidden_sums"]

Floats = npt.NDArray[np.float64]


def leave_out_hidden_sums(
    measures: Measures, reference: Side, candidate: Side, alignment: Alignment, pairs: npt.NDArray[np.int64]
) -> None:
    """Estimate pairs again without hidden positions, where they differ by more than rounding."""
    rows, partners = alignment.reference, alignment.candidate
    scopes = {_scope(reference, int(rows[pair])) for pair, mask in measures.masks.items() if mask.frees_positions}
    if not scopes:
        return
    in_copies: set[int] = set()
    """Lengths of tensors that were seen to consist of copies of all positions."""
    from_loss = reference.kind.among(("grad_output",)) & reference.module.among(("",))
    for pair in pairs[(reference.phase.among(("forward",)) | from_loss)[rows[pairs]]].tolist():
        row, partner = int(rows[pair]), int(partners[pair])
        off = float(measures.rel_l2[pair])
        if _scope(reference, row) not in scopes or pair in measures.masks:
            continue
        if off <= Policy.base(reference.dtype[row], candidate.dtype[partner]):
            continue
        ours, theirs = _visible(reference, row), _visible(candidate, partner)
        if ours is None or theirs is None or _hidden(reference, row) != _hidden(candidate, partner):
            continue
        shown = _relative(ours.sums, theirs.sums)
        explained, length = not off <= EXPLAINS * shown, reference.shape(row)[0]
        if ours.in_copies and explained:
            in_copies.add(length)
        if not ours.in_copies or length in in_copies:  # tokens may be in another order as well
            measures.take_shown_estimate(pair, shown, explained)


def have_same_padding(reference: Side, candidate: Side) -> bool:
    """Whether both models were given the same padding in the first recorded step, as far as that was recorded."""
    ours, theirs = (_padding(side) for side in (reference, candidate))
    return bool(ours) and ours == theirs


def is_padded_behind(side: Side) -> bool:
    """Whether all padding of the first recorded step is known to be behind its texts: a causal attention shows it the
    text."""
    known = [side.run.loop(rank).changes("visible", "") for rank in np.unique(side.rank).tolist()]
    names = {name for each in known for change in each[:1] for name in change.value}
    hidden = {name.removesuffix(".hidden") for name in names if name.endswith(".hidden")}
    return bool(hidden) and all(f"{micro}.behind" in names for micro in hidden)


def _padding(side: Side) -> list[dict[str, Any]]:
    """Return what identifies the hidden positions of each rank's first step."""
    known = [side.run.loop(rank).changes("visible", "") for rank in np.unique(side.rank).tolist()]
    found = [{name: text for name, text in each[0].value.items() if name.endswith(".hidden")} for each in known if each]
    return [each for each in found if each]


def _scope(side: Side, row: int) -> tuple[int, int, int]:
    return int(side.rank[row]), int(side.step[row]), int(side.micro[row])


def _fact(side: Side, row: int, module: str, name: str) -> Any:
    step = int(side.step[row])
    known = [each for each in side.run.loop(int(side.rank[row])).changes("visible", module) if each.step == step]
    return known[0].value.get(name) if known else None


def _hidden(side: Side, row: int) -> Any:
    """Return what identifies the hidden positions of a record's micro step."""
    return _fact(side, row, "", f"{int(side.micro[row])}.hidden")


class _Sketch(NamedTuple):
    sums: Floats
    in_copies: bool


def _visible(side: Side, row: int) -> _Sketch | None:
    """Return the sketch of a record without hidden positions; None if there is none."""
    key = side.key(row)
    text = _fact(side, row, key.module, f"{key.micro}.{key.call}.{key.kind}.{key.path}")
    if not isinstance(text, str):
        return None
    try:
        sums = np.frombuffer(b64decode(text.removeprefix(COPIES), validate=True), "<f4").astype(np.float64)
    except (Error, ValueError):  # written by something else
        return None
    return _Sketch(sums, text.startswith(COPIES)) if len(sums) == SUMS and np.isfinite(sums).all() else None


def _relative(ours: Floats, theirs: Floats) -> float:
    size, apart = float(np.linalg.norm(ours)), float(np.linalg.norm(ours - theirs))
    return apart / size if size else float("inf") if apart else 0.0
