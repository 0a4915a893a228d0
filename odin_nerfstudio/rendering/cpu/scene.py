"""One call of the rasterizer, stage by stage on NumPy arrays: projection, sorting into tiles, blending, and back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from odin_nerfstudio.rendering.cpu import binning, exact, gradients, pixels, projection, reduction
from odin_nerfstudio.rendering.cpu.buffers import Array, empty
from odin_nerfstudio.rendering.cpu.layout import C_POSITION, PAIR, SPLAT, TILE, TILE_PIXELS
from odin_nerfstudio.rendering.cpu.records import Blended, Primitives, Projected, Settings, Tiles
from odin_nerfstudio.rendering.threads import render_threads, run

ROWS_PER_CHUNK = 16384
VISIBLE_PER_CHUNK = 4096


def row_spans(count: int, size: int) -> list[tuple[int, int]]:
    return [(a, min(a + size, count)) for a in range(0, count, size)]


def _even_spans(weights: Array, parts: int) -> list[tuple[int, int]]:
    """Cut indices into at most `parts` runs of about equal weight, given the running total of weights (n + 1,)."""
    count = len(weights) - 1
    targets = weights[0] + (weights[-1] - weights[0]) * np.arange(1, parts) / parts
    cuts = [0, *np.searchsorted(weights[1:], targets).tolist(), count]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def project(primitives: Primitives, settings: Settings, camera: Array, out: Projected) -> None:
    """Fill `out`, whose per-row arrays are allocated (contents arbitrary), for one camera record."""
    p = primitives
    spread_y = np.empty(len(p.means), np.float32)
    spans = row_spans(len(p.means), ROWS_PER_CHUNK)
    run(
        lambda k: projection.project(
            *spans[k],
            p.means,
            p.quats,
            p.scales,
            p.opacities,
            camera,
            settings.antialiased,
            out.radii,
            out.means2d,
            out.depths,
            out.conics,
            spread_y,
            out.opacities,
        ),
        len(spans),
    )
    out.rows = np.flatnonzero(out.radii)
    visible = len(out.rows)
    out.splats = empty((visible, SPLAT))
    out.tile_bound = np.empty(visible, np.int32)
    chunks = row_spans(visible, ROWS_PER_CHUNK // 4)
    run(
        lambda k: projection.shade(
            *chunks[k],
            out.rows,
            p.means,
            p.colors,
            settings.sh_degree,
            settings.color_channels,
            settings.depth_channel,
            camera,
            out.radii,
            out.means2d,
            out.depths,
            out.conics,
            spread_y,
            out.opacities,
            out.splats,
            out.tile_bound,
        ),
        len(chunks),
    )


def sort_into_tiles(projected: Projected, settings: Settings) -> Tiles:
    """List every tile's splats front to back."""
    rows, splats, bound = projected.rows, projected.splats, projected.tile_bound
    visible = len(rows)
    tiles = settings.tiles[0] * settings.tiles[1]
    order, keys, spare_order, spare_keys = (np.empty(visible, np.int32) for _ in range(4))
    binning.depth_order(rows, projected.depths.view(np.int32), order, keys, spare_order, spare_keys)
    capacity = np.zeros(visible + 1, np.int64)
    np.cumsum(bound[order], out=capacity[1:])

    chunks = _even_spans(capacity, render_threads()) if visible else []
    listed_tile, listed_mask = np.empty(capacity[-1], np.int32), np.empty(capacity[-1], np.uint16)
    run_end = np.empty(visible, np.int64)
    pairs_per_tile = np.zeros((max(len(chunks), 1), tiles), np.int64)
    blocks_per_tile = np.zeros_like(pairs_per_tile)
    run(
        lambda k: binning.emit(
            *chunks[k],
            order,
            splats,
            capacity,
            settings.width,
            settings.height,
            run_end,
            listed_tile,
            listed_mask,
            pairs_per_tile[k],
            blocks_per_tile[k],
        ),
        len(chunks),
    )
    listed = pairs_per_tile.sum(axis=1)
    tile_start, block_start = np.empty(tiles + 1, np.int64), np.empty(tiles + 1, np.int64)
    binning.tile_offsets(pairs_per_tile, blocks_per_tile, tile_start, block_start)
    total = int(tile_start[-1])
    pairs, runs = empty((total, PAIR), np.int32), np.empty((visible, 2), np.int32)
    used_before = np.concatenate([[0], np.cumsum(listed)])
    run(
        lambda k: binning.scatter(
            *chunks[k],
            order,
            capacity,
            run_end,
            int(capacity[chunks[k][0]] - used_before[k]),
            listed_tile,
            listed_mask,
            pairs_per_tile[k],
            pairs,
            runs,
        ),
        len(chunks),
    )
    return Tiles(tile_start, block_start, pairs, runs)


def tile_spans(tiles: Tiles) -> list[tuple[int, int]]:
    count = len(tiles.tile_start) - 1
    threads = render_threads()
    if threads == 1:
        return [(0, count)]
    # An empty tile costs about as much as a few blocks.
    return _even_spans(tiles.block_start + 16 * np.arange(count + 1), 8 * threads)


