"""The stages of CUDA devices against rasterization in one call: with references in the place of gsplat's kernels
against the CPU's rasterizers, and on a GPU against gsplat itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gsplat_reference
import pytest
import torch
from pretend_device import DEVICE, Pretended, pretend_device
from render_scenes import make_scene
from torch import Tensor

from odin_nerfstudio.rendering import device_stages, device_surfel_stages, rasterization, rasterization_2dgs, stages
from odin_nerfstudio.rendering.stages import Projection, StageView, ViewSplats
from odin_nerfstudio.rendering.surfel_stages import project_surfels, surfels_on
from odin_nerfstudio.runtime.sharded import packets
from odin_nerfstudio.runtime.sharded.packets import GradientPacket, SplatPacket

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LEAVES = ("means", "quats", "scales", "opacities", "colors")
WIDTH, HEIGHT, COUNT = 64, 40, 150
TOLERANCE = 2e-4
"""Relative to the largest value of a tensor, at least 1."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU with references, compared with the CPU's rasterizers; or a GPU, with gsplat on it in one call."""
    if request.param == "cpu":
        gsplat_reference.put_in_place(monkeypatch)
    return request.param


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gsplat_reference.put_in_place(monkeypatch)


def scene_on(device: str, **options: Any) -> dict[str, Any]:
    """A small scene seen from aside."""
    scene = make_scene(COUNT, WIDTH, HEIGHT, pixels=6.0, cameras=2, **options)
    scene["viewmats"], scene["Ks"] = scene["viewmats"][1:], scene["Ks"][1:]
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in scene.items()}


def view_of(scene: dict[str, Any], **options: Any) -> StageView:
    return StageView(scene["viewmats"][0].cpu(), scene["Ks"][0].cpu(), scene["width"], scene["height"], **options)


