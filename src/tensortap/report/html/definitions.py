"""The meaning of every number on the pages."""

from __future__ import annotations

__all__ = ["PAIRS", "RUN"]

_COMMON = {
    "execution order": "The order in which a rank saw its tensors: inputs before a module runs, outputs right after.",
    "mean, std": "Over the finite elements, accumulated in float64.",
    "l2": "The norm: the square root of the sum of squares of the finite elements.",
}

PAIRS = {
    "pair": "A record of the reference and the candidate's record of the same identity: step, micro step, phase, "
    "module, call, kind and path, on the same rank. "
    "If names were mapped, the tables show the reference's name, and the tensor view shows both.",
    "relative error": "|candidate − reference| / |reference|, in the L2 norm over all elements; 0 if both are equal "
    "bit for bit.",
    "~ and ±": "If one side has no bytes, the error is estimated from sketches, random projections of at most 256 "
    "numbers; "
    "± is half the width of the 95 % interval.",
    "≥": "A lower bound of the error, from norms alone: the layouts differ, and bytes were not kept.",
    "tolerance": "The relative error that is allowed, with the tolerance rule that set it.",
    "worst row": "The relative error of the worst row along the last dimension, such as one token or channel. A row "
    "has a larger tolerance than the whole tensor; a row beyond it makes the pair diverge.",
    "birth": "A wrong record whose sources are right: the error starts there. Other wrong records only propagate it.",
    "1 − cos": "One minus the cosine of the angle between both tensors: how much their directions differ.",
    "max abs": "The greatest absolute difference of two elements.",
    "ULP": "Units in the last place: the distance of two elements in representable numbers of the coarser dtype.",
    "mismatched": "The share of elements with |candidate − reference| > atol + rtol · |reference|.",
    "tolerance needed": "The smallest tolerance under which the pair would pass: as a relative error of the whole "
    "tensor and its rows; or element by element as atol alone, as rtol alone, and as atol with the default rtol.",
    "error map": "The tensor folded to two dimensions, the last one and all others; each tile shows its greatest "
    "difference.",
    "= equal": "Equal bit for bit.",
    "≈ close": "Within tolerance.",
    "✖ diverged": "Beyond tolerance.",
    "✖ NaN or Inf": "One side has a NaN or an infinity where the other has a finite value.",
    "✖ shape": "The shapes differ.",
    "? not judged": "The records hold too little to judge the pair.",
    "∅ unmatched": "A record without a counterpart on the other side.",
    **_COMMON,
}

RUN = {
    "record": "One tensor, seen once, under the name of the module that received, returned or owns it.",
    "rms": "The root mean square of the finite elements: a typical magnitude.",
    "✖ nonfinite": "The record has a NaN or +Inf; or −Inf, except in activations, where masks use it. It is a birth "
    "if all its sources are finite, and no earlier step left a non-finite value.",
    "usual": "The median rms of all records of a kind in a step; for gradients between modules, the rms of the first "
    "one in backward.",
    "▲ exploding": "An element exceeds half of the dtype's range, or the rms is 10,000 times the usual one, or "
    "100 times that of the same tensor in earlier steps.",
    "○ dead": "An output or gradient whose elements are all zero in every recorded step.",
    "▽ vanishing": "A non-zero gradient whose rms is 10,000 times smaller than the usual one.",
    "gradient norm": "The norm of all parameter gradients of a step together, as gradient clipping computes it, on the "
    "first rank; for a layer, that of its own parameters.",
    **_COMMON,
}