def blend(splats: Array, tiles: Tiles, settings: Settings, background: Array, image: Array, alphas: Array) -> Blended:
    """Blend into `image` (H, W, X) and `alphas` (H, W); `background` is float32 (4,)."""
    count = len(tiles.tile_start) - 1
    record = Blended(
        empty((count, TILE_PIXELS)),
        np.empty(count, np.int64),
        empty((int(tiles.block_start[-1]),), np.uint16),
    )
    kernel = pixels.forward_3 if settings.channels <= 3 else pixels.forward_4
    spans = tile_spans(tiles)
    run(
        lambda k: kernel(
            *spans[k],
            settings.width,
            settings.height,
            tiles.tile_start,
            tiles.block_start,
            tiles.pairs,
            splats,
            background,
            pixels.OFFSETS,
            image,
            alphas,
            record.transmittance,
            record.processed,
            record.lanes,
        ),
        len(spans),
    )
    return record


def blend_backward(
    splats: Array,
    rows: Array,
    tiles: Tiles,
    record: Blended,
    settings: Settings,
    background: Array,
    v_image: Array,
    v_alphas: Array,
    v_means2d: Array,
    v_means2d_abs: Array,
    v_splats: Array,
) -> None:
    """Gradients of `blend`: of the records `v_splats` (V, 16), and, in the visible rows of the zeroed `v_means2d` and
    `v_means2d_abs` (N, 2), of the means in pixels and their absolute sums.
    """
    total = len(tiles.pairs)
    slots = empty((total, SPLAT))
    used = np.zeros(total, np.uint8)
    kernel = pixels.backward_3 if settings.channels <= 3 else pixels.backward_4
    spans = tile_spans(tiles)
    run(
        lambda k: kernel(
            *spans[k],
            settings.width,
            settings.height,
            tiles.tile_start,
            tiles.block_start,
            tiles.pairs,
            splats,
            background,
            pixels.OFFSETS,
            record.transmittance,
            record.processed,
            record.lanes,
            v_image,
            v_alphas,
            slots,
            used,
        ),
        len(spans),
    )
    chunks = row_spans(len(rows), ROWS_PER_CHUNK)
    run(
        lambda k: reduction.gather(
            *chunks[k],
            rows,
            splats,
            tiles.runs,
            slots,
            used,
            v_splats,
            v_means2d,
            v_means2d_abs,
        ),
        len(chunks),
    )


def project_backward(
    primitives: Primitives,
    settings: Settings,
    camera: Array,
    rows: Array,
    splats: Array,
    v_means2d: Array,
    v_depths: Array,
    v_splats: Array,
    v_primitives: Primitives,
    accumulate: bool,
    accumulate_colors: bool,
    want_camera: bool,
) -> Array:
    """Gradients of `project` into `v_primitives`: added to it where `accumulate`, for colours `accumulate_colors`.

    Returns the sums that `camera_gradient` takes (zeros without `want_camera`). (CAMERA_SUMS, BINS) int64.
    """
    count, visible = len(primitives.means), len(rows)
    chunks = row_spans(visible, VISIBLE_PER_CHUNK) or [(0, 0)]
    row_cuts = [0, *(int(rows[a]) for a, _ in chunks[1:]), count]
    partial = np.zeros((len(chunks), gradients.CAMERA_SUMS, exact.BINS), np.int64)
    p, g = primitives, v_primitives
    run(
        lambda k: gradients.backward(
            row_cuts[k],
            row_cuts[k + 1],
            *chunks[k],
            rows,
            p.means,
            p.quats,
            p.scales,
            p.opacities,
            p.colors,
            settings.sh_degree,
            settings.color_channels,
            settings.depth_channel,
            camera,
            settings.antialiased,
            accumulate,
            accumulate_colors,
            splats,
            v_means2d,
            v_depths,
            v_splats,
            g.means,
            g.quats,
            g.scales,
            g.opacities,
            g.colors,
            want_camera,
            partial[k],
        ),
        len(chunks),
    )
    return partial.sum(0)


def camera_gradient(sums: Array, camera: Array) -> Array:
    """Gradient of the 4 x 4 view matrix, float32, whose last row is zero.

    sums: of `project_backward`, over any parts of the primitives added up.
    """
    total, v_viewmat = exact.totals(sums), np.zeros((4, 4), np.float32)
    # The camera's position is p = -R^-1 t, so dp = -R^-1 (dR p + dt).
    position = camera[C_POSITION : C_POSITION + 3].astype(np.float64)
    inverse = projection.inverse_rotation(camera)
    pulled = [float(sum(inverse[k, j] * total[12 + k] for k in range(3))) for j in range(3)]
    for i in range(3):
        for j in range(3):
            v_viewmat[i, j] = total[3 * i + j] - pulled[i] * position[j]
        v_viewmat[i, 3] = total[9 + i] - pulled[i]
    return v_viewmat


def background_gradient(record: Blended, settings: Settings, v_image: Array) -> Array:
    """Gradient of the background, float64 (4,): incoming gradients weighted by what shines through, summed by rows."""
    across, down = settings.tiles
    # From block order to an image.
    planes = record.transmittance.reshape(down, across, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5)
    weights = planes.reshape(down * TILE, across * TILE)[: settings.height, : settings.width]
    result = np.zeros(4)
    reduction.weighted_sums(np.ascontiguousarray(weights), v_image, result)
    return result


def covariance_gradient(conics: Array, v_conics: Array) -> Array:
    """Gradients of conics (V, 3) as gradients of 2D covariances (V, 3), entries xx, xy, yy: minus P V P."""
    a, b, c = conics.T
    va, vb, vc = v_conics[:, 0], 0.5 * v_conics[:, 1], v_conics[:, 2]
    t00, t01, t10, t11 = a * va + b * vb, a * vb + b * vc, b * va + c * vb, b * vb + c * vc
    return -np.stack([t00 * a + t01 * b, t00 * b + t01 * c, t10 * b + t11 * c], axis=-1)