def assert_close(found: Tensor | None, expected: Tensor | None, name: str, tolerance: float = TOLERANCE) -> None:
    assert found is not None and expected is not None and found.shape == expected.shape, name
    error = (found - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    assert error <= tolerance, f"{name}: {error:.1e}"


def gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def loss(images: Sequence[Tensor | None], alphas: Tensor) -> Tensor:
    """A random weighting of images where the opacity is not small: a depth over it is ill-conditioned there."""
    g = torch.Generator().manual_seed(1)
    solid = (alphas.detach() > 0.1).squeeze(0)
    total = torch.zeros((), device=alphas.device)
    for image in (i for i in images if i is not None):
        weight = torch.randn(HEIGHT, WIDTH, image.shape[-1], generator=g).to(alphas.device)
        total = total + (image.view(HEIGHT, WIDTH, -1) * weight * solid).sum()
    return total


class Split:
    """A scene whose rows lie scattered over some owners, projected by each and merged."""

    def __init__(
        self, scene: dict[str, Any], parts: int, view: StageView, project: Any, kind: type[ViewSplats]
    ) -> None:
        owner = torch.arange(COUNT, device=scene["means"].device) * 7 % 13 % parts
        self.rows = [(owner == r).nonzero().flatten() for r in range(parts)]
        self.leaves = [{k: scene[k][rows].clone().requires_grad_() for k in LEAVES} for rows in self.rows]
        degree = scene["sh_degree"]
        self.projected: list[Projection] = [
            project(*[leaf[k] for k in LEAVES], sh_degree=degree, view=view) for leaf in self.leaves
        ]
        ids = torch.cat([rows[p.rows] for rows, p in zip(self.rows, self.projected)])
        self._order = torch.argsort(ids)
        self.ids = ids[self._order]
        self.splats: Any = kind(torch.cat([p.splats for p in self.projected])[self._order], view)

    def back(self) -> dict[str, Tensor]:
        """Takes gradients back to the owners; those of all leaves, and the sum of the cameras'."""
        given = torch.empty_like(self.splats.gradients())
        given[self._order] = self.splats.gradients()
        out = {k: given.new_zeros(COUNT, *self.leaves[0][k].shape[1:]) for k in LEAVES}
        sums = []
        for rows, leaf, p, mine in zip(
            self.rows, self.leaves, self.projected, given.split([len(p.rows) for p in self.projected])
        ):
            active = (mine != 0).any(1).nonzero().flatten()
            p.backward(active, mine[active])
            sums.append(p.camera_sums())
            for k in LEAVES:
                assert leaf[k].grad is not None
                out[k][rows] = leaf[k].grad
        if sums[0] is not None:
            out["viewmat"] = torch.stack(sums).sum(0)  # type: ignore[arg-type]
        return out


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("degree", "depth", "mode"), [(3, False, "classic"), (None, True, "antialiased")])
def test_gaussians_in_two_stages(device: str, parts: int, degree: int | None, depth: bool, mode: str) -> None:
    scene = scene_on(device, sh_degree=degree)
    clip = 4.0 if depth else 0.0
    background = torch.tensor([0.3, 0.6, 0.1], device=device)
    whole = {k: scene[k].clone().requires_grad_() for k in (*LEAVES, "viewmats")} | {
        "backgrounds": background[None].clone().requires_grad_()
    }
    expected, alphas, meta = rasterization(
        **{**scene, **whole}, render_mode="RGB+ED" if depth else "RGB", absgrad=True, rasterize_mode=mode,
        radius_clip=clip,
    )  # fmt: skip
    meta["means2d"].retain_grad()
    loss([expected, alphas], alphas).backward()
    visible = meta["radii"][0] > 0

    view = view_of(scene, radius_clip=clip, with_depth=depth, antialiased=mode == "antialiased", trained=True)
    split = Split(scene, parts, view, device_stages.project, device_stages.DeviceSplats)
    assert torch.equal(split.ids, visible.nonzero().flatten()) and 0 < len(split.ids) < COUNT
    behind = background.clone().requires_grad_()
    image, opacities, info = split.splats.rasterize(behind, absgrad=True, expected_depth=depth)
    solid = alphas.detach() > (0.1 if depth else -1)
    assert_close(image * solid, expected.detach() * solid, "image")
    assert_close(opacities, alphas.detach(), "alphas")
    loss([image, opacities], alphas).backward()
    assert torch.equal(info["radii"][0], meta["radii"][0, visible])
    assert (info["width"], info["height"], info["n_cameras"]) == (WIDTH, HEIGHT, 1)
    assert_close(info["means2d"].grad[0], meta["means2d"].grad[0, visible], "means2d")
    assert_close(info["means2d"].absgrad[0], meta["means2d"].absgrad[0, visible], "absgrad")
    assert_close(behind.grad, gradient_of(whole["backgrounds"])[0], "background")
    found = split.back()
    for name in LEAVES:
        assert_close(found[name], whole[name].grad, name)
    turned = stages.viewmat_gradient(found["viewmat"], view)
    assert turned.dtype == torch.float32
    assert_close(turned[:3], gradient_of(whole["viewmats"])[0, :3].cpu(), "viewmat")


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("degree", "depth", "depth_mode"), [(3, False, "expected"), (None, True, "median")])
def test_surfels_in_two_stages(device: str, parts: int, degree: int | None, depth: bool, depth_mode: str) -> None:
    scene = scene_on(device, sh_degree=degree)
    whole = {k: scene[k].clone().requires_grad_() for k in LEAVES}
    results: Any = rasterization_2dgs(
        **{**scene, **whole}, render_mode="RGB+ED" if depth else "RGB", depth_mode=depth_mode, distloss=depth
    )
    *expected, meta = results
    used = len(expected) if depth else 3
    loss(expected[:used], expected[1]).backward()
    visible = meta["radii"][0] > 0

    view = view_of(scene, with_depth=depth)
    kind = device_surfel_stages.DeviceSurfelSplats
    split = Split(scene, parts, view, device_surfel_stages.project_surfels, kind)
    assert torch.equal(split.ids, visible.nonzero().flatten()) and 0 < len(split.ids) < COUNT
    *images, info = split.splats.rasterize(expected_depth=depth, depth_mode=depth_mode)
    solid = (expected[1].detach() > 0.1).squeeze(0)
    for k, (image, one) in enumerate(zip(images[:used], expected[:used])):
        assert_close(image.view(HEIGHT, WIDTH, -1) * solid, one.detach().view(HEIGHT, WIDTH, -1) * solid, f"image {k}")
    loss(images[:used], expected[1]).backward()
    assert torch.equal(info["radii"][0], meta["radii"][0, visible])
    if device == "cpu":  # gsplat reads it while other threads still add to it
        assert_close(info["gradient_2dgs"].grad[0], meta["gradient_2dgs"].grad[0, visible], "gradient_2dgs")
    for name, gradient in split.back().items():
        assert_close(gradient, whole[name].grad, name)


