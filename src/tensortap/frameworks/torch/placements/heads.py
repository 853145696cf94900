"""Plain tensors by heads, which attention computes from a projection that is divided among processes."""

from __future__ import annotations

from tensortap.core.placement import GUESS, SHARD, Placement

__all__ = ["part_by_heads"]


def part_by_heads(near: Placement, shape: tuple[int, ...]) -> Placement | None:
    """Return the placement of a tensor with one dimension more than the shard it was computed from; None if unclear.

    A projection (batch, tokens, features) that is divided by features becomes (batch, heads, tokens, size of a head),
    and then, as weights of attention, (batch, heads, tokens, tokens). One or two dimensions, those that are neither the
    batch nor tokens, are factors of the features. The first of these is divided as the features are.

    >>> features = Placement((4, 8, 16), (((0, 0, 4), (0, 0, 8), (0, 8, 8)),), {"tp": "shard"})
    >>> part_by_heads(features, (4, 2, 8, 8)).shape
    (4, 4, 8, 8)
    """
    if len(near.boxes) != 1 or near.flat or near.order or len(shape) != len(near.shape) + 1:
        return None
    *others, (_, offset, length) = near.boxes[0]
    whole = near.shape[-1]
    if length == whole or not length or any(n != size for (_, _, n), size in zip(others, near.shape, strict=False)):
        return None
    tokens = set(near.shape[1:-1])
    factors = [at for at, size in enumerate(shape) if not (size == near.shape[0] if at == 0 else size in tokens)]
    if not factors or len(factors) > 2 or 0 in (shape[at] for at in factors):
        return None
    along = factors[0]
    heads = shape[along]
    if len(factors) == 2 and heads * shape[factors[1]] != length:
        return None
    if length % heads or whole * heads % length or offset * heads % length:
        return None
    box = tuple((0, heads * offset // length if at == along else 0, size) for at, size in enumerate(shape))
    sizes = tuple(heads * whole // length if at == along else size for at, size in enumerate(shape))
    return Placement(sizes, (box,), dict.fromkeys(near.shards, SHARD), GUESS)
