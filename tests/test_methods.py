"""Every registered method: its options train, what it cannot do is refused, and the contract holds with 1 to 4 ranks.

E1 quality equals barrier, E2 the number of ranks does not change the result, E4 resume is exact: for odin-splatfacto in
test_ranks.py, for the others and for a method from outside the package here. E3: the parts of the MCMC strategy equal
gsplat's in test_mcmc.py, and a training equals a plain loop below.
"""

from __future__ import annotations

import importlib.machinery
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any, cast
from urllib.error import URLError

import numpy as np
import pytest
import torch
from forked_ranks import run_on_ranks
from own_method import odin_glow
from PIL import Image
from training import differences, latest, sample_scene, small_config, train

from odin_nerfstudio.glue.lpips_metric import OptionalLpips
from odin_nerfstudio.glue.model_options import refusal
from odin_nerfstudio.glue.odin_trainer import OdinTrainer
from odin_nerfstudio.glue.splats import ROW_FIELDS, OdinSplats
from odin_nerfstudio.runtime.keyed import keyed_randomness

pytestmark = pytest.mark.timeout(900)  # the fixture runs ten trainings

STEPS = 40
LANES = 4
METHODS = ("odin-splatfacto", "odin-splatfacto-big", "odin-splatfacto-mcmc", "odin-splatfacto-aa", "odin-2dgs")
RANKS: dict[str, Any] = {
    "pipeline__odin__views_per_step": LANES,
    "pipeline__odin__debug": True,
    "pipeline__model__num_downscales": 0,
}
MCMC: dict[str, Any] = {
    **RANKS,
    "method": "odin-splatfacto-mcmc",
    "pipeline__model__warmup_length": 5,
    "pipeline__model__refine_every": 10,
    "pipeline__model__max_gs_num": 450,
    "pipeline__model__cull_alpha_thresh": 0.08,  # some are dead after so few steps
    "pipeline__model__use_scale_regularization": True,
}
AA: dict[str, Any] = {
    **RANKS,
    "method": "odin-splatfacto-aa",
    "pipeline__model__smooth_3d": True,
    "pipeline__model__warmup_length": 5,
    "pipeline__model__refine_every": 10,
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_scene(tmp_path_factory.mktemp("scene"), views=16, size="64x48", points=400)


@pytest.fixture(scope="module")
def masked(scene: Path) -> Path:
    """The scene with masks, and with images that are transparent at a side."""
    folder = scene.parent / "masked"
    shutil.copytree(scene, folder)
    transforms = json.loads((folder / "transforms.json").read_text())
    for number, frame in enumerate(transforms["frames"]):
        image = np.array(Image.open(folder / frame["file_path"]).convert("RGBA"))
        image[:, -16:, 3] = 100
        mask = np.full(image.shape[:2], 255, np.uint8)
        mask[:10] = 0
        frame["file_path"], frame["mask_path"] = f"rgba/{number:03d}.png", f"masks/{number:03d}.png"
        for name, array in ((frame["file_path"], image), (frame["mask_path"], mask)):
            (folder / name).parent.mkdir(exist_ok=True)
            Image.fromarray(array).save(folder / name)
    (folder / "transforms.json").write_text(json.dumps(transforms))
    return folder


# Options --------------------------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "camera_optimizer__mode": "SO3xR3",
    "use_bilateral_grid": True,
    "grid_shape": (4, 4, 2),
    "use_scale_regularization": True,
    "output_depth_during_training": True,
    "num_downscales": 2,
    "resolution_schedule": 4,
    "sh_degree_interval": 3,
    "stop_screen_size_at": 10,
    "split_screen_size": 0.3,
    "cull_screen_size": 0.6,
}
OTHER: dict[str, Any] = {
    "random_init": True,
    "num_random": 300,
    "random_scale": 2.0,
    "background_color": "white",
    "sh_degree": 0,
    "use_absgrad": False,
    "rasterize_mode": "antialiased",
    "color_corrected_metrics": True,
}
SHORT: dict[str, Any] = {"warmup_length": 2, "refine_every": 4, "reset_alpha_every": 2, "cull_alpha_thresh": 0.05}
OF_METHOD: dict[str, dict[str, Any]] = {
    "odin-splatfacto-aa": {"smooth_3d": True},
    "odin-2dgs": {
        **{"normal_start_iter": 3, "distortion_lambda": 0.01, "distortion_start_iter": 3, "depth_mode": "median"},
        **{"camera_optimizer__mode": "off", "rasterize_mode": "classic"},  # refused, see test_2dgs.py
    },
}
"""Also this, where a method differs."""


