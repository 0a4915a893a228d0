"""Times of the CPU rasterizers of Gaussians and of surfels on random scenes, and of the dense twin on a small one.

    python scripts/bench_rasterizer.py [--threads N] [--repeats N] [--json FILE]

Every time is the fastest of several repetitions, forward alone and forward with backward, with spherical harmonics of
degree 3; of Gaussians with absolute gradients, of surfels with depth and all geometric images, and their gradients too.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from odin_nerfstudio.rendering import rasterization, rasterization_2dgs, set_render_threads, warm_up_surfels
from odin_nerfstudio.rendering.dense import dense_rasterization

SCENES = {"10k": (10_000, 320, 240), "50k": (50_000, 640, 480), "100k": (100_000, 960, 540)}
SMALL = (200, 64, 48)
KINDS: tuple[tuple[str, Callable[..., Any], dict[str, Any]], ...] = (
    ("Gaussians", rasterization, {"absgrad": True}),
    ("surfels", rasterization_2dgs, {"render_mode": "RGB+ED"}),
)
FIELDS = ("means", "quats", "scales", "opacities", "colors")


def random_scene(count: int, width: int, height: int, seed: int = 0) -> dict[str, Any]:
    """Gaussians of about two pixels (mean 3-sigma radius 6.3 pixels) that fill the view of one camera."""
    g = torch.Generator().manual_seed(seed)
    focal = 0.9 * width
    z = 2 + 6 * torch.rand(count, generator=g)
    x = (torch.rand(count, generator=g) * 1.1 - 0.55) * width / focal * z
    y = (torch.rand(count, generator=g) * 1.1 - 0.55) * height / focal * z
    quats = torch.randn(count, 4, generator=g)
    scales = 1.2 * z[:, None] / focal * torch.exp(0.5 * torch.randn(count, 3, generator=g))
    opacities = torch.sigmoid(1.5 * torch.randn(count, generator=g))
    colors = 0.2 * torch.randn(count, 16, 3, generator=g)
    colors[:, 0] = torch.randn(count, 3, generator=g)
    return {
        "means": torch.stack([x, y, z], dim=-1),
        "quats": quats,
        "scales": scales,
        "opacities": opacities,
        "colors": colors,
        "viewmats": torch.eye(4)[None],
        "Ks": torch.tensor([[[focal, 0.0, width / 2], [0.0, focal, height / 2], [0.0, 0.0, 1.0]]]),
        "width": width,
        "height": height,
        "sh_degree": 3,
    }


def measure(function: Callable[..., Any], scene: dict[str, Any], repeats: int) -> tuple[float, float]:
    """Milliseconds of the fastest forward, and of the fastest forward and backward together."""
    leaves = {k: scene[k].clone().requires_grad_() for k in FIELDS}
    weights = torch.rand(1, scene["height"], scene["width"], 3, generator=torch.Generator().manual_seed(1))
    forward, total = [], []
    for _ in range(repeats):
        for leaf in leaves.values():
            leaf.grad = None
        start = time.perf_counter()
        image, *more, info = function(**{**scene, **leaves})
        forward.append(time.perf_counter() - start)
        if info["means2d"].requires_grad:
            info["means2d"].retain_grad()
        images = [image[..., :3], *more[1:]]
        torch.autograd.backward(images, [weights, *map(torch.ones_like, more[1:])])
        total.append(time.perf_counter() - start)
    return 1e3 * min(forward), 1e3 * min(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1, help="threads of the rasterizer (default: 1)")
    parser.add_argument("--repeats", type=int, default=9, help="repetitions, of which the fastest counts (default: 9)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_render_threads(options.threads)
    warm_up_surfels()

    table = Table(title=f"CPU rasterizer, {options.threads} thread(s), milliseconds")
    for heading in ("scene", "primitives", "pixels", "forward", "forward + backward"):
        table.add_column(heading, justify="left" if heading == "scene" else "right")
    results = []
    for name, (count, width, height) in SCENES.items():
        scene = random_scene(count, width, height)
        for kind, function, extra in KINDS:
            forward, total = measure(function, {**scene, **extra}, options.repeats)
            results.append(
                {
                    "scene": name,
                    "kind": kind,
                    "primitives": count,
                    "width": width,
                    "height": height,
                    "threads": options.threads,
                    "forward_ms": round(forward, 3),
                    "forward_backward_ms": round(total, 3),
                }
            )
            table.add_row(f"{name} {kind}", f"{count:,}", f"{width} x {height}", f"{forward:.1f}", f"{total:.1f}")
    count, width, height = SMALL
    scene = random_scene(count, width, height)
    for label, function in (("small", rasterization), ("small, dense twin", dense_rasterization)):
        forward, total = measure(function, scene, min(options.repeats, 3))
        table.add_row(label, f"{count:,}", f"{width} x {height}", f"{forward:.1f}", f"{total:.1f}")
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
