"""What callers of the rasterizer rely on: gsplat's strategies, named errors, `info`, warm-up and light imports."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from render_scenes import make_scene

from odin_nerfstudio.rendering import rasterization, set_render_threads, warm_up


@pytest.mark.parametrize("absgrad", [False, True])
def test_default_strategy(absgrad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gsplat's own strategy runs on our `info`, and grows and prunes."""
    from gsplat.strategy import DefaultStrategy

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    scene = make_scene(300, 64, 48, sh_degree=0)
    params = torch.nn.ParameterDict(
        {
            "means": scene["means"],
            "quats": scene["quats"],
            "scales": scene["scales"].log(),
            "opacities": torch.logit(scene["opacities"]),
            "colors": scene["colors"],
        }
    )
    optimizers: dict[str, torch.optim.Optimizer] = {k: torch.optim.Adam([v], lr=1e-3) for k, v in params.items()}
    strategy = DefaultStrategy(absgrad=absgrad, refine_start_iter=0, refine_every=2, grow_grad2d=1e-6, prune_opa=0.1)
    strategy.check_sanity(params, optimizers)
    state = strategy.initialize_state()
    for step in (1, 2):
        image, _, info = rasterization(
            params["means"],
            params["quats"],
            params["scales"].exp(),
            params["opacities"].sigmoid(),
            params["colors"],
            **{k: scene[k] for k in ("viewmats", "Ks", "width", "height", "sh_degree")},
            absgrad=absgrad,
        )
        strategy.step_pre_backward(params, optimizers, state, step, info)
        ((image - 0.5) ** 2).mean().backward()
        if step == 1:
            strategy.step_post_backward(params, optimizers, state, step, info)
            seen = info["radii"][0] > 0
            means2d = info["means2d"].absgrad if absgrad else info["means2d"].grad
            expected = (means2d[0] * torch.tensor([64 / 2.0, 48 / 2.0])).norm(dim=-1)
            assert torch.equal(state["count"], seen.float())
            assert torch.allclose(state["grad2d"], expected, rtol=1e-6)
            assert (expected > 0).any() and not expected[~seen].any()
        else:
            before = len(params["means"])
            strategy.step_post_backward(params, optimizers, state, step, info)
            assert len(params["means"]) != before
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def test_info() -> None:
    scene = make_scene(80, 50, 37, cameras=2)
    image, alphas, info = rasterization(**scene)
    assert image.shape == (2, 37, 50, 3) and alphas.shape == (2, 37, 50, 1)
    assert info["radii"].shape == (2, 80) and info["radii"].dtype == torch.int32
    shapes = {"means2d": (2, 80, 2), "depths": (2, 80), "conics": (2, 80, 3), "opacities": (2, 80)}
    assert all(info[k].shape == v for k, v in shapes.items())
    expected = {"width": 50, "height": 37, "tile_size": 16, "tile_width": 4, "tile_height": 3, "n_cameras": 2}
    assert {k: info[k] for k in expected} == expected
    assert info["gaussian_ids"] is None and info["camera_ids"] is None
    count = int(info["tiles_per_gauss"].sum())
    assert info["flatten_ids"].shape == info["isect_ids"].shape == (count,)
    assert info["isect_offsets"].shape == (2, 3, 4) and int(info["isect_offsets"].max()) <= count
    assert torch.equal(info["isect_ids"].sort().values, info["isect_ids"])  # camera, tile, then depth
    assert (info["radii"].flatten()[info["flatten_ids"].long()] > 0).all()
    assert all(value is not info for value in info.values()) and "isect_ids" in dict(info.items())


