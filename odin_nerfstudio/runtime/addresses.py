"""Pointers from addresses, for kernels that take any number of tensors as rows of one table of addresses.

A kernel that took them as a tuple would be compiled anew for every number of tensors.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def pointer_to(kind: Any) -> Any:
    """A function for kernels that makes an address (int64) a pointer to a numba type; the caller keeps it alive."""

    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.int64), codegen

    return intrinsic(pointer)
