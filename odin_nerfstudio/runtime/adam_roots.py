"""torch's own square root of float32, reproduced inside of kernels.

On the CPU torch takes MKL's vector ``sqrt`` where it has MKL, and MKL's result depends on the processor: the IEEE one,
or a hardware estimate of ``1 / sqrt(x)`` with one or two corrections, which is off by one unit in the last place for
up to 17 % of all values. Whatever it is, Adam must have the same bits. `root_recipe` finds out which of the known
recipes torch uses here, by comparing all 2^24 combinations of mantissa and parity of the exponent, every exponent, and
every kind of special value, so that no value is left to luck: the recipes scale exactly with powers of four.
"""

from __future__ import annotations

import functools
import logging
import platform
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}

IEEE, ESTIMATE, ESTIMATE14 = 0, 1, 2
"""Recipes: IEEE; MKL's for any x86 processor (``rsqrtps``, corrected without fused multiply-add); MKL's for AVX-512."""

_TINY, _TINY_BITS, _HUGE_BITS = np.float32(2.0**-126), np.uint32(0x00800000), np.uint32(0x7F7FF000)
"""The estimating recipes hold from the smallest normal number to 2^128 - 2^116, and for zero; others are IEEE."""
_HALF, _ZERO, _ONE_BIT = np.float32(0.5), np.float32(0), np.uint32(1)
_STEP = 16
"""Estimates are made for so many values at a time."""


def _features() -> set[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return set()
    return {name for name, there in llvmlite.binding.get_host_cpu_features().items() if there}


def _estimator(call: str, feature: str, lanes: int) -> Any:
    """A kernel function (source address, target address): estimates of 1 / sqrt of 16 float32.

    Where the processor has no such instruction it writes nothing; `root_recipe` does not choose the recipe there.
    """

    def estimate(typingctx: Any, source: Any, target: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if feature in _features():
                vector = ir.VectorType(ir.FloatType(), lanes)
                masked = lanes == 16
                kinds = [vector, vector, ir.IntType(16)] if masked else [vector]
                function = builder.module.declare_intrinsic(call, fnty=ir.FunctionType(vector, kinds))
                for part in range(0, _STEP, lanes):
                    offset = ir.Constant(ir.IntType(64), 4 * part)
                    here, there = (builder.inttoptr(builder.add(a, offset), vector.as_pointer()) for a in args)
                    value = builder.load(here, align=4)
                    rest = [ir.Constant(vector, None), ir.Constant(ir.IntType(16), 0xFFFF)] if masked else []
                    builder.store(builder.call(function, [value, *rest]), there, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return intrinsic(estimate)


_estimate: Any = _estimator("llvm.x86.avx.rsqrt.ps.256", "avx", 8)
_estimate14: Any = _estimator("llvm.x86.avx512.rsqrt14.ps.512", "avx512f", 16)


def _fma_codegen(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding, in float32."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, sig, args: builder.fma(*args)


fma: Any = intrinsic(_fma_codegen)


@numba.njit(**_OPTIONS)
def roots(x, out, n, recipe):  # type: ignore[no-untyped-def]
    """out[k] = torch's square root of x[k], for k < n. x, out: float32, contiguous, room for a multiple of 16."""
    if recipe == IEEE:
        for k in range(n):
            out[k] = np.sqrt(x[k])
        return
    source, target = x.ctypes.data, out.ctypes.data
    if recipe == ESTIMATE:
        for k in range(0, n, _STEP):
            _estimate(source + 4 * k, target + 4 * k)
    else:
        for k in range(0, n, _STEP):
            _estimate14(source + 4 * k, target + 4 * k)
    words = x.view(np.uint32)
    least, most = _HUGE_BITS, _ONE_BIT
    for k in range(n):
        bits = words[k]
        least, most = min(least, np.uint32(bits - _ONE_BIT)), max(most, bits)  # zero wraps around to no minimum
    if recipe == ESTIMATE:
        for k in range(n):
            value = x[k]
            y = out[k] if value >= _TINY else _ZERO
            s, h = value * y, y * _HALF
            r = _HALF - s * h
            s, h = s + s * r, h + h * r
            out[k] = s + (value - s * s) * h
    else:
        for k in range(n):
            value = x[k]
            y = out[k] if value >= _TINY else _ZERO
            s, h = value * y, y * _HALF
            out[k] = fma(fma(-s, s, value), h, s)
    if least < _TINY_BITS - _ONE_BIT or most > _HUGE_BITS:
        for k in range(n):
            bits = words[k]
            if (bits < _TINY_BITS and bits != 0) or bits > _HUGE_BITS:
                out[k] = np.sqrt(x[k])


def _samples() -> list[np.ndarray]:
    """What is compared: every mantissa for both parities, every exponent, and special values. float32."""
    bits, mantissas = np.uint32, np.arange(1 << 23, dtype=np.uint32)
    rng = np.random.default_rng(2)
    exponents = (np.arange(255, dtype=bits) << bits(23))[:, None] | rng.integers(0, 1 << 23, (255, 512), dtype=bits)
    largest = np.arange(0x7F7F0000, 0x7F800000, dtype=bits)
    special = np.array([0.0, -0.0, 1e-45, 1e-38, 2.0**-126, np.inf], np.float32).repeat(_STEP).view(bits)
    both = [mantissas | bits(exponent << 23) for exponent in (127, 128)]
    return [x.reshape(-1).view(np.float32) for x in (special, largest, exponents, *both)]


@functools.lru_cache(maxsize=1)
def root_recipe() -> int | None:
    """The recipe that has the bits of ``torch.sqrt`` on the CPU in this process; None: none has."""
    features = _features()
    known = [IEEE, *([ESTIMATE] if "avx" in features else []), *([ESTIMATE14] if "avx512f" in features else [])]
    for x in _samples():
        expected = torch.from_numpy(x.copy()).sqrt_().numpy().view(np.uint32)
        out = np.empty_like(x)
        for recipe in list(known):
            roots(x, out, x.shape[0], recipe)
            if not np.array_equal(out.view(np.uint32), expected):
                known.remove(recipe)
    if not known:
        logger.warning(
            "torch's square root on this processor follows no recipe known here: steps are published by torch's own "
            "operations, with the same bits, but more slowly"
        )
    return known[0] if known else None
