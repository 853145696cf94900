"""The meaning of every number on the pages, in a sentence each."""

from __future__ import annotations

__all__ = ["PAIRS", "RUN"]

_COMMON = {
    "execution order": "The order in which a rank saw its tensors: inputs before a module runs, outputs right after.",
    "mean, std": "Over the finite elements, accumulated in float64.",
    "l2": "The norm: the root of the sum of squares of the finite elements.",
}

PAIRS = {
    "pair": "A tensor of the reference and the candidate's tensor of the same identity: step, micro step, phase, "
    "module, call, kind and path, on the same rank. "
    "Where names differ and were mapped, the reference's are shown, and the candidate's beside the tensor.",
    "relative error": "|candidate − reference| / |reference|, in the L2 norm over all elements. 0 if they are equal "
    "bit for bit.",
    "~ and ±": "Where bytes were not kept on both sides, the error is estimated from sketches, random projections "
    "of 256 numbers; ± is half the width of its 95 % interval.",
    "≥": "Of a tensor in another layout whose bytes were not kept, norms alone are known: the error is at least this.",
    "tolerance": "The relative error that was allowed. Which rule gave it is said beside it.",
    "worst row": "The relative error of the row along the last dimension that is furthest off, one token or channel, "
    "by itself. A row may be off by more than the whole; one that is off by more than that makes the pair diverge.",
    "birth": "A wrong value although all it was made from is right: this is where to look. Other wrong values "
    "were handed on.",
    "1 − cos": "One minus the cosine of the angle between both tensors: how far they point in other directions.",
    "max abs": "The greatest difference of two elements.",
    "ULP": "Units in the last place: how many numbers of the coarser dtype lie between two elements.",
    "mismatched": "The share of elements with |candidate − reference| > atol + rtol · |reference|.",
    "tolerance needed": "The smallest tolerance under which the pair would pass: as a relative error of the whole "
    "tensor and its rows, or element by element as atol alone, as rtol alone, and as atol beside the usual rtol.",
    "error map": "The tensor folded to two dimensions, the last one and all before it; each tile shows the greatest "
    "difference in it.",
    "= equal": "Bit for bit.",
    "≈ close": "Within tolerance.",
    "✖ diverged": "Beyond tolerance.",
    "✖ NaN or Inf": "One side has a NaN or an infinity where the other has not.",
    "✖ shape": "The shapes differ.",
    "? not judged": "There is nothing to go by.",
    "∅ unmatched": "A record that only one side has.",
    **_COMMON,
}

RUN = {
    "record": "A tensor seen once, under the name of the module that took, returned or owns it.",
    "rms": "The root mean square of the finite elements: the size of a typical one.",
    "✖ nonfinite": "It has a NaN or +Inf; or −Inf, unless it is an activation, where masks are written so. It is born "
    "where all that a record was made from is finite, and no step before left anything behind.",
    "usual": "The median rms of all records of a kind in a step; for gradients that flow from module to module, the "
    "rms of the one that backward began with.",
    "▲ exploding": "An element is beyond half of what the dtype holds, or the rms is 10,000 times the usual one, or "
    "100 times that of the same tensor over the steps before.",
    "○ dead": "An output or gradient that is zero in every element and in every recorded step.",
    "▽ vanishing": "A gradient that is not zero, but whose rms is 10,000 times smaller than the usual one.",
    "gradient norm": "The norm of all parameter gradients of a step together, as gradient clipping takes it, on the "
    "first rank; of a layer, of its own parameters.",
    **_COMMON,
}
