"""Operations that numba cannot express, as LLVM instructions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "add_signed",
    "call_intrinsic",
    "choose",
    "copy_bytes",
    "flip_signs",
    "greater",
    "lesser",
    "never_inlined",
    "numbers_and_bits",
    "pointer",
    "prefetch",
    "reduced",
    "spread",
    "take",
]

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


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
    numbers, bits = numbers_and_bits(like)
    align = like.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[2], bits.as_pointer()), align=align)
        into = builder.inttoptr(args[1], numbers.as_pointer())
        signed = builder.bitcast(flip_signs(builder, value, args[3]), numbers)
        builder.store(builder.fadd(builder.load(into, align=align), signed), into, align=align)
        return context.get_dummy_value()

    return types.void(like, types.intp, types.intp, types.uint8), generate


def numbers_and_bits(like: Any) -> tuple[Any, Any]:
    """Return the types of eight numbers, and of their bits."""
    real = ir.FloatType() if like.dtype == types.float32 else ir.DoubleType()
    return ir.VectorType(real, 8), ir.VectorType(ir.IntType(like.dtype.bitwidth), 8)


def spread(builder: Any, number: Any, whole: Any) -> Any:
    """Return a vector of type `whole` with one number in all places."""
    first = builder.insert_element(ir.Constant(whole, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, whole.count), [0] * whole.count))


def flip_signs(builder: Any, bits: Any, signs: Any) -> Any:
    """Return the bits of eight numbers; number j is negated if bit j of the byte `signs` is set."""
    kind = bits.type
    flipped = builder.bitcast(signs, ir.VectorType(ir.IntType(1), 8))
    minus = ir.Constant(kind, [1 << (kind.element.width - 1)] * 8)
    return builder.xor(bits, builder.select(flipped, minus, ir.Constant(kind, [0] * 8)))


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy bytes between addresses that do not overlap. A loop in numba would copy them one by one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def call_intrinsic(builder: Any, name: str, *given: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """Call a function of LLVM's that takes and returns values of one type, numbers or vectors of them."""
    kind = given[0].type
    lanes, element = (f"v{kind.count}", kind.element) if isinstance(kind, ir.VectorType) else ("", kind)
    function = ir.FunctionType(kind, [kind] * len(given))
    full_name = f"{name}.{lanes}{element.intrinsic_name}"
    declared = cgutils.get_or_insert_function(builder.module, function, full_name)
    return builder.call(declared, given, fastmath=fastmath)


def prefetch(builder: Any, address: Any) -> None:
    """Fetch the line of the cache at an address, which need not exist."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    declared = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    reads, into_all_levels, data = _I32(0), _I32(3), _I32(1)
    builder.call(declared, [builder.inttoptr(address, _I8.as_pointer()), reads, into_all_levels, data])


def reduced(builder: Any, name: str, vector: Any) -> Any:
    """Return the sum (`fadd`, `add`) or an extreme (`fmin`, `fmax`) of the elements of a vector, in any order."""
    element = vector.type.element
    given = [ir.Constant(element, 0.0), vector] if name == "fadd" else [vector]
    function = ir.FunctionType(element, [each.type for each in given])
    full_name = f"llvm.vector.reduce.{name}.v{vector.type.count}{element.intrinsic_name}"
    declared = cgutils.get_or_insert_function(builder.module, function, full_name)
    return builder.call(declared, given, fastmath=() if name == "add" else ("reassoc", "nsz"))


def choose(builder: Any, name: str, a: Any, b: Any) -> Any:
    """Return the lesser or greater of two numbers or vectors that are not NaN."""
    return call_intrinsic(builder, name, a, b, fastmath=("nnan", "nsz"))


def _choice(name: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def chosen(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return choose(builder, name, *args)

        return a(a, a), generate

    return chosen


# The builtins handle NaN, and LLVM does not vectorise that.
lesser = _choice("llvm.minnum")
greater = _choice("llvm.maxnum")
