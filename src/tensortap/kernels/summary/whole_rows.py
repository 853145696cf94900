"""Four whole rows at a time, moments and sketch in one pass: the usual case.

The signs of a slot come from one hash for four rows, so these rows share the sums of the sketch that a pass loads and
stores. The pass goes through the slots; the rows are in the first-level cache after their digest.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tensortap.kernels.jit import compiled
from tensortap.kernels.summary.elements import ROW
from tensortap.kernels.summary.moments import add_sums, sums_are_exact
from tensortap.kernels.vectors import call_intrinsic, choose, flip_signs, numbers_and_bits, prefetch, reduced

__all__ = ["BLOCK", "add_block"]

BLOCK = 4
"""Rows whose signs come from one hash."""
_SLOTS, _GROUP = 128, 8
_LINE = 64
"""Bytes of a line of the cache."""
_I8, _I32, _I64, _DOUBLE = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.DoubleType()


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def _pass(typing: Any, like: Any, values: Any, sums: Any, added: Any, signs: Any, moved: Any, ahead: Any) -> Any:
    """Write `sums` plus the signed rows to `added`, and return the sums of `moments` for these rows.

    All but `moved` are addresses. The extremes are undefined if an element is NaN. Meanwhile the memory from `ahead` on
    is fetched, because arithmetic takes longer than memory, and the digest of the next rows would wait for it.
    """
    numbers, bits = numbers_and_bits(like)
    wide, counts = ir.VectorType(_DOUBLE, _GROUP), ir.VectorType(_I32, _GROUP)
    size = like.dtype.bitwidth

    def at(builder: Any, address: Any, kind: Any) -> Any:
        return builder.inttoptr(address, kind.as_pointer())

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, values, sums, added, signs, moved, ahead = args

        def load(address: Any) -> Any:
            return builder.load(at(builder, address, numbers), align=size // 8)

        zero = ir.Constant(numbers, [0.0] * _GROUP)
        start = [ir.Constant(wide, [0.0] * _GROUP)] * 3 + [ir.Constant(counts, [0] * _GROUP)] + [load(values)] * 2
        found = total, square, magnitude, zeros, low, high = [
            cgutils.alloca_once_value(builder, each) for each in start
        ]
        with cgutils.for_range(builder, _I64(_SLOTS), intp=_I64) as loop:
            slot = loop.index
            place = builder.mul(slot, _I64(size))
            for line in range(0, BLOCK * size // 8 * _GROUP, _LINE):
                prefetch(builder, builder.add(ahead, builder.add(builder.mul(place, _I64(BLOCK)), _I64(line))))
            sketch = load(builder.add(sums, place))
            for row in range(BLOCK):
                group = builder.xor(slot, builder.extract_value(moved, row))
                x = load(builder.add(values, builder.mul(builder.add(group, _I64(row * _SLOTS)), _I64(size))))
                real = x if x.type == wide else builder.fpext(x, wide)
                builder.store(builder.fadd(builder.load(total), real), total)
                builder.store(call_intrinsic(builder, "llvm.fmuladd", real, real, builder.load(square)), square)
                absolute = call_intrinsic(builder, "llvm.fabs", real)
                builder.store(builder.fadd(builder.load(magnitude), absolute), magnitude)
                is_zero = builder.zext(builder.fcmp_ordered("==", x, zero), counts)
                builder.store(builder.add(builder.load(zeros), is_zero), zeros)
                builder.store(choose(builder, "llvm.minnum", builder.load(low), x), low)
                builder.store(choose(builder, "llvm.maxnum", builder.load(high), x), high)
                sign = builder.load(at(builder, builder.add(signs, builder.add(slot, _I64(row * _SLOTS))), _I8))
                signed = builder.bitcast(flip_signs(builder, builder.bitcast(x, bits), sign), numbers)
                sketch = builder.fadd(sketch, signed)
            builder.store(sketch, at(builder, builder.add(added, place), numbers), align=size // 8)
        names = ("fadd", "fadd", "fadd", "add", "fmin", "fmax")
        results = [reduced(builder, name, builder.load(each)) for name, each in zip(names, found, strict=True)]
        results[3] = builder.zext(results[3], _I64)
        results[4:] = [each if each.type == _DOUBLE else builder.fpext(each, _DOUBLE) for each in results[4:]]
        return context.make_tuple(builder, signature.return_type, results)

    address, real = types.intp, types.float64
    found = types.Tuple((real, real, real, types.int64, real, real))
    return found(like, address, address, address, address, types.UniTuple(address, BLOCK), address), generate


@compiled()
def add_block(
    like: Any,
    values: int,
    sums: int,
    added: int,
    signs: int,
    moved: Any,
    ahead: int,
    edge: float,
    large: float,
    out: Any,
) -> bool:
    """Add a block of rows to `out`, and write the sums of the sketch with it to `added`; return whether it can.

    It can not if an element is beyond `large` or not ordinary, or if the variance would lose digits. Then `out` stays
    as it is, and `added` means nothing. `signs` is the address of a byte for each row and slot, and `ahead` that of
    what is read next.
    """
    found = _pass(like, values, sums, added, signs, moved, ahead)
    if not found[2] < edge:  # true for NaN, too
        return False
    if found[4] < -large or found[5] > large or not sums_are_exact(found, BLOCK * ROW):
        return False
    add_sums(out, BLOCK * ROW, found)
    return True
