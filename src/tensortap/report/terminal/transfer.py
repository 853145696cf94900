"""A transfer of weights on the terminal: copied tensors, their changes, and tensors that were not copied."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensortap.report.wording import clean, plural, wrap

__all__ = ["transfer_page"]

_MOST = 20


def transfer_page(facts: Mapping[str, Any], width: int | None) -> list[str]:
    """Render the result of `Transfer.as_dict()`."""
    return [
        ("  " if at else "") + part
        for line in _lines(facts)
        for at, part in enumerate(wrap(clean(line), None if width is None else width - 2))
    ]


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    copied = facts["copied"]
    changes = Counter(re.sub(r" \(.*?\)", "", each["change"]) or "as they are" for each in copied)
    changes = Counter({words.replace(", ", " and "): times for words, times in changes.items()})
    how = ", ".join(f"{times} {words}" for words, times in changes.most_common())
    yield f"{plural(len(copied), 'tensor')} copied from {facts['source']} to {facts['target']}" + (
        f": {how}." if copied else "."
    )
    moved = [each for each in facts["modules"] if each["how"] in ("structure", "elimination")]
    yield from _few("placed by structure", [f"{each['reference']} → {each['candidate']}" for each in moved])
    guessed = [each for each in copied if each["how"] in ("shape", "order")]
    names = [f"{' + '.join(each['source'])} → {each['target']}, by {each['how']}" for each in guessed]
    yield from _few("placed by shape and order", names)
    casts = Counter((each["cast_from"], each["dtype"]) for each in copied if each["cast_from"])
    yield from (f"≈ {times} of them cast from {old} to {new}" for (old, new), times in casts.items())
    out = Counter((each["side"], each["name"].rpartition(".")[2], each["why"]) for each in facts["ignored"])
    yield from (f"– {times} × {name} of the {side} left out: {why}" for (side, name, why), times in out.items())
    left = facts["left"]
    yield from (f"! {each['side']} {each['name']}: {each['why']}" for each in left[:_MOST])
    if len(left) > _MOST:
        yield f"! and {len(left) - _MOST} more that found no place: see .left"
    yield from (f"! {rule} fitted nothing" for rule in facts["unused"])


def _few(title: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"→ {title}: {', '.join(names[:3])}{more}"
