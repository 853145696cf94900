"""Names that are too long for their column, cut so that those that differ still look different."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from tensortap.report.wording import middle

__all__ = ["cut"]

_ROUNDS = 3
"""A name with a new text may look like one of another group; the next round distinguishes both."""
_PER_CELL = 4
"""Characters considered for a terminal cell; combining ones take no cell."""


def cut(names: Sequence[str], width: int) -> list[str]:
    """Shorten each name as `middle` does; keep the parts that distinguish names that would look alike.

    >>> cut(["layers.0.moe.experts.2.up", "layers.11.moe.experts.2.up", "head"], 16)
    ['layers.0…2.up', 'layers.11…2.up', 'head']
    """
    texts = {name: middle(name, width) for name in dict.fromkeys(names)}
    wanted: dict[str, set[int]] = {}
    for _ in range(_ROUNDS):
        groups: dict[str, list[str]] = {}
        for name, text in texts.items():
            groups.setdefault(text, []).append(name)
        alike = [group for group in groups.values() if len(group) > 1]
        if not alike:
            break
        for group in alike:
            texts.update(_distinguished(group, wanted, width))
    return [texts[name] for name in names]


def _distinguished(group: Sequence[str], wanted: dict[str, set[int]], width: int) -> dict[str, str]:
    """Return other texts for names that look alike. `wanted` collects the positions of the parts that differ."""
    parts = {name: name.split(".") for name in group}
    for name, places in zip(group, _differing(list(parts.values())), strict=True):
        wanted[name] = wanted.get(name, set()) | places
    texts = {name: _shown(own, wanted[name], width) for name, own in parts.items()}
    if len(set(texts.values())) == len(group) and all(cell_len(text) <= width for text in texts.values()):
        return texts
    same = _same(group)
    for start, mark in ((0, ""), (same, "…")):  # within a part: the beginning and the end, or from where they differ
        heads = {name: name[start : start + _PER_CELL * width] for name in group}
        for head in range(1, width - 1 - len(mark)):
            tail = width - 1 - len(mark) - head
            texts = {name: mark + set_cell_size(heads[name], head) + "…" + _end(name, tail) for name in group}
            if len(set(texts.values())) == len(group):
                return texts
    return {}


def _differing(names: Sequence[Sequence[str]]) -> list[set[int]]:
    """Return the positions of the parts of each name that are not the same in all names."""
    lengths = {len(parts) for parts in names}
    if len(lengths) == 1:
        places = {at for at, column in enumerate(zip(*names, strict=True)) if len(set(column)) > 1}
        return [places] * len(names)
    # Lengths differ: take the parts between the common beginning and the common end.
    before = _same(names)
    after = _same([parts[before:][::-1] for parts in names])
    return [set(range(before, len(parts) - after)) for parts in names]


def _same(names: Sequence[Sequence[str]]) -> int:
    """Return the number of leading parts that all names share."""
    return next(
        (at for at, column in enumerate(zip(*names, strict=False)) if len(set(column)) > 1), min(map(len, names))
    )


def _shown(parts: Sequence[str], wanted: set[int], width: int) -> str:
    """Return the wanted parts and the last one; then as much of the beginning, and of the end, as fits.

    Each part takes a cell at least, so parts further than `width` from both ends are not tried.
    """
    last = len(parts) - 1
    kept = wanted | {last}
    if cell_len(text := _with_gaps(parts, kept)) > width:
        return text
    for at in (*range(min(width, *kept)), *range(last - 1, max(-1, last - 1 - width), -1)):
        if at not in kept:
            if cell_len(_with_gaps(parts, kept | {at})) > width:
                if at < min(kept):
                    continue  # no room for the beginning: there may be some for the end
                break
            kept = kept | {at}
    return _with_gaps(parts, kept)


def _with_gaps(parts: Sequence[str], kept: set[int]) -> str:
    text = "" if 0 in kept else "…"
    for at in sorted(kept):
        if text and not text.endswith("…"):
            text += "." if at - 1 in kept else "…"
        text += parts[at]
    return text


def _end(text: str, width: int) -> str:
    tail = text[-width:]
    while cell_len(tail) > width:  # wide characters take two cells
        tail = tail[1:]
    return tail
