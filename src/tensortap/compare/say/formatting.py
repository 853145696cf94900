"""Numbers and lists, as sentences show them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed", "rounded"]

_MOST_LISTED = 4


def listed(words: Sequence[object], most: int = _MOST_LISTED) -> str:
    """Join the first words, and say how many more there are.

    >>> listed([1, 2, 3, 4, 5, 6])
    '1, 2, 3, 4 and 2 more'
    """
    few = ", ".join(map(str, words[:most]))
    return few + (f" and {len(words) - most} more" if len(words) > most else "")


def rounded(value: float) -> str:
    """Format two digits, and an exponent without padding: 1.5e-5, 0.42."""
    if value == 0 or 0.00995 <= abs(value) < 995:
        return f"{value:.2g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
