"""The members of a joined record along one axis of the mesh: what each position of the axis holds of the whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tensortap.compare.join.geometry import Region, region_of
from tensortap.compare.join.layout import Layout
from tensortap.compare.join.merging import member_sketches
from tensortap.compare.join.source import JoinedSource
from tensortap.core.placement import Placement

__all__ = ["AxisMembers", "MemberReader", "shard_axes"]

Floats = npt.NDArray[np.float64]


class AxisMembers:
    """The sketch of the whole as each position along an axis has it."""

    def __init__(self, axis: str, ranks: tuple[int, ...], sketches: Floats) -> None:
        self.axis = axis
        self.ranks = ranks
        self.sketches = sketches

    def __len__(self) -> int:
        return len(self.sketches)


class MemberReader:
    """Reads the sketches of members, those of many records at a time."""

    def __init__(self, joined: JoinedSource) -> None:
        self.joined = joined
        self._known: dict[int, Floats] = {}

    def prepare(self, groups: list[int]) -> None:
        """Read the sketches of all members of these groups at once."""
        layout = self.joined.layout
        rows = [row for group in groups for row in layout.members(group).tolist() if row not in self._known]
        if not rows:
            return
        found = member_sketches(self.joined.run, layout.pieces, np.array(rows, np.int64))
        self._known |= dict(zip(rows, found, strict=True))

    def along_axes(self, group: int) -> Iterator[AxisMembers]:
        """Yield the members along each axis on which the record is a replica or a summand, by the mesh; without one,
        along all ranks."""
        layout = self.joined.layout
        self.prepare([group])
        roles = _roles(layout, group)
        for axis in roles:
            found = self._along(group, axis)
            if found is not None:
                yield found

    def _along(self, group: int, axis: str) -> AxisMembers | None:
        """Add up the parts at each position along an axis; replicas along other axes count once."""
        layout = self.joined.layout
        pieces, members = layout.pieces, layout.members(group).tolist()
        by_position: dict[int, dict[Region, int]] = {}
        for row in members:
            rank = int(pieces.rank[row])
            position = pieces.coordinate(rank, axis) if pieces.meshes else rank
            number = int(pieces.placement[row])
            region = region_of(pieces.placements[number])[1] if number >= 0 else ()
            by_position.setdefault(position, {}).setdefault(region, row)
        if len(by_position) < 2:
            return None
        sketches = [np.sum([self._known[row] for row in held.values()], axis=0) for held in by_position.values()]
        ranks = tuple(int(pieces.rank[row]) for held in by_position.values() for row in held.values())
        return AxisMembers(axis, ranks, np.array(sketches))


def _roles(layout: Layout, group: int) -> list[str]:
    pieces, members = layout.pieces, layout.members(group)
    numbers = [number for number in pieces.placement[members].tolist() if number >= 0]
    axes = [axis for number in numbers for axis, role in pieces.placements[number].axes.items() if role != "shard"]
    if not numbers:
        axes = [pieces.axis_between(tuple(pieces.rank[members].tolist())) or ""]
    return list(dict.fromkeys(axes))


def shard_axes(layout: Layout, group: int) -> dict[str, int]:
    """Return the axes along which the members of a record are shards, with the dimension that each one cuts."""
    pieces, members = layout.pieces, layout.members(group).tolist()
    placements = {row: pieces.placements[number] for row in members if (number := int(pieces.placement[row])) >= 0}
    axes = {axis for placement in placements.values() for axis in placement.shards if pieces.size(axis) > 1}
    found: dict[str, int] = {}
    for axis in sorted(axes):
        by_others: dict[tuple[int, ...], list[Placement]] = {}
        for row, placement in placements.items():
            mesh = pieces.meshes[int(pieces.rank[row])]
            others = tuple(at for name, at in zip(mesh.names, mesh.coordinates, strict=True) if name != axis)
            by_others.setdefault(others, []).append(placement)
        dimensions = [at for same in by_others.values() for at in _differing(same)]
        if dimensions:
            found[axis] = dimensions[0]
    return found


def _differing(placements: list[Placement]) -> list[int]:
    """Return the dimensions along which placements hold other indices."""
    if any(placement.flat for placement in placements):
        return []
    held = [[{span[1:] for span in spans} for spans in zip(*each.boxes, strict=True)] for each in placements]
    return [at for at in range(min(map(len, held))) if any(each[at] != held[0][at] for each in held)]