@pytest.mark.parametrize("method", METHODS)
def test_every_option_trains_with_every_method(scene: Path, masked: Path, tmp_path: Path, method: str) -> None:
    """Two short runs between them use all options; structural steps inside. One is then evaluated and exported."""
    for name, data, options in (("everything", masked, EVERYTHING), ("other", scene, OTHER)):
        more = OF_METHOD.get(method, {})
        given = {f"pipeline__model__{key}": value for key, value in (SHORT | options | more).items()}
        trainer = train(small_config(data, tmp_path, 12, method=method, timestamp=name, **given))
        model = trainer.pipeline.splats
        for key, value in model.state_dict().items():
            assert torch.isfinite(value).all(), key
        assert model.strategy.acts_at(8)
        if options is EVERYTHING:
            assert model.sh_degree_at(11) == 3 and model.downscale_at(11) == 1 and model.downscale_at(0) == 4
            if method != "odin-2dgs":
                assert float(model.camera_optimizer.pose_adjustment.detach().abs().max()) > 0
            assert float(model.bil_grids.grids.detach().std()) > 0
            metrics = trainer.pipeline.get_average_eval_image_metrics()
            assert evaluated(trainer.base_dir)["psnr"] == pytest.approx(metrics["psnr"], rel=1e-5)
            rows = exported(trainer.base_dir)
            assert 0 < len(rows["scale_0"]) <= model.num_points
            for axis in range(3):  # nothing is transparent enough to be left out
                torch.testing.assert_close(rows[f"scale_{axis}"], model.eval().scales.detach()[:, axis])
        else:
            assert model.gauss_params["features_rest"].numel() == 0
            assert trainer.pipeline.get_average_eval_image_metrics()["psnr"] > 5


def evaluated(run: Path) -> dict[str, float]:
    """What ns-eval says of a run."""
    from nerfstudio.scripts.eval import ComputePSNR

    ComputePSNR(load_config=run / "config.yml", output_path=run / "metrics.json").main()
    return json.loads((run / "metrics.json").read_text())["results"]


def exported(run: Path) -> dict[str, torch.Tensor]:
    """The columns of the PLY that ns-export writes. ``[N]`` each"""
    from nerfstudio.scripts.exporter import ExportGaussianSplat

    ExportGaussianSplat(load_config=run / "config.yml", output_dir=run).main()
    header, body = (run / "splat.ply").read_bytes().split(b"end_header\n", 1)
    names = [line.split()[-1].decode() for line in header.splitlines() if line.startswith(b"property float")]
    columns = torch.frombuffer(bytearray(body), dtype=torch.float32).reshape(-1, len(names)).T
    return dict(zip(names, columns))


@pytest.mark.parametrize("sh_degree", [1, 2])
def test_degrees_of_harmonics_between(scene: Path, tmp_path: Path, sh_degree: int) -> None:
    given = {"pipeline__model__sh_degree": sh_degree, "pipeline__model__sh_degree_interval": 2}
    model = train(small_config(scene, tmp_path, 8, **given)).pipeline.splats
    rest = model.gauss_params["features_rest"].detach()
    assert rest.shape[1] == (sh_degree + 1) ** 2 - 1 and bool((rest != 0).any(0).all()), "all bands are trained"


def test_what_cannot_be_honoured_is_refused_with_the_reason(scene: Path, tmp_path: Path) -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("camera_optimizer__mode", "SE3", "use SO3xR3"),
        ("sh_degree", 4, "degree 0 to 3"),
        ("resolution_schedule", 0, "at least 1"),
        ("refine_every", 0, "at least 1"),
        ("num_downscales", -1, "must not be negative"),
    ]
    for name, value, reason in wrong:
        config = small_config(scene, tmp_path, 5, **{f"pipeline__model__{name}": value})
        with pytest.raises(SystemExit, match=reason):
            config.set_timestamp()
    config = small_config(scene, tmp_path, 5, pipeline__model__use_bilateral_grid=True)
    config.pipeline.model.grid_shape = (16, 16, 1)
    assert "total variation" in (refusal(config.pipeline.model) or "")
    assert all(refusal(small_config(scene, tmp_path, 5, method=m).pipeline.model) is None for m in METHODS)


