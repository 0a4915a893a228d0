"""From nerfstudio's dataset to a plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from nerfstudio.data.dataparsers.base_dataparser import DataParserConfig
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.utils import comms
from nerfstudio.utils.rich_utils import CONSOLE
from scipy import sparse

from odin_nerfstudio.glue.cameras import view_geometry
from odin_nerfstudio.glue.odin_datamanager import OdinDataManager
from odin_nerfstudio.glue.odin_options import OdinOptions
from odin_nerfstudio.planning.rlg import Rlg, relative_locality_graph
from odin_nerfstudio.planning.schedule import Plan, make_plan
from odin_nerfstudio.planning.tracks import Tracks, find_model, tracks_for_dataset


def model_folder(dataparser: DataParserConfig) -> Path | None:
    """The COLMAP model that belongs to the data of a dataparser, if there is one."""
    if isinstance(dataparser, ColmapDataParserConfig):
        return dataparser.data / dataparser.colmap_path
    return find_model(dataparser.data)


def training_tracks(datamanager: OdinDataManager, seed: int) -> Tracks:
    """Which training view observes which point, in the order of nerfstudio's training split."""
    dataset = datamanager.train_dataset
    points = datamanager.train_dataparser_outputs.metadata.get("points3D_xyz")
    return tracks_for_dataset(
        [str(path) for path in dataset.image_filenames],
        model_folder(datamanager.config.dataparser),
        view_geometry(dataset.cameras),
        None if points is None else points.numpy(force=True),
        seed=seed,
    )


def plan_for(
    datamanager: OdinDataManager, options: OdinOptions, seed: int, ranks: int = 1, views_per_step: int = 1
) -> Plan:
    """The plan of a training run; says in the log what it rests on.

    The order is made for as many ranks as there are lanes, so that it is the same for every number of ranks.
    """
    views, order = len(datamanager.train_dataset), options.planned_order
    log = CONSOLE.log if comms.is_main_process() else (lambda _text: None)
    if views_per_step == 1:
        # One task at a time conflicts with nothing: no tracks are needed, and views are shuffled.
        none = sparse.csr_matrix((views, views), dtype=np.float32)
        rlg = Rlg(none, unknown=np.zeros(views, bool), sizes=np.ones(views, np.int64))
        log(f"Plan: {views} views, shuffled anew in every epoch (seed {seed})")
    else:
        tracks = training_tracks(datamanager, seed)
        rlg = relative_locality_graph(tracks)
        statistics = rlg.statistics()
        log(
            f"Plan: {views} views, order {order}, co-visibility from {tracks.source}: {tracks.points} points, "
            f"mean weight {statistics['mean']:.3f}, {100 * statistics['zero_share']:.0f} % of view pairs share nothing"
        )
    return make_plan(
        rlg,
        ranks=ranks,
        plan_ranks=views_per_step,
        views_per_step=views_per_step,
        seed=seed,
        order=order,
        max_delay=options.max_delay,
        turn_every=max(1, views // views_per_step) if options.turn_lanes else 0,
    )
