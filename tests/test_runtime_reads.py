"""The read rule of primitives: complete where poses are trained and copies lag."""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio.rendering.rasterizer import rasterization
from odin_nerfstudio.runtime.candidates import ViewTest
from odin_nerfstudio.runtime.reads import PoseMotion, VisibilityReads, behind_camera
from odin_nerfstudio.runtime.store import RowTable, ViewRow

WIDTH, HEIGHT = 96, 64
RATES = {"means": 2e-3, "scales": 5e-3}
POSE_RATE = 1e-3


def small_rotation(w: Tensor) -> Tensor:
    """Rotation of a rotation vector. [3] -> [3, 3]."""
    skew = torch.tensor([[0.0, -w[2], w[1]], [w[2], 0.0, -w[0]], [-w[1], w[0], 0.0]])
    return torch.linalg.matrix_exp(skew.double()).float()


def moved(viewmat: Tensor, row: Tensor) -> Tensor:
    """World to camera after nerfstudio's correction of the camera-to-world matrix, ``c2w @ delta``."""
    delta = torch.eye(4)
    delta[:3, :3], delta[:3, 3] = small_rotation(row[3:]), row[:3]
    return torch.linalg.inv(delta) @ viewmat


def radii_of(means: Tensor, scales: Tensor, quats: Tensor, viewmat: Tensor, K: Tensor) -> Tensor:
    n = means.shape[0]
    info = rasterization(
        means, quats, torch.exp(scales), torch.full((n,), 0.5), torch.rand(n, 3), viewmat[None], K[None], WIDTH, HEIGHT
    )[2]
    return info["radii"].reshape(-1)


def test_nothing_visible_is_missed_while_poses_and_rows_lag() -> None:
    g = torch.Generator().manual_seed(5)
    K = torch.tensor([[80.0, 0.0, 48.0], [0.0, 80.0, 32.0], [0.0, 0.0, 1.0]])
    missed = marked_total = visible_total = 0
    for _ in range(30):
        n = 1500
        means = (torch.rand(n, 3, generator=g) - 0.5) * torch.tensor([6.0, 6.0, 8.0])
        scales = torch.log(0.005 + 0.2 * torch.rand(n, 3, generator=g) ** 4)
        quats = torch.randn(n, 4, generator=g)
        viewmat = torch.eye(4)
        viewmat[:3, :3] = small_rotation(torch.randn(3, generator=g))
        viewmat[:3, 3] = torch.randn(3, generator=g)
        pose = torch.nn.Parameter(torch.zeros(4, 6))
        adam = torch.optim.Adam([pose], lr=POSE_RATE)
        table = RowTable("cameras", {"pose": pose}, {"pose": adam}, ViewRow(), lambda step: {"pose": POSE_RATE})
        table.versions.fill_(8)
        motion = PoseMotion(table, "pose")
        rule = VisibilityReads(
            {"means": means, "scales": scales},
            lambda step: RATES,
            lambda step, view, at=viewmat: ViewTest.of(at, K, WIDTH, HEIGHT),
            pose=motion,
        )
        versions = torch.randint(8, 11, (n,), generator=g, dtype=torch.int32)
        out = torch.zeros(n, dtype=torch.uint8)
        marked_total += rule.mark(10, 2, versions, 0, out)
        # what the missing updates may have done: rows by their bound, the pose by its own
        bound = rule.motion(10)
        lag = (10 - versions).long()
        reach = torch.from_numpy(bound.means)[lag][:, None]
        grow = torch.from_numpy(bound.log_scales)[lag][:, None]
        pose_reach = motion.reach(10, 2, 0)
        for kind in range(3):
            if kind == 0:
                step = (torch.rand(n, 3, generator=g) * 2 - 1).sign()
            else:
                step = torch.rand(n, 3, generator=g) * 2 - 1
            row = torch.randn(6, generator=g)
            row[:3] *= pose_reach / row[:3].norm()
            row[3:] *= pose_reach / row[3:].norm()
            radii = radii_of(means + reach * step, scales + grow * step.abs(), quats, moved(viewmat, row), K)
            visible_total += int((radii > 0).sum())
            missed += int(((radii > 0) & (out == 0)).sum())
    assert missed == 0
    assert visible_total > 10_000 and marked_total < 0.3 * 30 * 1500  # neither empty nor everything


def test_a_pose_that_lacks_nothing_adds_nothing() -> None:
    pose = torch.nn.Parameter(torch.zeros(4, 6))
    table = RowTable(
        "cameras", {"pose": pose}, {"pose": torch.optim.Adam([pose])}, ViewRow(), lambda step: {"pose": POSE_RATE}
    )
    table.versions.fill_(10)
    assert PoseMotion(table, "pose").reach(10, 0, 0) == 0.0
    assert PoseMotion(table, "pose").reach(10, 0, 1) > 0.0


def test_the_padding_point_is_behind_the_camera() -> None:
    g = torch.Generator().manual_seed(1)
    viewmat = torch.eye(4)
    viewmat[:3, :3] = small_rotation(torch.randn(3, generator=g))
    viewmat[:3, 3] = torch.randn(3, generator=g)
    point = viewmat[:3, :3] @ behind_camera(viewmat) + viewmat[:3, 3]
    assert torch.allclose(point, torch.tensor([0.0, 0.0, -1.0]), atol=1e-5)
