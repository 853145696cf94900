"""Limits and margins of the tolerance rules that both ways of applying them use: pair by pair, and in columns."""

from __future__ import annotations

__all__ = [
    "CANCELLED",
    "CANCELS",
    "ENLARGED",
    "FLIPPED",
    "FLIPPED_MAPPED",
    "FLIPPED_UNEVEN",
    "MAGNIFIED",
    "MOST_ASSUMED",
    "MOST_CANCELLED",
    "NEGLIGIBLE",
    "ORTHOGONALIZED",
    "ORTHOGONAL_FLOOR",
    "PARTLY_CANCELS",
    "ROUNDED_APART",
    "SHARE_ROUNDED_APART",
    "SHORT",
    "SYSTEMATIC",
]

MOST_ASSUMED = 0.25
"""The largest relative error that a rule allows without a measured error behind it, unless a sum cancels out."""
CANCELS = 8.0
"""Times that the terms of a sum are larger than the sum, from which on it cancels out."""
PARTLY_CANCELS = 2.0
"""Times that the terms of a sum are larger than the sum, from which on signs are not random."""
CANCELLED = 4.0
"""Times its own rounding by which a gradient may be off that is this much smaller than the one that came in."""
MOST_CANCELLED = 16.0
"""Times its own rounding. A gradient may be small for another reason, such as a small factor: then less is allowed."""
NEGLIGIBLE = 2.0**-23
"""Size of a gradient over that of the one that came in, an epsilon of float32, below which it consists of rounding."""
SHORT = 2.0**-10
"""The least rounding of a short dtype."""
ROUNDED_APART, SHARE_ROUNDED_APART = 4.0, 1e-3
"""Elements of a tensor that right code may round to the other side in a short dtype, while no measured noise shows it:
a few, or this share of all."""
ENLARGED = 2.0
"""Error of what a module without parameters returns over that of what it got; the slope of a GELU is at most 1.13."""
SYSTEMATIC = 2.0
"""Margin over the bound for errors that are alike at all positions."""
FLIPPED, FLIPPED_MAPPED, FLIPPED_UNEVEN = 4.0, 8.0, 32.0
"""Error of an optimizer's step over the root of its gradient's error: as usual, between two frameworks, and where many
elements of the gradient are nearly zero."""
ORTHOGONALIZED, ORTHOGONAL_FLOOR = 500.0, 0.05
"""Error of an orthogonal step that is computed in bfloat16: over the root of an epsilon of that dtype times the error
of the gradient, as the elements that round to the other side make it; and the least. The iteration enlarges small
singular values, among them those of rounding, nearly 500 times. For gradients of several ranks, it was up to 420 (710
below a gradient's error of 1e-6), and 0.04."""
MAGNIFIED = 8.0
"""Error of an optimizer's step over that of its last gradient: earlier ones, in its moments, were as far off."""