@pytest.mark.parametrize(
    ("project", "kind"),
    [
        (device_stages.project, device_stages.DeviceSplats),
        (device_surfel_stages.project_surfels, device_surfel_stages.DeviceSurfelSplats),
    ],
)
def test_nothing_visible(device: str, project: Any, kind: Any) -> None:
    scene = scene_on(device, sh_degree=0)
    view = view_of(scene)
    scene["means"] = scene["means"] * -1
    p = project(*[scene[k].clone().requires_grad_() for k in LEAVES], sh_degree=0, view=view)
    splats = kind(p.splats, view)
    image = splats.rasterize(torch.full((3,), 0.5, device=device))[0]
    assert p.rows.shape == (0,) and bool((image == 0.5).all())
    image.sum().backward()
    assert splats.gradients().shape == (0, kind.gradient_columns)
    with pytest.raises(ValueError, match="splats"):
        kind(torch.zeros(3, 4), view)
    with pytest.raises(ValueError, match="3 channels"):
        colors = torch.zeros(COUNT, 4, device=device)
        project(*[scene[k] for k in LEAVES[:-1]], colors, sh_degree=None, view=view)


@pytest.mark.usefixtures("_kernels")
def test_the_device_decides() -> None:
    scene = scene_on("cpu", sh_degree=1)
    view = view_of(scene, with_depth=True)
    with pretend_device():
        inputs = [scene[k].to(DEVICE) for k in LEAVES]
        for project, kind_on in ((stages.project, stages.splats_on), (project_surfels, surfels_on)):
            p = project(*inputs, sh_degree=1, view=view)
            kind = kind_on(DEVICE)
            assert isinstance(p.splats, Pretended) and p.splats.shape[1] == kind.columns
            images = kind(p.splats, view).rasterize()
            assert all(isinstance(i, Pretended) for i in images[:-1])
            assert kind_on(torch.device("cpu")) is not kind


def test_packets_come_apart_and_together_as_on_the_cpu() -> None:
    g = torch.Generator().manual_seed(0)
    sent = SplatPacket(7, 2, torch.tensor([3, 8, 40], dtype=torch.int32), torch.randn(3, 11, generator=g))
    rows = torch.tensor([0, 31, 63, 69])
    for norms in (None, torch.rand(4, generator=g)):
        back = GradientPacket(7, 2, 70, rows, torch.randn(4, 10, generator=g), norms)
        with pretend_device():
            splats = SplatPacket(7, 2, sent.ids.to(DEVICE), sent.splats.to(DEVICE))
            gradients = GradientPacket(
                7, 2, 70, rows.to(DEVICE), back.gradients.to(DEVICE), None if norms is None else norms.to(DEVICE)
            )
            for one, (head, body) in (
                (packets.encode_splats(sent), packets.encode_splats_apart(splats)),
                (packets.encode_gradients(back), packets.encode_gradients_apart(gradients)),
            ):
                assert isinstance(body, Pretended) and torch.equal(torch.cat((head, body.cpu())), one)
            got = packets.decode_splats(*packets.encode_splats_apart(splats))
            assert torch.equal(got.ids.cpu(), sent.ids) and torch.equal(got.splats.cpu(), sent.splats)
            found = packets.decode_gradients(*packets.encode_gradients_apart(gradients))
            assert torch.equal(found.rows.cpu(), rows) and torch.equal(found.gradients.cpu(), back.gradients)
            assert (found.norms is None) == (norms is None)
            with pytest.raises(RuntimeError, match="words"):
                packets.decode_splats(head, body[:-1])
