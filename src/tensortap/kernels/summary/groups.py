"""The groups of a part of a tensor, as LLVM instructions: list them, then digest and sketch them in one pass.

Each group of eight elements of the whole has a slot, signs and a hash of its own. numba would handle these numbers one
by one: it cannot hold a vector in a variable.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tensortap.kernels.jit import compiled
from tensortap.kernels.vectors import never_inlined, spread

__all__ = ["BLOCK", "add_groups", "list_groups"]

BLOCK = 16
"""Entries of a plan that are written at once. Lists have room for this many more behind their last entry."""
_BYTE, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def list_groups(typing: Any, plan: Any, at: Any, first: Any, moved: Any, place: Any, signs: Any) -> Any:
    """Write BLOCK entries of a plan from entry `at` on: slots, signs, masks of whole groups, and places.

    `first` is the first group in its row of the whole, and `place` where it begins in the row of the part. `signs` has
    what `positions.sign_key` returns.
    """
    block, narrow = ir.VectorType(_I32, BLOCK), ir.VectorType(_BYTE, BLOCK)

    def mix(builder: Any, x: Any) -> Any:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed = builder.xor(x, builder.lshr(x, ir.Constant(block, [shift] * BLOCK)))
            x = builder.mul(mixed, ir.Constant(block, [factor] * BLOCK))
        return builder.xor(x, builder.lshr(x, ir.Constant(block, [16] * BLOCK)))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        plan, at, first, moved, place, signs = args
        low, key, shift = (spread(builder, builder.extract_value(signs, each), block) for each in range(3))
        first, moved, place = (spread(builder, builder.trunc(each, _I32), block) for each in (first, moved, place))
        order = ir.Constant(block, list(range(BLOCK)))
        slot = builder.xor(builder.add(first, order), moved)
        sign = builder.lshr(mix(builder, builder.xor(builder.add(low, slot), key)), shift)
        places = builder.add(place, ir.Constant(block, [8 * i for i in range(BLOCK)]))
        values = builder.trunc(slot, narrow), builder.trunc(sign, narrow), ir.Constant(narrow, [255] * BLOCK)
        for index, value in enumerate((*values, builder.trunc(places, ir.VectorType(_I16, BLOCK))), start=1):
            size = value.type.element.width // 8
            into = builder.add(builder.extract_value(plan, index), builder.mul(at, _I64(size)))
            builder.store(value, builder.inttoptr(into, value.type.as_pointer()), align=size)
        return context.get_dummy_value()

    given = (types.UniTuple(types.intp, 5), types.intp, types.intp, types.intp, types.intp)
    return types.void(*given, types.UniTuple(types.uint32, 3)), generate


def _loop(itemsize: int, cut: bool) -> Any:
    """Return the loop over groups of elements of `itemsize` bytes; with `cut`, over parts of groups, too."""
    words = 2 * itemsize

    @intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
    def add(typing: Any, like: Any, raw: Any, values: Any, weights: Any, sums: Any, plan: Any, count: Any) -> Any:
        real, bits = (ir.FloatType(), 32) if like.dtype == types.float32 else (ir.DoubleType(), 64)
        numbers, whole = ir.VectorType(real, 8), ir.VectorType(ir.IntType(bits), 8)
        elements = ir.VectorType(ir.IntType(8 * itemsize), 8)
        narrow, wide = ir.VectorType(_I32, words), ir.VectorType(_I64, words)

        def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
            return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)

        def entry(builder: Any, base: Any, index: Any, kind: Any) -> Any:
            size = kind.width // 8
            return load(builder, builder.add(base, builder.mul(index, ir.Constant(_I64, size))), kind, size)

        def lanes(builder: Any, byte: Any) -> Any:
            return builder.bitcast(byte, ir.VectorType(ir.IntType(1), 8))

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, raw, values, weights, sums, plan, count = args
            hashes, slots, signs, masks, places = (builder.extract_value(plan, at) for at in range(5))
            total = cgutils.alloca_once_value(builder, ir.Constant(wide, [0] * words))
            with cgutils.for_range(builder, count, intp=_I64) as loop:
                at = loop.index
                slot = builder.zext(entry(builder, slots, at, _BYTE), _I64)
                place = builder.sext(entry(builder, places, at, _I16), _I64) if cut else builder.shl(at, _I64(3))
                source = builder.add(raw, builder.mul(place, _I64(itemsize)))
                group = load(builder, source, elements, itemsize)
                number = load(builder, builder.add(values, builder.mul(place, _I64(bits // 8))), whole, bits // 8)
                if cut:
                    mask = lanes(builder, entry(builder, masks, at, _BYTE))
                    group = builder.select(mask, group, ir.Constant(elements, [0] * 8))
                    number = builder.select(mask, number, ir.Constant(whole, [0] * 8))
                column = builder.and_(builder.shl(slot, _I64(1 + words.bit_length())), _I64(1023))
                weight = load(builder, builder.add(weights, column), narrow, 4)
                product = builder.mul(builder.zext(builder.bitcast(group, narrow), wide), builder.zext(weight, wide))
                factor = spread(builder, builder.zext(entry(builder, hashes, at, _I32), _I64), wide)
                builder.store(builder.add(builder.load(total), builder.mul(product, factor)), total)
                minus = builder.select(
                    lanes(builder, entry(builder, signs, at, _BYTE)),
                    ir.Constant(whole, [1 << (bits - 1)] * 8),
                    ir.Constant(whole, [0] * 8),
                )
                signed = builder.bitcast(builder.xor(number, minus), numbers)
                into = builder.inttoptr(builder.add(sums, builder.mul(slot, _I64(bits))), numbers.as_pointer())
                builder.store(builder.fadd(builder.load(into, align=bits // 8), signed), into, align=bits // 8)
            result = _I64(0)
            vector = builder.load(total)
            for lane in range(words):
                result = builder.add(result, builder.extract_element(vector, _I32(lane)))
            return result

        addresses = types.UniTuple(types.intp, 5)
        return types.uint64(like, types.intp, types.intp, types.intp, types.intp, addresses, types.intp), generate

    return add


_whole_1, _whole_2, _whole_4, _whole_8 = (_loop(itemsize, cut=False) for itemsize in (1, 2, 4, 8))
_cut_1, _cut_2, _cut_4, _cut_8 = (_loop(itemsize, cut=True) for itemsize in (1, 2, 4, 8))


@compiled()
def add_groups(
    itemsize: int, cut: bool, like: Any, raw: int, values: int, weights: int, sums: int, plan: Any, count: int
) -> Any:
    """Add `count` groups to the sums of the sketch, and return their digest.

    `raw` and `values` are a row of the part, and `plan` has the lists of `plans.plan_row`. Unless `cut`, the row is
    made of whole groups: its masks and places are not read. Else memory around the row is read, up to whole groups.
    """
    never_inlined()
    if cut:
        if itemsize == 4:
            return _cut_4(like, raw, values, weights, sums, plan, count)
        if itemsize == 2:
            return _cut_2(like, raw, values, weights, sums, plan, count)
        if itemsize == 1:
            return _cut_1(like, raw, values, weights, sums, plan, count)
        return _cut_8(like, raw, values, weights, sums, plan, count)
    if itemsize == 4:
        return _whole_4(like, raw, values, weights, sums, plan, count)
    if itemsize == 2:
        return _whole_2(like, raw, values, weights, sums, plan, count)
    if itemsize == 1:
        return _whole_1(like, raw, values, weights, sums, plan, count)
    return _whole_8(like, raw, values, weights, sums, plan, count)
