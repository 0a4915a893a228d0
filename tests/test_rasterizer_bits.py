"""Equal bits: over runs, threads, processes and processors, and on any superset of the visible rows."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from render_scenes import make_scene, run

from odin_nerfstudio.rendering import rasterization, set_render_threads

ROW_FIELDS = ("means", "quats", "scales", "opacities", "colors")


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    yield
    set_render_threads(None)


def _scene() -> dict[str, Any]:
    """Large enough for several chunks of rows and tiles; some rows are out of every view."""
    scene = make_scene(20_000, 200, 150, cameras=2, pixels=3.0)
    scene["means"][::3, 2] *= -1
    scene["backgrounds"] = torch.full((2, 3), 0.25)
    return {**scene, "render_mode": "RGB+ED", "rasterize_mode": "antialiased", "absgrad": True}


def digest(scene: dict[str, Any]) -> str:
    """Hash of images and all gradients."""
    total = hashlib.sha256()
    for name, value in sorted(run(rasterization, scene, torch.float32).items()):
        total.update(name.encode() + value.contiguous().numpy().tobytes())
    return total.hexdigest()


def test_threads_and_runs() -> None:
    scene = _scene()
    found = set()
    for threads in (1, 2, 3, 1):
        set_render_threads(threads)
        found.add(digest(scene))
    assert len(found) == 1


def test_concurrent_callers() -> None:
    """As training and the viewer do."""
    scene = _scene()
    expected = digest(scene)
    set_render_threads(2)
    with ThreadPoolExecutor(3) as callers:
        assert set(callers.map(lambda _: digest(scene), range(6))) == {expected}


def _digest_elsewhere(**environment: str) -> str:
    code = "import test_rasterizer_bits as t; print(t.digest(t._scene()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_other_process() -> None:
    assert _digest_elsewhere() == digest(_scene())


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names an x86 processor")
def test_other_processor() -> None:
    """The instructions of 2013 (AVX2) against those of this machine."""
    assert _digest_elsewhere(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="") == digest(_scene())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child() -> None:
    """A child forked after the parent has rendered on threads renders too, with the same bits."""
    scene = _scene()
    set_render_threads(2)
    expected = digest(scene)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # leave without running the parent's exit handlers, whatever happens
        try:
            torch.set_num_threads(1)  # torch's own threads did not survive the fork
            os.write(writer, _images_digest(scene).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    assert answer == _images_digest(scene)
    assert digest(scene) == expected


def _images_digest(scene: dict[str, Any]) -> str:
    with torch.no_grad():
        image, _, _ = rasterization(**scene)
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()


def test_rows_that_no_view_sees_change_nothing() -> None:
    """Compacting to the visible rows, and padding with rows behind the cameras, keeps every bit of images and rows."""
    scene = _scene()
    whole = run(rasterization, scene, torch.float32)
    seen = (whole["radii"] > 0).any(0)
    assert 0 < seen.sum() < len(seen)

    compact = run(rasterization, {**scene, **{k: scene[k][seen] for k in ROW_FIELDS}}, torch.float32)
    padding = {k: scene[k][:64].clone() for k in ROW_FIELDS}
    padding["means"][:, 2] = -5.0
    padded_fields = {k: torch.cat([scene[k][seen], padding[k]]) for k in ROW_FIELDS}
    padded = run(rasterization, {**scene, **padded_fields}, torch.float32)

    rows = int(seen.sum())
    for name, expected in whole.items():
        if name in ROW_FIELDS:
            assert not expected[~seen].any()
            expected = expected[seen]
            padded[name] = padded[name][:rows]
        elif name in ("radii", "means2d", "absgrad"):
            expected = expected[:, seen]
            padded[name] = padded[name][:, :rows]
        assert torch.equal(compact[name], expected), name
        assert torch.equal(padded[name], expected), name
