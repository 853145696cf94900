"""The few operations that numba has no words for, written in LLVM's own terms."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["add_signed", "greater", "lesser", "never_inlined", "pointer", "take"]

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def pointer(typing: Any, address: Any) -> Any:
    """What `carray` takes, from an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def never_inlined(typing: Any) -> Any:
    """Said within a compiled function: callers keep the code that they would have without it. A hot loop may run 10 %
    slower for what stands around it, even if that is hardly ever reached."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def take(typing: Any, counter: Any) -> Any:
    """The value of the int64 at that address, and one more left behind for the next thread."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counted = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", counted, ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_signed(typing: Any, like: Any, sums: Any, values: Any, signs: Any) -> Any:
    """Eight sums += eight values, number j of them negated where bit j of `signs` is set.

    Sums and values are addresses of numbers of the array `like`'s type. numba cannot tell LLVM that the two do not
    overlap, so its own loops over them would stay scalar.
    """
    real, bits = (ir.FloatType(), 32) if like.dtype == types.float32 else (ir.DoubleType(), 64)
    numbers, whole, aligned = ir.VectorType(real, 8), ir.VectorType(ir.IntType(bits), 8), bits // 8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = builder.inttoptr(args[1], numbers.as_pointer())
        value = builder.load(builder.inttoptr(args[2], whole.as_pointer()), align=aligned)
        one = args[3] if bits == 32 else builder.zext(args[3], _I64)
        first = builder.insert_element(ir.Constant(whole, ir.Undefined), one, ir.Constant(_I32, 0))
        spread = builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, 8), [0] * 8))
        moved = builder.shl(spread, ir.Constant(whole, [bits - 1 - j for j in range(8)]))
        minus = builder.and_(moved, ir.Constant(whole, [1 << (bits - 1)] * 8))
        signed = builder.bitcast(builder.xor(value, minus), numbers)
        builder.store(builder.fadd(builder.load(into, align=aligned), signed), into, align=aligned)
        return context.get_dummy_value()

    return types.void(like, types.intp, types.intp, types.uint32), generate


def _choice(name: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def choose(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            real = args[0].type
            function = builder.module.declare_intrinsic(name, [real], ir.FunctionType(real, [real, real]))
            return builder.call(function, args, fastmath=("nnan", "nsz"))

        return a(a, a), generate

    return choose


# Of two numbers that are not NaN. The builtins look out for NaN, and LLVM makes no vectors of that.
lesser = _choice("llvm.minnum")
greater = _choice("llvm.maxnum")
