"""Sixteen float32 lanes as a Numba value, so that kernels vectorize by construction.

Numba's own vectorizer decides anew for every loop and every processor. Here a kernel states its vectors: each
operation becomes one LLVM operation on ``<16 x float>``, which LLVM maps to whatever registers the processor has.
Nothing is reassociated and multiply-adds are fused only where the code says `fma`, so every processor computes the
same bits.

`Vec` is the type of sixteen floats, `Mask` that of sixteen truth values. Vectors support ``+ - *`` with each other
and with float32 scalars; everything else is a function of this module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic as _numba_intrinsic
from numba.extending import models, overload, register_model

LANES = 16

intrinsic: Any = _numba_intrinsic  # called without the first argument, which type checkers cannot know

_F32 = ir.FloatType()
_I1 = ir.IntType(1)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_V_F32 = ir.VectorType(_F32, LANES)
_V_I32 = ir.VectorType(_I32, LANES)
_V_I1 = ir.VectorType(_I1, LANES)

# Adding 1.5 * 2**23 to a float32 of magnitude below 2**22 leaves its nearest integer in the low mantissa bits.
_ROUND_MAGIC = 12582912.0
# Minimax polynomial of 2**f on [-0.5, 0.5] with p(0) = 1, relative error 9e-8 (about one unit in the last place).
_EXP2 = (0.0013254602433599855, 0.00967199918070692, 0.055507793245502514, 0.2402223190706028, 0.6931469302343777)


class VecType(types.Type):
    """Numba type of sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="odin.Vec")


class MaskType(types.Type):
    """Numba type of sixteen truth values."""

    def __init__(self) -> None:
        super().__init__(name="odin.Mask")


Vec = VecType()
Mask = MaskType()


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _V_F32)


@register_model(MaskType)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _V_I1)


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_V_F32, [value] * LANES)


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_V_I32, [0] * LANES))


def _operands(builder: Any, signature: Any, args: Any) -> list[Any]:
    """Arguments with float32 scalars spread over the lanes."""
    return [a if t == Vec else _splat(builder, a) for t, a in zip(signature.args, args)]


def _is_operand(t: Any) -> bool:
    return t in (Vec, types.float32)