@pytest.mark.parametrize(
    "name, change",
    [
        ("means", lambda s: s["means"][:, :2]),
        ("means", lambda s: s["means"].double()),
        ("quats", lambda s: s["quats"][:-1]),
        ("scales", lambda s: s["scales"].half()),
        ("scales", lambda s: s["scales"].to("meta")),
        ("opacities", lambda s: s["opacities"][:, None]),
        ("colors", lambda s: s["colors"][:, :8]),
        ("colors", lambda s: s["colors"][..., :2]),
        ("viewmats", lambda s: s["viewmats"][0]),
        ("Ks", lambda s: s["Ks"].repeat(2, 1, 1)),
        ("backgrounds", lambda s: torch.zeros(1, 4)),
        ("backgrounds", lambda s: [0.0, 0.0, 0.0]),
        ("width", lambda s: 0),
        ("height", lambda s: 20.0),
        ("near_plane", lambda s: -1.0),
        ("far_plane", lambda s: 0.0),
        ("radius_clip", lambda s: float("nan")),
        ("eps2d", lambda s: -0.3),
        ("sh_degree", lambda s: 4),
        ("render_mode", lambda s: "rgb"),
        ("rasterize_mode", lambda s: "sharp"),
        ("packed", lambda s: True),
        ("sparse_grad", lambda s: True),
        ("distributed", lambda s: True),
        ("camera_model", lambda s: "fisheye"),
        ("covars", lambda s: torch.zeros(10, 3, 3)),
        ("tile_size", lambda s: 8),
    ],
)
def test_errors_name_the_argument(name: str, change: Any) -> None:
    scene = make_scene(10, 20, 20)
    with pytest.raises(ValueError, match=rf"^{name}: "):
        rasterization(**{**scene, name: change(scene)})


def test_singular_view_matrix() -> None:
    scene = make_scene(10, 20, 20)
    with pytest.raises(ValueError, match="^viewmats: "):
        rasterization(**{**scene, "viewmats": torch.zeros(1, 4, 4)})


def test_broken_primitives_do_no_harm() -> None:
    """Rows that training drove to NaN or infinity, or to nothing, are left out or stay where they are."""
    scene = make_scene(60, 32, 32)
    expected, _, _ = rasterization(
        **{k: v[6:] if k in ("means", "quats", "scales", "opacities", "colors") else v for k, v in scene.items()}
    )
    scene["means"][0] = float("nan")
    scene["scales"][1] = float("nan")
    scene["quats"][2] = 0.0
    scene["opacities"][3] = float("nan")
    scene["opacities"][4] = 0.0
    scene["means"][5, 0] = float("inf")
    image, _, info = rasterization(**scene)
    assert torch.equal(image, expected)
    assert not info["radii"][0, [0, 1, 2, 5]].any()


def test_signature_is_that_of_gsplat() -> None:
    from gsplat import rasterization as original

    theirs, ours = inspect.signature(original).parameters, inspect.signature(rasterization).parameters
    assert list(theirs) == list(ours)
    for name in theirs:
        assert ours[name].default == (False if name == "packed" else theirs[name].default), name


def test_warm_up_is_idempotent() -> None:
    warm_up()
    lines: list[str] = []
    assert warm_up(lines.append) == 0.0 and not lines


def test_cold_compilation_is_announced(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from odin_nerfstudio.rendering.cpu import cache, warm

    monkeypatch.setattr(warm, "_warm", False)
    monkeypatch.setattr(cache, "cache_folder", lambda *_: (tmp_path, ""))
    lines: list[str] = []
    warm.warm_up(lines.append)
    assert len(lines) == 2 and lines[0].startswith("Compiling") and lines[1].startswith("Compiled")
    monkeypatch.setattr(warm, "_warm", False)
    warm.warm_up(lines.append)
    assert len(lines) == 2


def test_cache_folder_falls_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from odin_nerfstudio.rendering.cpu import cache

    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setattr(cache, "_candidates", lambda: [blocked, tmp_path / "user"])
    folder, remark = cache.cache_folder.__wrapped__()
    assert folder.parent == tmp_path / "user" and str(blocked) in remark
    monkeypatch.setattr(cache, "_candidates", lambda: [blocked])
    with pytest.raises(RuntimeError, match="NUMBA_CACHE_DIR"):
        cache.cache_folder.__wrapped__()


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_thread_count_is_checked(count: Any) -> None:
    with pytest.raises(ValueError, match="^count: "):
        set_render_threads(count)


def test_import_is_light() -> None:
    code = "import sys, odin_nerfstudio.rendering; print(sorted({'numba', 'gsplat', 'llvmlite'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_large_buffers_are_reused_only_when_free() -> None:
    from odin_nerfstudio.rendering.cpu import buffers

    first = buffers.empty((5_000_000,))
    address = first.ctypes.data
    tensor = torch.from_numpy(first).view(10, -1)[3]
    del first
    second = buffers.empty((5_000_000,))
    assert second.ctypes.data != address  # a tensor still looks at the first one
    del tensor
    assert buffers.empty((4_900_000,)).ctypes.data == address
