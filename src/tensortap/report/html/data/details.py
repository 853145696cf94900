"""A detail as the page's scripts read it. docs/report-data.md describes the fields."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tensortap.core import statistics
from tensortap.core.details import Detail, Histogram, TensorFacts, TileMap
from tensortap.report.html.data.blocks import DataBlock, json_block
from tensortap.report.wording import clean, shape

__all__ = ["detail_object", "fitting", "map_object"]

_ROOM = 300_000  # bytes of all detail documents in a page, compressed; a third more in the file
_LEVELS = 253
_DIGITS = 6


def detail_object(detail: Detail, row: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Return the document of a detail. `row` is the table's row of the first of its rows."""
    difference = detail.difference
    pair = difference is not None or detail.candidate is not None
    return {
        "row": detail.row,
        "title": clean(title),
        "source": "tensors" if detail.whole else "summaries",
        "why": clean(detail.why) or None,
        "status": row["status"],
        "birth": bool(row["birth"]),
        "container": row.get("container"),
        "tolerance": row.get("tolerance"),
        "row_tolerance": row.get("row_tolerance"),
        "rule": row.get("rule"),
        "sides": {
            "reference": _facts(detail.reference),
            "candidate": None if detail.candidate is None else _facts(detail.candidate),
        },
        "difference": _difference(detail) if pair else None,
        "needed": _needed(detail, row["status"]),
        "histogram": None if detail.histogram is None else _histogram(detail.histogram),
        "ulps": None
        if detail.ulps is None
        else {"edges": detail.ulps.edges.tolist(), "counts": detail.ulps.counts.tolist()},
        "map": None if detail.map is None else map_object(detail.map),
        "worst": None
        if detail.worst is None
        else [
            {
                "index": list(each.index),
                "reference": each.reference,
                "candidate": each.candidate,
                "difference": each.difference,
                "ulp": each.ulp,
            }
            for each in detail.worst
        ],
        "sketch": _sketch(detail),
    }


def fitting(details: Iterable[tuple[Detail, dict[str, Any]]]) -> list[tuple[Detail, DataBlock]]:
    """Return as many documents as fit into a page, as blocks; the most important come first."""
    found: list[tuple[Detail, DataBlock]] = []
    room = _ROOM
    for detail, document in details:
        block = json_block(f"detail-{detail.row}", document)
        room -= len(block.data)
        if room < 0:
            break
        found.append((detail, block))
    return found


def map_object(found: TileMap) -> dict[str, Any]:
    """Return tiles as bytes: 0 is no difference, 255 infinite, the rest a logarithmic scale from `low` to `high`."""
    tiles = found.tiles
    some = tiles[(tiles > 0) & np.isfinite(tiles)]
    low, high = (float(some.min()), float(some.max())) if some.size else (0.0, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        place = np.log(tiles / low) / math.log(high / low) if high > low else np.zeros_like(tiles)
        codes = np.where(np.isinf(tiles), 255, np.where(tiles > 0, 1 + np.rint(np.clip(place, 0, 1) * _LEVELS), 0))
    return {
        "height": tiles.shape[0],
        "width": tiles.shape[1],
        "low": low,
        "high": high,
        "codes": base64.b64encode(codes.astype(np.uint8).tobytes()).decode(),
        "whole": list(found.whole),
        "window": list(found.window),
        "folded": found.folded,
    }


def _facts(facts: TensorFacts) -> dict[str, Any]:
    values = {each.name: facts[each.name] for each in statistics.stored()}
    return {"dtype": facts.dtype, **values, "shape": shape(facts.shape), "digest": f"{facts.digest:016x}"}


def _difference(detail: Detail) -> dict[str, Any] | None:
    found = detail.difference
    if found is None:
        return None
    rtol, atol = detail.tolerances or (None, None)
    names = ("equal", "exact", "rel_l2", "rel_l2_bar", "cosine", "l2")
    values = {name: getattr(found, name) for name in names}
    unknown = math.isnan(found.cosine) and not found.exact  # sketches too coarse for it: not measured, instead of NaN
    values["one_minus_cosine"] = None if unknown else 1 - found.cosine
    for name in ("max_abs", "reference_value", "candidate_value", "max_ulp", "mismatched", "row_rel_l2"):
        values[name] = getattr(found, name) if found.exact else None
    for name in ("max_abs_index", "row_index"):
        index = getattr(found, name)
        values[name] = None if index is None else list(index)
    return {**values, "rtol": rtol, "atol": atol}


def _needed(detail: Detail, status: str) -> dict[str, Any] | None:
    if detail.judged is None:
        return None
    needed = detail.needed
    return {
        "rel_l2": math.inf if status == "nonfinite" else detail.judged,
        "atol": None if needed is None else needed.atol,
        "rtol": None if needed is None else needed.rtol,
        "atol_with_rtol": None if needed is None else needed.atol_with_rtol,
    }


def _histogram(found: Histogram) -> dict[str, Any]:
    return {
        "scale": "linear" if found.threshold is None else "symlog",
        "threshold": found.threshold,
        "edges": [float(f"{edge:.{_DIGITS}g}") for edge in found.edges.tolist()],
        "reference": found.reference.tolist(),
        "candidate": None if found.candidate is None else found.candidate.tolist(),
    }


def _sketch(detail: Detail) -> dict[str, float] | None:
    found = detail.difference
    if found is None or found.exact or math.isnan(found.rel_l2):
        return None
    bounded = math.isinf(found.rel_l2_bar)  # only norms are known: a lower bound
    return {
        "rel_l2": found.rel_l2,
        "low": found.rel_l2 if bounded else max(0.0, found.rel_l2 - found.rel_l2_bar),
        "high": found.rel_l2 + found.rel_l2_bar,
    }
