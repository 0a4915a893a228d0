"""Pointers from addresses, for kernels that take any number of tensors as rows of one table of addresses, and copies.

A kernel that took them as a tuple would be compiled anew for every number of tensors.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def pointer_to(kind: Any) -> Any:
    """A function for kernels that makes an address (int64) a pointer to a numba type; the caller keeps it alive."""

    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.int64), codegen

    return intrinsic(pointer)


def _words(lanes: int, add: bool) -> Any:
    """A function for kernels (source, target: addresses, int64): copies `lanes` 4-byte words as one vector, or adds
    them to the target's, as float32."""

    def move(typingctx: Any, source: Any, target: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = ir.VectorType(ir.FloatType() if add else ir.IntType(32), lanes).as_pointer()
            here, there = (builder.inttoptr(a, vector) for a in args)
            value = builder.load(here, align=4)
            if add:
                value = builder.fadd(builder.load(there, align=4), value)
            builder.store(value, there, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return intrinsic(move)


def _row_function(add: bool) -> Any:
    eight, four, two, one = (_words(lanes, add) for lanes in (8, 4, 2, 1))

    @numba.njit(inline="always")
    def row(source, target, count):  # type: ignore[no-untyped-def]
        for _ in range(count >> 3):
            eight(source, target)
            source += 32
            target += 32
        if count & 4:
            four(source, target)
            source += 16
            target += 16
        if count & 2:
            two(source, target)
            source += 8
            target += 8
        if count & 1:
            one(source, target)

    return row


move_words: Any = _row_function(add=False)
"""For kernels: copy `count` 4-byte words from one address to another. A plain loop over so few has more set-up."""
add_floats: Any = _row_function(add=True)
"""For kernels: add `count` float32 at one address to those at another."""
