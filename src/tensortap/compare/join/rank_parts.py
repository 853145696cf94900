"""Which ranks hold a part of each pair of a joined comparison, for the map of ranks and layers."""

from __future__ import annotations

import numpy as np

from tensortap.compare.join.joining import Joining
from tensortap.compare.matched import Matched
from tensortap.core.records import RankParts

__all__ = ["rank_parts"]


def rank_parts(joining: Joining, matched: Matched) -> RankParts | None:
    """Return the ranks of the candidate, or of the reference if the candidate has one; None if nothing was joined."""
    for name, side, rows in (
        ("candidate", matched.candidate, matched.alignment.candidate),
        ("reference", matched.reference, matched.alignment.reference),
    ):
        joined = joining.sides.get(name)
        if joined is None or len(joined.run.ranks) < 2 or side.run.source is not joined:
            continue
        layout = joined.layout
        codes = layout.plan[joined.groups[side.row[rows]]]
        first = dict(zip(layout.plan[::-1].tolist(), range(len(layout) - 1, -1, -1), strict=True))
        used, places = np.unique(codes, return_inverse=True)
        ranks = [tuple(sorted(set(layout.pieces.rank[layout.members(first[plan])].tolist()))) for plan in used.tolist()]
        holders = list(dict.fromkeys(ranks))
        number = np.array([holders.index(each) for each in ranks], np.int64)
        meshes = {rank: joined.run.mesh(rank) for rank in joined.run.ranks}
        known = [mesh for mesh in meshes.values() if mesh is not None]
        axes = known[0].names if len(known) == len(meshes) and len({mesh.names for mesh in known}) == 1 else ()
        return RankParts(
            name,
            axes,
            {rank: mesh.coordinates if mesh is not None and axes else () for rank, mesh in meshes.items()},
            holders,
            number[places] if len(places) else places,
        )
    return None
