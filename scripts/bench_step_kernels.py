"""Time the CPU kernels around the renderer against what they replace: photometric loss, Adam, candidate sets.

    OMP_NUM_THREADS=1 python scripts/bench_step_kernels.py [--capture FOLDER_WITH_sparse/0] [--clock cpu]

Prints the best of several runs, in milliseconds. With a capture, also the excess of the candidate sets over the rows
that gsplat makes visible, for the initial model of a training run (seed points, scales from neighbour distances).
On a machine that does other work too, compare processor time with one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.rendering.losses import photometric_loss
from odin_nerfstudio.runtime.adam import OdinAdam, publish_rows
from odin_nerfstudio.runtime.adam_motion import MotionBound
from odin_nerfstudio.runtime.candidates import ViewTest, candidate_ids, candidate_mask

BETAS = (0.9, 0.999)
FIELDS = {
    "means": (3,),
    "scales": (3,),
    "quats": (4,),
    "opacities": (1,),
    "features_dc": (3,),
    "features_rest": (15, 3),
}


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
clock = time.perf_counter


def best(work: Callable[[], object], runs: int) -> float:
    """Milliseconds of the fastest run, after one to warm up."""
    work()
    times = []
    for _ in range(runs):
        start = clock()
        work()
        times.append(clock() - start)
    return 1e3 * min(times)


def bench_loss(runs: int) -> None:
    from pytorch_msssim import SSIM

    similarity = SSIM(data_range=1.0, size_average=True, channel=3)

    def splatfacto(pred: Tensor, gt: Tensor, weight: float) -> Tensor:
        a, b = gt.permute(2, 0, 1)[None], pred.permute(2, 0, 1)[None]
        return (1 - weight) * torch.abs(gt - pred).mean() + weight * (1 - similarity(a, b))

    print("loss, forward + backward     fused   pytorch_msssim")
    for width, height in ((360, 270), (720, 540), (1440, 1080)):
        generator = torch.Generator().manual_seed(0)
        gt, pred = torch.rand(2, height, width, 3, generator=generator)

        def work(loss: Callable[[Tensor, Tensor, float], Tensor], pred: Tensor = pred, gt: Tensor = gt) -> None:
            loss(pred.clone().requires_grad_(), gt, 0.2).backward()

        fused, library = (best(lambda loss=loss: work(loss), runs) for loss in (photometric_loss, splatfacto))
        print(f"  {width:4d} x {height:4d}            {fused:8.1f} {library:12.1f}")


def bench_adam(rows: int, runs: int) -> None:
    print(f"Adam, {rows} rows x 59       fused    stock")
    for degree in (3, 2, 1, 0):
        times = []
        for cls in (OdinAdam, torch.optim.Adam):
            generator = torch.Generator().manual_seed(0)
            params = {k: torch.nn.Parameter(torch.randn(rows, *s, generator=generator)) for k, s in FIELDS.items()}
            for p in params.values():
                p.grad = torch.randn(p.shape, generator=generator)
                if p.dim() == 3:
                    p.grad[:, (degree + 1) ** 2 - 1 :] = 0
            optimizers = [cls([p], lr=1e-3, eps=1e-15) for p in params.values()]
            times.append(best(lambda optimizers=optimizers: [o.step() for o in optimizers], runs))
        print(f"  SH degree {degree}             {times[0]:8.1f} {times[1]:8.1f}")
    table, m, v = (torch.randn(rows, 45).abs() for _ in range(3))
    for share in (1.0, 0.3, 0.05):
        mask = torch.rand(rows, generator=torch.Generator().manual_seed(1)) < share
        grads = torch.randn(rows, 45)
        spent = best(lambda mask=mask, grads=grads: publish_rows(table, m, v, grads, mask, step=7, lr=1e-3), runs)
        drift = best(lambda mask=mask: publish_rows(table, m, v, None, mask, step=7, lr=1e-3), runs)
        print(f"  publish_rows, {share:4.0%} of rows x 45: {spent:6.1f}, without gradient {drift:6.1f}")


def bench_candidates(rows: int, runs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    means, log_scales = 3 * torch.randn(rows, 3, generator=generator), torch.randn(rows, 3, generator=generator) - 4
    view = ViewTest.of(torch.eye(4), torch.tensor([[600.0, 0, 360], [0, 600, 270], [0, 0, 1]]), 720, 540)
    motion = MotionBound.steady(1.6e-4, 5e-3, BETAS, 2)
    versions = (10 - torch.arange(rows) % 3).to(torch.int32)
    mask = best(lambda: candidate_mask(means, log_scales, view, motion, versions=versions, step=10, least_lag=1), runs)
    ids = best(lambda: candidate_ids(means, log_scales, view, motion, versions=versions, step=10, least_lag=1), runs)
    print(f"candidates of {rows} rows: mask {mask:.2f}, ids {ids:.2f}")


def report_excess(capture: Path) -> None:
    """Excess of the candidates over gsplat's visible rows, over all views of a COLMAP model."""
    import pycolmap
    from gsplat.cuda._torch_impl import _fully_fused_projection, _quat_scale_to_covar_preci
    from scipy.spatial import KDTree

    model = pycolmap.Reconstruction(str(capture / "sparse" / "0"))
    points = np.array([p.xyz for p in model.points3D.values()])
    poses = {i: image.cam_from_world() for i, image in model.images.items()}
    centers = np.array([-pose.rotation.matrix().T @ pose.translation for pose in poses.values()])
    middle, unit = centers.mean(0), np.abs(centers - centers.mean(0)).max()  # the unit of nerfstudio's scenes
    points = (points - middle) / unit
    distances = KDTree(points).query(points, k=4)[0]
    means = torch.tensor(points, dtype=torch.float32)
    log_scales = torch.tensor(np.log(distances[:, 1:].mean(1)), dtype=torch.float32)[:, None].repeat(1, 3)
    quats = torch.randn(len(points), 4, generator=torch.Generator().manual_seed(0))
    covars = _quat_scale_to_covar_preci(quats, log_scales.exp(), True, False)[0]
    assert covars is not None
    seen, missed, marked = 0, 0, dict.fromkeys((0, 1, 2, 4), 0)
    for i, pose in poses.items():
        camera = model.cameras[model.images[i].camera_id]
        viewmat = torch.eye(4)
        rotation = pose.rotation.matrix()
        viewmat[:3, :3] = torch.tensor(rotation)
        viewmat[:3, 3] = torch.tensor((pose.translation + rotation @ middle) / unit)
        K = torch.tensor(camera.calibration_matrix(), dtype=torch.float32)
        radii = _fully_fused_projection(means, covars, viewmat[None], K[None], camera.width, camera.height)[0][0]
        seen += int((radii > 0).sum())
        view = ViewTest.of(viewmat, K, camera.width, camera.height)
        for lag in marked:
            motion = MotionBound.steady(1.6e-4, 5e-3, BETAS, lag)
            mask, count = candidate_mask(means, log_scales, view, motion, least_lag=lag)
            marked[lag] += count
            missed += int(((radii > 0) & (mask == 0)).sum())
    print(f"{capture.name}: {seen / len(poses):.0f} of {len(points)} rows visible per view, {missed} missed")
    for lag, count in marked.items():
        print(f"  lag {lag}: {count / seen - 1:.2%} more candidates than visible rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", type=Path, help="folder of a COLMAP capture: report the excess of candidate sets")
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.clock]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), best of {options.runs}, {options.clock} ms")
    bench_loss(options.runs)
    bench_adam(options.rows, options.runs)
    bench_candidates(options.rows, options.runs)
    if options.capture is not None:
        report_excess(options.capture)


if __name__ == "__main__":
    main()
