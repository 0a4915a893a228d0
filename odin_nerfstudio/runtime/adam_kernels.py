"""Numba kernels of one dense Adam step on chunks of rows, with the bits of ``torch.optim.Adam``.

A step is cut in chunks that stay in the cache, and each chunk in two kernels around a square root, because torch's own
square root need not be the IEEE one (MKL's vector math rounds 17 % of float32 values the other way on some machines):

1. ``moments_*``: ``m = m + w1 (g - m)``, ``v = b2 v + (w2 g) g``; copies of ``m`` and ``v`` go to compact buffers,
2. torch's ``sqrt`` on the compact ``v`` (or IEEE ``sqrt`` inside kernel 1 where torch's is the same),
3. ``update_*``: ``p = p + (a m) / (sqrt(v) / c2 + eps)``.

Trailing columns that hold nothing but zeros in the gradient and both moments, over the rows of a chunk, are left alone:
there the step is exactly the identity (see `chunk_live_columns`). In splat models these are the spherical-harmonics
bands that are not switched on yet.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from odin_nerfstudio.runtime.adam_roots import fma

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


@numba.njit(inline="always")
def first_moment(m, g, w1, fused):  # type: ignore[no-untyped-def]
    """``m + w1 (g - m)``, as torch rounds it."""
    return fma(w1, g - m, m) if fused else m + w1 * (g - m)


@numba.njit(inline="always")
def second_moment(v, g, b2, w2, fused):  # type: ignore[no-untyped-def]
    """``b2 v + (w2 g) g``, as torch rounds it."""
    return fma(w2 * g, g, v * b2) if fused else v * b2 + (w2 * g) * g


@numba.njit(**_OPTIONS)
def chunk_live_columns(m, v, g, ids, gids, seen):  # type: ignore[no-untyped-def]
    """One more than the last column with a non-zero bit in any row of the chunk; 0 if there is none.

    Args: m, v: moments, uint32 view. [N, C]. g: gradient, uint32 view. [*, C]. ids, gids: rows of m, v and rows of g.
    [n] each. seen: scratch. [C] uint32.

    Left-out columns keep their bits under Adam: with m = v = +0 and g = +-0, the new m is ``+0 + w1 (+-0) = +0``, the
    new v is ``+0``, and p gets ``-step_size * 0 / (0 + eps) = -0``, and ``p + -0 = p`` for every p (eps > 0).
    """
    columns = m.shape[1]
    magnitude = np.uint32(0x7FFFFFFF)
    last = columns - 1
    for k in range(ids.shape[0]):  # the usual case first: all columns are live
        if (m[ids[k], last] | v[ids[k], last] | (g[gids[k], last] & magnitude)) != 0:
            return columns
    for c in range(columns):
        seen[c] = 0
    for k in range(ids.shape[0]):
        i = ids[k]
        j = gids[k]
        for c in range(columns):
            seen[c] |= m[i, c] | v[i, c] | (g[j, c] & magnitude)
    while last >= 0 and seen[last] == 0:
        last -= 1
    return last + 1


@numba.njit(**_OPTIONS)
def moments_flat(m, v, g, w1, b2, w2, fused1, fused2, root, v_out):  # type: ignore[no-untyped-def]
    """Both moments of a contiguous run, in place. All arrays [n] float32; v_out gets v, or sqrt(v) if root."""
    for k in range(m.shape[0]):
        x = second_moment(v[k], g[k], b2, w2, fused2)
        m[k] = first_moment(m[k], g[k], w1, fused1)
        v[k] = x
        v_out[k] = x
    if root:
        for k in range(m.shape[0]):
            v_out[k] = np.sqrt(v_out[k])


@numba.njit(**_OPTIONS)
def update_flat(p, m, root_v, a, c2, eps):  # type: ignore[no-untyped-def]
    """Parameters of a contiguous run, in place. p, m, root_v: [n] float32; a is minus the bias-corrected step size."""
    for k in range(p.shape[0]):
        p[k] += (a * m[k]) / (root_v[k] / c2 + eps)


@numba.njit(**_OPTIONS)
def moments_rows(m, v, g, ids, gids, live, w1, b2, w2, fused1, fused2, root, m_out, v_out):  # type: ignore[no-untyped-def]
    """Both moments of the first `live` columns of rows `ids`, in place; compact copies to m_out, v_out. [n * live]."""
    n = ids.shape[0]
    for k in range(n):
        i = ids[k]
        j = gids[k]
        o = k * live
        for c in range(live):
            x = first_moment(m[i, c], g[j, c], w1, fused1)
            y = second_moment(v[i, c], g[j, c], b2, w2, fused2)
            m[i, c] = x
            v[i, c] = y
            m_out[o + c] = x
            v_out[o + c] = y
    if root:
        for k in range(n * live):
            v_out[k] = np.sqrt(v_out[k])


@numba.njit(**_OPTIONS)
def update_rows(p, ids, live, a, c2, eps, m_in, root_v):  # type: ignore[no-untyped-def]
    """Parameters of the first `live` columns of rows `ids`, in place. a: [C] minus the step size of each column.

    m_in, root_v: what `moments_rows` wrote, the latter after the square root. [n * live]. root_v is overwritten.
    """
    n = ids.shape[0]
    for k in range(n * live):  # one long loop, so that the divisions vectorise whatever the row length
        root_v[k] = root_v[k] / c2 + eps
    for k in range(n):
        o = k * live
        for c in range(live):
            root_v[o + c] = (a[c] * m_in[o + c]) / root_v[o + c]
    for k in range(n):
        i = ids[k]
        o = k * live
        for c in range(live):
            p[i, c] += root_v[o + c]


@numba.njit(**_OPTIONS)
def mask_to_ids(mask, ids):  # type: ignore[no-untyped-def]
    """Rows whose mask byte is not zero, ascending, into ids (large enough); returns how many."""
    n = 0
    for i in range(mask.shape[0]):
        if mask[i] != 0:
            ids[n] = i
            n += 1
    return n


@numba.njit(**_OPTIONS)
def clear_rows(g, ids):  # type: ignore[no-untyped-def]
    """Set rows `ids` of g to zero. g: [N, C] float32."""
    for k in range(ids.shape[0]):
        for c in range(g.shape[1]):
            g[ids[k], c] = 0
