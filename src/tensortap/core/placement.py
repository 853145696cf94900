"""Placements: the positions of a record's elements in a whole tensor that several processes hold together.

A `Placement` belongs to one record. A `Mesh` belongs to one process: the axes along which the processes of a run share
the work, and the position of this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from reprlib import repr as short
from typing import Any

__all__ = ["GUESS", "PARTIAL", "REPLICA", "SHARD", "Box", "Mesh", "Placement", "Span", "in_words"]

Span = tuple[int, int, int]
"""Along one dimension: the first index in the local tensor, the first index in the whole, and the length."""
Box = tuple[Span, ...]
"""A rectangular block: one span for each dimension of the whole."""

SHARD = "shard"
"""Role of an axis along which each process holds other elements."""
REPLICA = "replica"
"""Role of an axis along which all processes hold the same elements with the same values."""
PARTIAL = "partial:"
"""Prefix of the role of an axis along which values must be reduced: "partial:sum", "partial:mean", ..."""
GUESS = "guess"
"""Source of a placement that follows from a convention, not from the framework or the user."""

_MOST_DIMENSIONS = 64
_MOST_BOXES = 1 << 20
_LARGEST = 1 << 62
_LONGEST_NAME = 200
_SHOWN_BOXES = 4


@dataclass(frozen=True, slots=True)
class Placement:
    """The position of a local tensor in the whole.

    Elements of the local tensor outside of all boxes are padding: they are not part of the whole, and not part of the
    summary. Boxes of one placement do not overlap.

    >>> half = Placement((4, 6), (((0, 2, 2), (0, 0, 6)),), {"tp": "shard", "dp": "replica"}, "dtensor")
    >>> half.elements, half.is_whole
    (12, False)
    """

    shape: tuple[int, ...]
    """The shape of the whole."""
    boxes: tuple[Box, ...]
    """One box has a span for each dimension of the whole. If `flat`, it has one span, over flat positions."""
    axes: Mapping[str, str] = field(default_factory=dict)
    """Role of the mesh axes: shard, replica, or partial:<reduction>. Axes that do not matter are left out."""
    source: str = "layout"
    """Its origin: dtensor, fsdp1, fsdp2, ddp, megatron, paddle, layout (of the user), or guess."""
    order: tuple[int, ...] = ()
    """The local dimension of each dimension of the whole; empty if they are in the same order."""

    def __hash__(self) -> int:
        return hash((self.shape, self.boxes, self.source, self.order))

    @classmethod
    def of_whole(cls, shape: Sequence[int], axes: Mapping[str, str], source: str) -> Placement:
        """Return the placement of a tensor that a process holds entirely."""
        return cls(tuple(shape), (tuple((0, 0, size) for size in shape),), dict(axes), source)

    @classmethod
    def of_block(
        cls, shape: Sequence[int], offset: Sequence[int], block: Sequence[int], axes: Mapping[str, str] | None = None
    ) -> Placement:
        """Return the placement of a local tensor of shape `block` that is one rectangular block of the whole."""
        box = tuple((0, at, size) for at, size in zip(offset, block, strict=True))
        return cls(tuple(shape), (box,), dict(axes or {}))

    @property
    def elements(self) -> int:
        """Number of elements of the whole that the boxes hold."""
        return sum(prod(length for _, _, length in box) for box in self.boxes)

    @property
    def is_whole(self) -> bool:
        """Whether the boxes hold all elements of the whole, so that no other process is needed to complete it."""
        return self.elements == prod(self.shape)

    @property
    def flat(self) -> bool:
        """Whether spans are ranges of flat positions, in C order, as those of flattened parameters are."""
        return len(self.shape) != 1 and any(len(box) == 1 for box in self.boxes)

    @property
    def guessed(self) -> bool:
        return self.source == GUESS

    @property
    def shards(self) -> tuple[str, ...]:
        """Axes along which processes hold other elements."""
        return tuple(axis for axis, role in self.axes.items() if role == SHARD)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Axes along which all processes hold the same values."""
        return tuple(axis for axis, role in self.axes.items() if role == REPLICA)

    @property
    def partials(self) -> dict[str, str]:
        """The reduction that is still due, by axis, like {"tp": "sum"}."""
        return {axis: role.removeprefix(PARTIAL) for axis, role in self.axes.items() if role.startswith(PARTIAL)}

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a local tensor of this shape has all elements of the boxes."""
        if self.flat:
            return all(start + length <= prod(shape) for ((start, _, length),) in self.boxes)
        sizes = [shape[at] for at in self.order] if self.order else list(shape)
        return len(sizes) == len(self.shape) and all(
            start + length <= size
            for box in self.boxes
            for (start, _, length), size in zip(box, sizes, strict=True)
            if length
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it: a line of placements.jsonl."""
        value: dict[str, Any] = {
            "shape": list(self.shape),
            "boxes": [[list(span) for span in box] for box in self.boxes],
            "axes": dict(self.axes),
            "source": self.source,
        }
        return value | ({"order": list(self.order)} if self.order else {})

    @classmethod
    def parse(cls, value: Any) -> Placement:
        """Return the placement of a line. Raise ValueError if it is none."""
        if not isinstance(value, Mapping):
            raise ValueError("a placement is not an object")
        shape, order = (_numbers(value.get(name, []), name) for name in ("shape", "order"))
        boxes = value.get("boxes")
        if not isinstance(boxes, list) or len(boxes) > _MOST_BOXES:
            raise ValueError("a placement has no list of boxes")
        axes, source = value.get("axes"), value.get("source")
        if not isinstance(axes, dict) or not all(isinstance(role, str) for role in axes.values()):
            raise ValueError(f"the axes of a placement are {short(axes)}, not roles by name")
        if not isinstance(source, str) or len(source) > _LONGEST_NAME:
            raise ValueError(f"the source of a placement is {short(source)}, not a name")
        if order and sorted(order) != list(range(len(shape))):
            raise ValueError(f"the order {short(order)} is no permutation of {len(shape)} dimensions")
        return cls(shape, tuple(_parse_box(box, shape) for box in boxes), dict(axes), source, order)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of a run's processes, like dp and tp, and the position of one process along each.

    >>> Mesh(("dp", "tp"), (2, 4), (0, 3)).coordinate("tp")
    3
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]

    def size(self, name: str) -> int:
        """Return the number of processes along an axis; 1 if the mesh does not have it."""
        return self.sizes[self.names.index(name)] if name in self.names else 1

    def coordinate(self, name: str) -> int:
        """Return the position of this process along an axis; 0 if the mesh does not have it."""
        return self.coordinates[self.names.index(name)] if name in self.names else 0

    def as_dict(self) -> dict[str, Any]:
        """Return it as rank.json holds it."""
        return {name: list(getattr(self, name)) for name in ("names", "sizes", "coordinates")}

    @classmethod
    def parse(cls, value: Any) -> Mesh:
        """Return the mesh of a rank.json. Raise ValueError if it is none."""
        if not isinstance(value, Mapping):
            raise ValueError("the mesh is not an object")
        names = value.get("names")
        sizes, coordinates = (_numbers(value.get(name), name) for name in ("sizes", "coordinates"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"the axes of the mesh are {short(names)}, not names")
        if not len(names) == len(set(names)) == len(sizes) == len(coordinates):
            raise ValueError("the mesh needs a size and a coordinate for each of its axes, which have different names")
        if not all(0 <= at < size for at, size in zip(coordinates, sizes, strict=True)):
            raise ValueError(f"the coordinates {short(coordinates)} are outside of a mesh of sizes {short(sizes)}")
        return cls(tuple(names), sizes, coordinates)


def in_words(placement: Placement) -> str:
    """Return a placement as people read it.

    >>> in_words(Placement.of_block((32, 16), (16, 0), (16, 16), {"tp": "shard"}))
    '16-31, 0-15 of 32x16 (tp shard; layout)'
    """
    shape = "x".join(map(str, placement.shape)) or "a number"
    roles = ", ".join(f"{axis} {role}" for axis, role in placement.axes.items())
    known = f"({roles}; {placement.source})" if roles else f"({placement.source})"
    if placement.is_whole:
        return f"all of {shape} {known}"
    if not placement.elements:
        return f"nothing of {shape} {known}"
    boxes = [", ".join(f"{at}-{at + length - 1}" for _, at, length in box) for box in placement.boxes[:_SHOWN_BOXES]]
    more = f" and {len(placement.boxes) - _SHOWN_BOXES} more" if len(placement.boxes) > _SHOWN_BOXES else ""
    return f"{' + '.join(boxes)}{more}{' (flat)' if placement.flat else ''} of {shape} {known}"


def _parse_box(box: Any, shape: tuple[int, ...]) -> Box:
    if not isinstance(box, list) or len(box) not in (len(shape), 1):
        raise ValueError(f"the box {short(box)} does not have the dimensions of {short(shape)}")
    sizes = shape if len(box) == len(shape) else (prod(shape),)
    spans = []
    for span, size in zip(box, sizes, strict=True):
        numbers = _numbers(span, "span")
        if len(numbers) != 3 or numbers[1] + numbers[2] > size:
            raise ValueError(f"the span {short(span)} does not lie in a dimension of {size}")
        spans.append((numbers[0], numbers[1], numbers[2]))
    return tuple(spans)


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        raise ValueError(f"{what} is {short(value)}, not a list of sizes")
    if not all(type(each) is int and 0 <= each < _LARGEST for each in value):
        raise ValueError(f"{what} is {short(value)}, and a size is a whole number, 0 or more")
    return tuple(value)