def _call(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def _lanewise(count: int, result: types.Type, build: Callable[..., Any]) -> Any:
    """Intrinsic of `count` vector or float32 arguments whose code is `build(builder, *vectors)`."""

    def typer(*arg_types: Any) -> Any:
        if len(arg_types) != count or not all(map(_is_operand, arg_types)):
            raise TypingError(f"expected {count} Vec or float32 arguments, got {arg_types}")
        signature = result(*arg_types)

        def codegen(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return build(builder, *_operands(builder, signature, args))

        return signature, codegen

    if count == 1:
        return intrinsic(lambda _context, a: typer(a))
    if count == 2:
        return intrinsic(lambda _context, a, b: typer(a, b))
    return intrinsic(lambda _context, a, b, c: typer(a, b, c))


_add = _lanewise(2, Vec, lambda b, x, y: b.fadd(x, y))
_sub = _lanewise(2, Vec, lambda b, x, y: b.fsub(x, y))
_mul = _lanewise(2, Vec, lambda b, x, y: b.fmul(x, y))


def _overload_operator(op: Callable[..., Any], function: Any) -> None:
    @overload(op)
    def _operator(x, y):  # Numba compares this signature with that of the lambda, so no annotations
        if (x == Vec and _is_operand(y)) or (y == Vec and _is_operand(x)):
            return lambda x, y: function(x, y)
        return None


_overload_operator(operator.add, _add)
_overload_operator(operator.sub, _sub)
_overload_operator(operator.mul, _mul)


def _build_min(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


def _build_reciprocal(builder: Any, x: Any) -> Any:
    return builder.fdiv(_constant(1.0), x)


def _build_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(builder, f"llvm.fma.v{LANES}f32", _V_F32, [x, y, z])


def _build_exp2(builder: Any, x: Any) -> Any:
    shifted = builder.fadd(x, _constant(_ROUND_MAGIC))
    fraction = builder.fsub(x, builder.fsub(shifted, _constant(_ROUND_MAGIC)))
    p = _constant(_EXP2[0])
    for c in (*_EXP2[1:], 1.0):
        p = _build_fma(builder, p, fraction, _constant(c))
    exponent = builder.shl(builder.bitcast(shifted, _V_I32), ir.Constant(_V_I32, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(p, _V_I32), exponent), _V_F32)


def _build_abs(builder: Any, x: Any) -> Any:
    return _call(builder, f"llvm.fabs.v{LANES}f32", _V_F32, [x])


minimum = _lanewise(2, Vec, _build_min)  # the smaller of two; the second where unordered
maximum = _lanewise(2, Vec, lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))  # likewise
reciprocal = _lanewise(1, Vec, _build_reciprocal)
fma = _lanewise(3, Vec, _build_fma)  # x * y + z with one rounding
exp2 = _lanewise(1, Vec, _build_exp2)  # 2**x for -126 < x < 127; other lanes hold garbage to be masked away
absolute = _lanewise(1, Vec, _build_abs)
negated_absolute = _lanewise(1, Vec, lambda b, x: b.fneg(_build_abs(b, x)))
negate = _lanewise(1, Vec, lambda b, x: b.fneg(x))
splat = _lanewise(1, Vec, lambda b, x: x)
square_root = _lanewise(1, Vec, lambda b, x: _call(b, f"llvm.sqrt.v{LANES}f32", _V_F32, [x]))
floor = _lanewise(1, Vec, lambda b, x: _call(b, f"llvm.floor.v{LANES}f32", _V_F32, [x]))
ceiling = _lanewise(1, Vec, lambda b, x: _call(b, f"llvm.ceil.v{LANES}f32", _V_F32, [x]))
greater = _lanewise(2, Mask, lambda b, x, y: b.fcmp_ordered(">", x, y))
greater_equal = _lanewise(2, Mask, lambda b, x, y: b.fcmp_ordered(">=", x, y))


@intrinsic
def zeros(_context: Any) -> Any:
    """Sixteen zeros."""
    return Vec(), lambda _c, _b, _s, _a: _constant(0.0)


@intrinsic
def both(_context: Any, x: Any, y: Any) -> Any:
    """Lanes in which both masks are set."""
    return Mask(Mask, Mask), lambda _c, builder, _s, args: builder.and_(*args)


@intrinsic
def select(_context: Any, mask: Any, x: Any, y: Any) -> Any:
    """`x` where `mask` is set, `y` elsewhere."""

    def codegen(_c: Any, builder: Any, signature: Any, args: Any) -> Any:
        spread = [a if t == Vec else _splat(builder, a) for t, a in zip(signature.args[1:], args[1:])]
        return builder.select(args[0], *spread)

    return Vec(Mask, x, y), codegen


@intrinsic
def to_bits(_context: Any, mask: Any) -> Any:
    """Mask as an integer, lane k in bit k."""
    return types.uint16(Mask), lambda _c, builder, _s, args: builder.bitcast(args[0], _I16)


@intrinsic
def from_bits(_context: Any, bits: Any) -> Any:
    """Inverse of `to_bits`; `bits` is a uint16."""
    if bits != types.uint16:
        raise TypingError(f"expected uint16 bits, got {bits}")
    return Mask(types.uint16), lambda _c, builder, _s, args: builder.bitcast(args[0], _V_I1)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.bitcast(_element(context, builder, array_type, array, index), ir.PointerType(_V_F32))


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def load(_context: Any, array: Any, index: Any) -> Any:
    """Lanes from elements ``[index, index + 16)`` of a contiguous float32 array (bounds are not checked)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature.args[0], args[0], args[1]), align=4)

    return Vec(array, types.intp), codegen


@intrinsic
def store(_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Write the lanes to elements ``[index, index + 16)`` of a contiguous float32 array (bounds are not checked)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, signature.args[0], args[0], args[1]), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, Vec), codegen


@intrinsic
def column_sums(_context: Any, vectors: Any) -> Any:
    """One vector whose lane k is the sum of the lanes of ``vectors[k]``, a tuple of up to 16; zero beyond.

    Every sum adds lanes 8 apart, then 4, 2 and 1 apart; two vectors share each addition, which halves their number.
    """
    if not isinstance(vectors, types.UniTuple) or vectors.dtype != Vec or len(vectors) > LANES:
        raise TypingError(f"expected a tuple of at most {LANES} Vec, got {vectors}")

    def codegen(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        rows = [builder.extract_value(args[0], k) for k in range(len(vectors))]
        rows += [_constant(0.0)] * (LANES - len(rows))
        owners = [[k] * LANES for k in range(LANES)]  # whose sum each lane holds a part of
        step = LANES
        while len(rows) > 1:
            step //= 2
            next_rows, next_owners = [], []
            for k in range(0, len(rows), 2):
                low = [i for i in range(2 * LANES) if i % (2 * step) < step]
                a = builder.shuffle_vector(rows[k], rows[k + 1], ir.Constant(_V_I32, low))
                b = builder.shuffle_vector(rows[k], rows[k + 1], ir.Constant(_V_I32, [i + step for i in low]))
                next_rows.append(builder.fadd(a, b))
                both_owners = owners[k] + owners[k + 1]
                next_owners.append([both_owners[i] for i in low])
            rows, owners = next_rows, next_owners
        places = [owners[0].index(k) for k in range(LANES)]
        return builder.shuffle_vector(rows[0], rows[0], ir.Constant(_V_I32, places))

    return Vec(vectors), codegen


@intrinsic
def store_spans(_context: Any, array: Any, index: Any, low: Any, high: Any, mask: Any) -> Any:
    """Write to elements ``[index, index + 16)`` of a contiguous int32 array, for every lane in `mask`, an integer whose
    bits `low` to `high` are set (whole numbers of 0 to 30 as floats; none where high < low), and 0 for the others.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, low, high, mask = args
        wanted = builder.and_(mask, builder.fcmp_ordered(">=", high, low))
        zero = _constant(0.0)
        low, high = builder.select(wanted, low, zero), builder.select(wanted, high, zero)
        first, last = builder.fptosi(low, _V_I32), builder.fptosi(high, _V_I32)
        ones, twos = ir.Constant(_V_I32, [1] * LANES), ir.Constant(_V_I32, [2] * LANES)
        span = builder.sub(builder.shl(twos, last), builder.shl(ones, first))
        span = builder.select(wanted, span, ir.Constant(_V_I32, [0] * LANES))
        pointer = _element(context, builder, signature.args[0], array, index)
        builder.store(span, builder.bitcast(pointer, ir.PointerType(_V_I32)), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, Vec, Vec, Mask), codegen


@intrinsic
def prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of element `index` of a contiguous array; never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(
            _element(context, builder, signature.args[0], args[0], args[1]), ir.PointerType(ir.IntType(8))
        )
        function = builder.module.globals.get("llvm.prefetch.p0")
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
            function = ir.Function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(_I32, k) for k in (0, 3, 1))
        builder.call(function, [pointer, read, keep, data])
        return context.get_dummy_value()

    return types.none(array, types.intp), codegen


@intrinsic
def lowest_bit(_context: Any, bits: Any) -> Any:
    """Index of the lowest set bit of a non-zero int64."""
    if bits != types.int64:
        raise TypingError(f"expected int64 bits, got {bits}")

    def codegen(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(_I1, 1))

    return types.int64(types.int64), codegen


@intrinsic
def highest_bit(_context: Any, bits: Any) -> Any:
    """Index of the highest set bit of a non-zero int64."""
    if bits != types.int64:
        raise TypingError(f"expected int64 bits, got {bits}")

    def codegen(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        return builder.sub(ir.Constant(ir.IntType(64), 63), builder.ctlz(args[0], ir.Constant(_I1, 1)))

    return types.int64(types.int64), codegen


@intrinsic
def count_bits(_context: Any, bits: Any) -> Any:
    """Number of set bits of an int64."""
    if bits != types.int64:
        raise TypingError(f"expected int64 bits, got {bits}")
    return types.int64(types.int64), lambda _c, builder, _s, args: builder.ctpop(args[0])
