"""The notation of parallel layouts: how a local tensor sits in the whole, and which names modules have in it.

    "layers.*.qkv.weight" = "(g=8: q*2 k v)[tp] h -> q|k|v"   8 groups of heads, dealt to tp; the whole has q, k, v
    "layers.*.fc1.weight" = "(gate|up)[tp] h"                 two parts behind each other, each divided by tp
    "embed.weight"        = "v[tp]%96 h"                      divided by tp; rows from 96 on are padding
    "layers.*:output"     = "s[cp:zigzag] b[dp] h"            sequence in zigzag order, batch divided by dp
    "layers.*.mlp:output" = "s b h[tp:partial]"               a sum over tp is due
    "norm.weight:param_grad" = "h[tp:partial]"                one kind of record alone

A text has a term for each local dimension: a name, then brackets with the mesh axes that divide it, the outermost
first. An axis may have a mode: block (default), zigzag, strided, partial (partial:mean, ...), replica. Axes that are
not mentioned are replicas. `->` gives another order of dimensions or parts in the whole. `name=8` is a size in
the whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tensortap.core.placement import PARTIAL, REPLICA, SHARD, Mesh, Placement
from tensortap.core.positions import MODES, Division, Positions, divide, from_positions

__all__ = ["DimensionTerm", "TensorLayoutText", "parse_layout"]

_TERM = re.compile(r"(?P<name>[A-Za-z_]\w*(=\d+)?|\((?P<group>[^()]*)\))?(\[(?P<axes>[^\[\]]*)\])?(%(?P<limit>\d+))?")
_NAME = re.compile(r"(?P<name>[A-Za-z_]\w*)(=(?P<size>\d+))?(\*(?P<times>\d+))?(\[(?P<axes>[^\[\]]*)\])?")
_SOURCE = "layout"


@dataclass(frozen=True)
class _Axis:
    name: str
    role: str
    mode: str = "block"


@dataclass(frozen=True)
class _Unit:
    """A name in parentheses: with a size, a multiplicity, and axes of its own."""

    name: str
    size: int = 0
    times: int = 1
    axes: tuple[_Axis, ...] = ()


@dataclass(frozen=True)
class DimensionTerm:
    """One dimension of a local tensor."""

    name: str
    axes: tuple[_Axis, ...] = ()
    limit: int = 0
    """Size of the whole without padding; 0 if nothing is padded."""
    parts: tuple[_Unit, ...] = ()
    """(a|b): parts behind each other, each divided by the axes."""
    groups: _Unit | None = None
    """(g: a b): groups with these parts, divided by the axes."""
    factors: tuple[_Unit, ...] = ()
    """(a b): several dimensions joined in one."""
    order: tuple[str, ...] = ()
    """Order of the parts in the whole."""

    def place(self, local: int, mesh: Mesh, micro: int) -> tuple[int, Positions | None]:
        """Return the size in the whole and the positions. Raise ValueError if the local size does not fit."""
        if self.parts:
            return self._place_parts(local, mesh, micro)
        if self.factors:
            return self._place_factors(local, mesh, micro)
        divisions = _divisions(self.axes, mesh, micro)
        if not divisions and not self.limit:
            return local, None
        size, positions = divide(local, divisions)
        if self.limit:
            if not 0 < self.limit <= size:
                raise ValueError(f"{self.limit} elements without padding do not fit in {size}")
            size, positions = self.limit, np.where(positions < self.limit, positions, -1)
        return size, positions

    def place_in(self, shape: tuple[int, ...], at: int, mesh: Mesh, micro: int) -> tuple[int, Positions | None]:
        """Return the same as `place`, for a dimension of a tensor that an error names."""
        try:
            return self.place(shape[at], mesh, micro)
        except ValueError as error:
            raise ValueError(f"dimension {self.name} of the shape {shape}: {error}") from error

    def _place_parts(self, local: int, mesh: Mesh, micro: int) -> tuple[int, Positions | None]:
        divisions = _divisions(self.axes, mesh, micro)
        units = sum(part.times for part in self.parts)
        groups = 1
        if self.groups is not None:
            groups, positions = self.groups.size, np.arange(self.groups.size)
            for division in divisions:
                positions = division.take(positions)
            own = positions
        else:
            own = np.zeros(1, np.int64)
        if not own.size or local % (units * own.size):
            raise ValueError(f"{local} cannot be divided into {own.size} x {units} equal parts")
        unit = local // (units * own.size)
        if self.groups is not None:
            return self._deal_groups(own, unit, groups)
        whole, found, begin = 0, [], 0
        for part in self.parts:
            size, positions = divide(part.times * unit, divisions)
            found.append(positions + whole)
            whole += size
            begin += part.times * unit
        return whole, np.concatenate(found)

    def _deal_groups(self, own: Positions, unit: int, groups: int) -> tuple[int, Positions]:
        """Return positions of groups: part after part in `order`, in each of them group after group."""
        starts, at = {}, 0
        for name in self.order or tuple(part.name for part in self.parts):
            times = next(part.times for part in self.parts if part.name == name)
            starts[name] = at
            at += groups * times * unit
        found = []
        for group in own.tolist():
            if not self.order:  # the whole is in groups as well
                size = unit * sum(part.times for part in self.parts)
                found.append(np.arange(group * size, (group + 1) * size))
                continue
            for part in self.parts:
                size = part.times * unit
                found.append(starts[part.name] + group * size + np.arange(size))
        return at, np.concatenate(found)

    def _place_factors(self, local: int, mesh: Mesh, micro: int) -> tuple[int, Positions]:
        counts = [_count(_divisions(factor.axes, mesh, micro)) for factor in self.factors]
        known = [factor.size // count if factor.size else 0 for factor, count in zip(self.factors, counts, strict=True)]
        for factor, count in zip(self.factors, counts, strict=True):
            if factor.size % count:
                raise ValueError(f"{factor.name}={factor.size} cannot be divided by {count}")
        given = int(np.prod([size for size in known if size], dtype=np.int64))
        if 0 in known:
            if local % given:
                raise ValueError(f"{local} is not a multiple of {given}")
            known[known.index(0)] = local // given
        if int(np.prod(known, dtype=np.int64)) != local:
            raise ValueError(f"{' x '.join(map(str, known))} is not {local}")
        whole, positions = 1, np.zeros(1, np.int64)
        for factor, size in zip(self.factors, known, strict=True):
            full, own = divide(size, _divisions(factor.axes, mesh, micro))
            positions = (positions[:, None] * full + own).reshape(-1)
            whole *= full
        return whole, positions


@dataclass(frozen=True)
class TensorLayoutText:
    """The layout of the tensors that one pattern selects."""

    text: str
    terms: tuple[DimensionTerm, ...]
    more: tuple[_Axis, ...] = ()
    """Axes that belong to no dimension: partial sums of a number."""
    order: tuple[int, ...] = field(default=())

    @property
    def axes(self) -> tuple[_Axis, ...]:
        """All axes that the text mentions."""
        own = [axis for term in self.terms for axis in (*term.axes, *(a for f in term.factors for a in f.axes))]
        return (*own, *self.more)

    def place(self, shape: Sequence[int], mesh: Mesh, micro: int = 0, without: Sequence[str] = ()) -> Placement:
        """Return the placement of a local tensor. Raise ValueError if its shape is not that of the layout.

        `without` are axes along which other processes have other modules.
        """
        if len(shape) != len(self.terms):
            raise ValueError(f"it has {len(self.terms)} dimensions, and the tensor has shape {tuple(shape)}")
        found = [term.place_in(tuple(shape), at, mesh, micro) for at, term in enumerate(self.terms)]
        roles = {name: REPLICA for name in mesh.names if name not in without and mesh.size(name) > 1}
        roles |= {axis.name: axis.role for axis in self.axes}
        order = self.order
        if order:
            found = [found[at] for at in order]
        whole = [size for size, _ in found]
        return from_positions(whole, [positions for _, positions in found], roles, _SOURCE, order)


def parse_layout(text: str, axes: Sequence[str]) -> TensorLayoutText:
    """Return the layout of a text. `axes` are the names of the mesh. Raise ValueError if it is not one.

    >>> parse_layout("s[cp:zigzag] b h", ["cp"]).place((4, 3, 8), Mesh(("cp",), (2,), (0,))).shape
    (8, 3, 8)
    """
    local, arrow, whole = text.partition("->")
    terms: list[DimensionTerm] = []
    more: list[_Axis] = []
    for word in _words(local):
        match = _TERM.fullmatch(word)
        if match is None or not word:
            raise ValueError(
                f"{word!r} is not a dimension: write a name, then its axes in brackets, as in s[cp:zigzag]"
            )
        found = _axes(match["axes"], axes)
        if match["name"] is None:
            if any(axis.role == SHARD for axis in found):
                raise ValueError(f"{word!r} divides nothing: put the name of the dimension before the bracket")
            more += found
            continue
        terms.append(_term(match, found, axes))
    if arrow:
        terms, order = _ordered(terms, whole.strip())
    else:
        order = ()
    return TensorLayoutText(text, tuple(terms), tuple(more), order)


def _term(match: re.Match[str], found: tuple[_Axis, ...], axes: Sequence[str]) -> DimensionTerm:
    limit = int(match["limit"] or 0)
    inside = match["group"]
    if inside is None:
        return DimensionTerm(match["name"].partition("=")[0], found, limit)
    name = f"({inside})"
    if ":" in re.sub(r"\[[^\]]*\]", "", inside):
        head, _, rest = inside.partition(":")
        group = _unit(head.strip(), axes)
        if not group.size:
            raise ValueError(f"{name} does not say how many groups the whole has: write ({group.name}=8:{rest})")
        return DimensionTerm(name, found, limit, tuple(_unit(each, axes) for each in rest.split()), group)
    if "|" in inside:
        return DimensionTerm(name, found, limit, tuple(_unit(each.strip(), axes) for each in inside.split("|")))
    factors = tuple(_unit(each, axes) for each in inside.split())
    if found:
        raise ValueError(f"{name} joins dimensions: write the axes inside, as in (b s[cp])")
    if sum(not factor.size for factor in factors) > 1:
        raise ValueError(f"{name} leaves two sizes open: give all but one, as in (b=4 s)")
    return DimensionTerm(name, (), limit, factors=factors)


def _unit(text: str, axes: Sequence[str]) -> _Unit:
    match = _NAME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a name with an optional size, as in q*2 or b=4")
    return _Unit(match["name"], int(match["size"] or 0), int(match["times"] or 1), _axes(match["axes"], axes))


def _axes(text: str | None, known: Sequence[str]) -> tuple[_Axis, ...]:
    found = []
    for each in (text or "").split(",") if text else ():
        name, _, mode = each.strip().partition(":")
        if name not in known:
            raise ValueError(
                f"{name!r} is not an axis of the mesh, which has {', '.join(known) or 'none'}: "
                "give its size in [mesh], or correct the name"
            )
        if mode.partition(":")[0] == "partial":
            found.append(_Axis(name, PARTIAL + (mode.partition(":")[2] or "sum")))
        elif mode == REPLICA:
            found.append(_Axis(name, REPLICA))
        elif (mode or "block") in MODES:
            found.append(_Axis(name, SHARD, mode or "block"))
        else:
            raise ValueError(f"{mode!r} is not a mode of an axis: known are {', '.join(MODES)}, partial and replica")
    return tuple(found)


def _ordered(terms: list[DimensionTerm], whole: str) -> tuple[list[DimensionTerm], tuple[int, ...]]:
    if "|" in whole:
        names = tuple(name.strip() for name in whole.split("|"))
        for at, term in enumerate(terms):
            if term.parts and sorted(part.name for part in term.parts) == sorted(names):
                terms[at] = DimensionTerm(term.name, term.axes, term.limit, term.parts, term.groups, (), names)
                return terms, ()
        raise ValueError(f"-> {whole}: no dimension has exactly these parts")
    names = tuple(whole.split())
    own = [term.name for term in terms]
    if sorted(names) != sorted(own):
        raise ValueError(f"-> {whole}: the dimensions are {' '.join(own)}; give all of them in another order")
    return terms, tuple(own.index(name) for name in names)


def _words(text: str) -> list[str]:
    """Return the terms: spaces inside of parentheses and brackets do not separate."""
    return re.findall(r"(?:\([^()]*\)|\[[^\[\]]*\]|[^\s()\[\]])+|[()\[\]]", text)


def _divisions(axes: Sequence[_Axis], mesh: Mesh, micro: int) -> list[Division]:
    return [
        Division(mesh.size(axis.name), micro if axis.name == "micro" else mesh.coordinate(axis.name), axis.mode)
        for axis in axes
        if axis.role == SHARD
    ]


def _count(divisions: Sequence[Division]) -> int:
    return int(np.prod([division.count for division in divisions], dtype=np.int64))