def test_thresholds_reach_the_strategy_and_those_without_a_meaning_are_named(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Densification settings are gsplat's strategy's; MCMC has another, and the log says what it does not use."""
    names = {
        **{"cull_alpha_thresh": "prune_opa", "cull_scale_thresh": "prune_scale3d", "cull_screen_size": "prune_scale2d"},
        **{"densify_grad_thresh": "grow_grad2d", "densify_size_thresh": "grow_scale3d"},
        **{"split_screen_size": "grow_scale2d", "stop_screen_size_at": "refine_scale2d_stop_iter"},
        **{"warmup_length": "refine_start_iter", "stop_split_at": "refine_stop_iter", "refine_every": "refine_every"},
    }
    given = {f"pipeline__model__{name}": 11 + number for number, name in enumerate(names)}
    given["pipeline__model__num_random"] = 100
    for method in ("odin-splatfacto", "odin-2dgs", "odin-splatfacto-mcmc"):
        config = small_config(scene, tmp_path, 5, method=method, **given)
        config.set_timestamp()
        said = capsys.readouterr().out.replace("\n", " ")
        if method == "odin-splatfacto-mcmc":
            for option in ("cull-scale-thresh", "densify-grad-thresh", "stop-screen-size-at", "reset-alpha-every"):
                assert option in said
            assert "no use for" in said and "warmup-length" not in said
            continue
        assert "no use for" not in said
        model = config.pipeline.model.setup(scene_box=None, num_train_data=1, metadata={}, device="cpu")
        for number, theirs in enumerate(names.values()):
            assert getattr(model.strategy, theirs) == 11 + number, theirs


def test_lpips_is_there_where_its_weights_are_and_missing_ones_are_told_once(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torchmetrics.functional.image.lpips as functional
    import torchvision

    def no_network(*_: Any, **__: Any) -> Any:
        raise URLError("no network")

    config = small_config(scene, tmp_path, 1, pipeline__model__num_random=100)
    model = config.pipeline.model.setup(scene_box=None, num_train_data=1, metadata={}, device="cpu").eval()
    image = torch.rand(64, 64, 3, generator=torch.Generator().manual_seed(0))
    pair = ({"rgb": image.flip(0), "background": torch.zeros(3)}, {"image": image})
    monkeypatch.setattr(functional, "_get_tv_model_features", no_network)
    for _ in range(2):
        metrics, _ = model.get_image_metrics_and_images(*pair)
        assert {"psnr", "ssim"} <= set(metrics) and "lpips" not in metrics
    assert capsys.readouterr().out.count("LPIPS is left out") == 1

    def random_weights(net: str, pretrained: bool) -> Any:
        assert net == "alexnet" and pretrained
        return torchvision.models.alexnet(weights=None).features

    monkeypatch.setattr(functional, "_get_tv_model_features", random_weights)
    model.lpips = OptionalLpips()
    metrics, _ = model.get_image_metrics_and_images(*pair)
    assert metrics["lpips"] > 0 and "st_lpips" not in metrics


def test_st_lpips_stands_in_where_lpips_has_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("stlpips_pytorch")
    package.__spec__ = importlib.machinery.ModuleSpec("stlpips_pytorch", None)
    package.stlpips = types.SimpleNamespace(LPIPS=_Difference)  # type: ignore[attr-defined]
    metric, black, grey = OptionalLpips(), torch.zeros(4, 4, 3), torch.full((4, 4, 3), 0.25)
    assert metric.substitute(black, grey) is None, "LPIPS was not found wanting"
    metric._unavailable = True
    monkeypatch.setitem(sys.modules, "stlpips_pytorch", package)
    assert metric.substitute(black, grey) == 0.25


class _Difference(torch.nn.Module):
    """Stands in for the network of stlpips-pytorch."""

    def __init__(self, net: str, variant: str, verbose: bool) -> None:
        super().__init__()

    def forward(self, one: torch.Tensor, other: torch.Tensor, normalize: bool) -> torch.Tensor:
        assert one.shape == (1, 3, 4, 4) and normalize
        return (one - other).abs().mean()


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(scene: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs of all runs, by name."""
    root = tmp_path_factory.mktemp("runs")

    def job(name: str, steps: int, **options: Any) -> tuple[Path, Path, int, dict[str, Any]]:
        return scene, root / name, steps, options

    barrier, glow = {"pipeline__odin__mode": "barrier"}, {**RANKS, "method": odin_glow.config}
    parts = {"half": MCMC, "half-aa": AA}
    of_one = [job(f"1{name}", STEPS, **given, **barrier) for name, given in (("", MCMC), ("-aa", AA), ("-glow", glow))]
    run_on_ranks(1, of_one, root / "log-1")
    halves = [job(f"2-{name}", STEPS // 2, **given) for name, given in parts.items()]
    run_on_ranks(2, [job("2", STEPS, **MCMC), job("2-glow", STEPS, **glow), *halves], root / "log-2")
    resumed = [
        job(f"3-{name}", STEPS - STEPS // 2, load_dir=next((root / f"2-{name}").rglob("nerfstudio_models")), **given)
        for name, given in parts.items()
    ]
    run_on_ranks(3, resumed, root / "log-3")
    run_on_ranks(4, [job("4", STEPS, **MCMC)], root / "log-4")
    return {path.name: path for path in root.iterdir()}


def test_mcmc_is_the_same_in_every_mode_on_every_number_of_ranks_and_resumed(results: dict[str, Path]) -> None:
    reference = latest(results["1"])
    assert reference["step"] == STEPS - 1
    assert len(reference["pipeline"]["_model.gauss_params.means"]) == 450, "grown to the cap"
    for name in ("2", "3-half", "4"):
        assert differences(reference, latest(results[name])) == [], name


def test_the_smoothing_filter_is_the_same_on_three_ranks_and_resumed(results: dict[str, Path]) -> None:
    one = latest(results["1-aa"])
    assert float(one["pipeline"]["_model.gauss_params.sampling_interval"].min()) > 0
    assert differences(one, latest(results["3-half-aa"])) == []


def test_a_method_from_outside_the_package_is_the_same_on_two_ranks(results: dict[str, Path]) -> None:
    one = latest(results["1-glow"])
    weights = one["pipeline"]
    assert float(weights["_model.gauss_params.glow"].abs().max()) > 0
    assert float((weights["_model.tone.weight"] - torch.eye(3)).abs().max()) > 0
    assert differences(one, latest(results["2-glow"])) == []


def padded(rows: torch.Tensor, filler: torch.Tensor) -> torch.Tensor:
    """Rows up to a multiple of 64, so that torch's kernels see no tail."""
    return torch.cat((rows, filler.expand(-len(rows) % 64, *rows.shape[1:])))


def test_e3_mcmc_equals_a_plain_loop(scene: Path, tmp_path: Path) -> None:
    """Gradients accumulated over the lanes on the whole model, stock Adam, noise for all rows, then the strategy."""
    trainers = []
    for name in ("ours", "plain"):
        options = {**MCMC, "pipeline__odin__views_per_step": 2, "pipeline__odin__scale_schedule": False}
        config = small_config(scene, tmp_path / name, 25, **options)
        config.set_timestamp()
        trainers.append(OdinTrainer(config))
        trainers[-1].setup()
    ours, plain = trainers
    ours.train()
    model, table = cast(OdinSplats, plain.pipeline.splats), plain.runner.engine.tables[0]
    rows, seed = cast(dict[str, torch.Tensor], model.gauss_params), plain.pipeline.seed
    optimizers: dict[str, torch.optim.Optimizer] = {
        name: torch.optim.Adam([rows[name]], lr=1.0, eps=1e-15) for name in ROW_FIELDS
    }
    model.optimizers = optimizers
    assert table.noise is not None and table.padding is not None
    for step in range(25):
        model.step = step
        for lane in range(2):
            model.task = (seed, step, lane)
            view = plain.runner.plan.view(step, lane)
            camera, batch = plain.pipeline.datamanager.train_view(view)
            filler = table.padding(view)
            leaves = {f"gauss_params.{k}": padded(v, filler[k]) for k, v in rows.items()}
            (model.image_loss(torch.func.functional_call(model, leaves, (camera,)), batch) / 2).backward()
        for term in table.dense_terms:
            if term.due(step):
                values = {k: padded(v.detach(), torch.zeros(v.shape[1:])) for k, v in rows.items()}
                for name, gradient in term.gradient(step, len(rows["means"]), values).items():
                    rows[name].grad += gradient[: len(rows[name])]
        for name, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = table.schedule(step)[name]
            optimizer.step()
            optimizer.zero_grad()
        table.noise.add(step, None)
        with keyed_randomness(seed, step, torch.device("cpu")):
            model.surgery(step)
    assert len(rows["means"]) > 401, "the plain loop grows"
    for name in ROW_FIELDS:
        assert torch.equal(ours.pipeline.splats.gauss_params[name], rows[name]), name
