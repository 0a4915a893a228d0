"""One call of the surfel rasterizer, stage by stage on NumPy arrays. Sorting into tiles is that of `scene`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odin_nerfstudio.rendering.cpu.buffers import Array, empty
from odin_nerfstudio.rendering.cpu.layout import SPLAT, TILE_PIXELS
from odin_nerfstudio.rendering.cpu.pixels import OFFSETS
from odin_nerfstudio.rendering.cpu.records import Blended, Primitives, Projected, Settings, Tiles
from odin_nerfstudio.rendering.cpu.scene import ROWS_PER_CHUNK, VISIBLE_PER_CHUNK, row_spans, tile_spans
from odin_nerfstudio.rendering.cpu.surfel_kernels import surfel_gradients, surfel_pixels, surfel_projection
from odin_nerfstudio.rendering.cpu.surfel_layout import RECORD, SUMS
from odin_nerfstudio.rendering.threads import run


@dataclass
class Surfels:
    """One camera's projection: per row as of Gaussians (whose records hold the outlines), and of the visible ones."""

    projected: Projected
    records: Array  # (V, 32)
    transforms: Array  # (V, 9), rows of the ray transforms
    normals: Array  # (V, 3), in the camera's frame, towards it


@dataclass
class Images:
    """What one camera sees: image (H, W, X), normals (H, W, 3), the others (H, W); or the gradients of these."""

    image: Array
    alphas: Array
    normals: Array
    distortion: Array
    median: Array


@dataclass
class SurfelsBlended(Blended):
    """What blending leaves for the backward pass."""

    depth_sum: Array  # (T, 256), weighted depths, measured from the tile's first one
    middle: Array  # (T, 256), place in the tile's list of the surfel at the median depth


def project(primitives: Primitives, settings: Settings, camera: Array) -> Surfels:
    """Project all rows for one camera record, and pack the visible ones."""
    p, count = primitives, len(primitives.means)
    nothing = np.empty((0, 0), np.float32)
    out = Projected(
        np.empty(count, np.int32), np.empty((count, 2), np.float32), np.empty(count, np.float32), nothing, nothing
    )
    spans = row_spans(count, ROWS_PER_CHUNK)
    run(
        lambda k: surfel_projection.project(
            *spans[k], p.means, p.quats, p.scales, camera, out.radii, out.means2d, out.depths
        ),
        len(spans),
    )
    out.rows = np.flatnonzero(out.radii)
    visible = len(out.rows)
    out.splats, out.tile_bound = empty((visible, SPLAT)), np.empty(visible, np.int32)
    surfels = Surfels(
        out, empty((visible, RECORD)), np.empty((visible, 9), np.float32), np.empty((visible, 3), np.float32)
    )
    chunks = row_spans(visible, ROWS_PER_CHUNK // 4)
    run(
        lambda k: surfel_projection.shade(
            *chunks[k],
            out.rows,
            p.means,
            p.quats,
            p.scales,
            p.opacities,
            p.colors,
            settings.sh_degree,
            settings.color_channels,
            settings.depth_channel,
            camera,
            out.radii,
            out.means2d,
            out.depths,
            surfels.records,
            out.splats,
            out.tile_bound,
            surfels.transforms,
            surfels.normals,
        ),
        len(chunks),
    )
    return surfels


def blend(records: Array, tiles: Tiles, settings: Settings, background: Array, out: Images) -> SurfelsBlended:
    """Blend into `out`; `background` is float32 (4,)."""
    count = len(tiles.tile_start) - 1
    record = SurfelsBlended(
        empty((count, TILE_PIXELS)),
        np.empty(count, np.int64),
        empty((int(tiles.block_start[-1]),), np.uint16),
        empty((count, TILE_PIXELS)),
        empty((count, TILE_PIXELS)),
    )
    spans = tile_spans(tiles)
    run(
        lambda k: surfel_pixels.forward(
            *spans[k],
            settings.width,
            settings.height,
            tiles.tile_start,
            tiles.block_start,
            tiles.pairs,
            records,
            background,
            OFFSETS,
            out.image,
            out.alphas,
            out.normals,
            out.distortion,
            out.median,
            record.transmittance,
            record.processed,
            record.lanes,
            record.depth_sum,
            record.middle,
        ),
        len(spans),
    )
    return record


def blend_backward(
    records: Array,
    tiles: Tiles,
    record: SurfelsBlended,
    settings: Settings,
    background: Array,
    gradients: Images,
    with_geometry: bool,
) -> Array:
    """Gradients of `blend` as rows of sums (V, 32); those of normals, distortion and median only `with_geometry`."""
    total, visible = len(tiles.pairs), len(records)
    slots, used = empty((total, SUMS)), np.zeros(total, np.uint8)
    kernel = surfel_pixels.backward_geometry if with_geometry else surfel_pixels.backward_colour
    spans, g = tile_spans(tiles), gradients
    run(
        lambda k: kernel(
            *spans[k],
            settings.width,
            settings.height,
            tiles.tile_start,
            tiles.block_start,
            tiles.pairs,
            records,
            background,
            OFFSETS,
            record.transmittance,
            record.processed,
            record.lanes,
            record.depth_sum,
            record.middle,
            g.image,
            g.alphas,
            g.normals,
            g.distortion,
            g.median,
            slots,
            used,
        ),
        len(spans),
    )
    sums = empty((visible, SUMS))
    chunks = row_spans(visible, ROWS_PER_CHUNK)
    run(lambda k: surfel_gradients.gather(*chunks[k], tiles.runs, slots, used, sums), len(chunks))
    return sums


def project_backward(
    primitives: Primitives,
    settings: Settings,
    camera: Array,
    rows: Array,
    records: Array,
    sums: Array,
    v_primitives: Primitives,
    accumulate: bool,
    accumulate_colors: bool,
    v_densify: Array,
    absolute: Array,
) -> None:
    """Gradients of `project` into `v_primitives`: added to it where `accumulate`, for colours `accumulate_colors`.

    Visible rows of the zeroed `v_densify` and `absolute` (N, 2) get gsplat's ``gradient_2dgs`` and the absolute
    gradients of the projected centres.
    """
    visible = len(rows)
    chunks = row_spans(visible, VISIBLE_PER_CHUNK) or [(0, 0)]
    row_cuts = [0, *(int(rows[a]) for a, _ in chunks[1:]), len(primitives.means)]
    p, g = primitives, v_primitives
    run(
        lambda k: surfel_gradients.backward(
            row_cuts[k],
            row_cuts[k + 1],
            *chunks[k],
            rows,
            p.means,
            p.quats,
            p.scales,
            p.colors,
            settings.sh_degree,
            settings.color_channels,
            settings.channels - 1,
            settings.depth_channel,
            camera,
            accumulate,
            accumulate_colors,
            records,
            sums,
            g.means,
            g.quats,
            g.scales,
            g.opacities,
            g.colors,
            v_densify,
            absolute,
        ),
        len(chunks),
    )
