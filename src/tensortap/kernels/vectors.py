"""Operations that numba cannot express, as LLVM instructions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["add_signed", "copy_bytes", "greater", "lesser", "never_inlined", "pointer", "spread", "take"]

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def pointer(typing: Any, address: Any) -> Any:
    """Return an address as the pointer that `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def never_inlined(typing: Any) -> Any:
    """Mark the compiled function that calls this as not to be inlined.

    A hot loop can run 10 % slower because of inlined code around it, even if that code is rarely reached.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def take(typing: Any, counter: Any) -> Any:
    """Return the int64 at an address and increment it atomically."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counted = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", counted, ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_signed(typing: Any, like: Any, sums: Any, values: Any, signs: Any) -> Any:
    """Add eight values to eight sums; value j is negated if bit j of `signs` is set.

    Sums and values are addresses of numbers of the dtype of `like`. numba cannot tell LLVM that the two do not
    overlap, so a loop in numba would stay scalar.
    """
    numbers, whole = _vectors(like)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[2], whole.as_pointer()), align=like.dtype.bitwidth // 8)
        _add_signed(builder, args[1], value, args[3], numbers, whole)
        return context.get_dummy_value()

    return types.void(like, types.intp, types.intp, types.uint32), generate


def _vectors(like: Any) -> tuple[Any, Any]:
    """Return the types of eight numbers, and of their bits."""
    real = ir.FloatType() if like.dtype == types.float32 else ir.DoubleType()
    return ir.VectorType(real, 8), ir.VectorType(ir.IntType(like.dtype.bitwidth), 8)


def spread(builder: Any, number: Any, whole: Any) -> Any:
    """Return a vector of type `whole` with one number in all places."""
    first = builder.insert_element(ir.Constant(whole, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, whole.count), [0] * whole.count))


def _add_signed(builder: Any, sums: Any, value: Any, signs: Any, numbers: Any, whole: Any) -> None:
    bits = whole.element.width
    into = builder.inttoptr(sums, numbers.as_pointer())
    signs = spread(builder, signs if bits == 32 else builder.zext(signs, _I64), whole)
    moved = builder.shl(signs, ir.Constant(whole, [bits - 1 - j for j in range(8)]))
    minus = builder.and_(moved, ir.Constant(whole, [1 << (bits - 1)] * 8))
    signed = builder.bitcast(builder.xor(value, minus), numbers)
    builder.store(builder.fadd(builder.load(into, align=bits // 8), signed), into, align=bits // 8)


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy bytes between addresses that do not overlap. A loop in numba would copy them one by one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _choice(name: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def choose(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            real = args[0].type
            function = builder.module.declare_intrinsic(name, [real], ir.FunctionType(real, [real, real]))
            return builder.call(function, args, fastmath=("nnan", "nsz"))

        return a(a, a), generate

    return choose


# For numbers that are not NaN. The builtins handle NaN, and LLVM does not vectorise that.
lesser = _choice("llvm.minnum")
greater = _choice("llvm.maxnum")
