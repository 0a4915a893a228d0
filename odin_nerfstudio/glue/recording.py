"""Recordings of training runs (``--pipeline.odin.record``), for ``odin-simulate`` and ``odin-plan --trace``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.glue.odin_datamanager import OdinDataManager
from odin_nerfstudio.glue.planning import training_tracks
from odin_nerfstudio.planning.rlg import relative_locality_graph
from odin_nerfstudio.runtime.engine import Engine
from odin_nerfstudio.runtime.recorder import Recorder
from odin_nerfstudio.runtime.recording import (
    Recording,
    compress,
    load_recording,
    merge,
    pack_recording,
    save_recording,
)

FILE = "recording.npz"


def start_recording(engine: Engine, folder: Path | None) -> Recorder | None:
    """Has an engine's tasks recorded if a folder is given; call it after `Engine.on_step`."""
    return None if folder is None else Recorder(engine)


def finish_recording(
    recorder: Recorder | None, engine: Engine, datamanager: OdinDataManager, seed: int, folder: Path | None
) -> None:
    """Joins the ranks' parts; rank 0 writes the file. Collective: every rank calls it, after a drain."""
    if recorder is None or folder is None:
        return
    parts = engine.gather(pack_recording(recorder.part()))
    if parts is not None:
        write_recording(merge([load_recording(part) for part in parts]), engine, datamanager, seed, folder / FILE)


def write_recording(
    recording: Recording,
    engine: Engine,
    datamanager: OdinDataManager,
    seed: int,
    path: Path,
    block: int | None = None,
) -> Recording:
    """Adds the co-visibility graph, compresses the sets (see `compress`) and writes the file."""
    tracks = training_tracks(datamanager, seed)
    rlg = relative_locality_graph(tracks)
    recording.views = rlg.views
    weights = rlg.weights
    recording.rlg = {
        "indptr": weights.indptr, "indices": weights.indices, "data": weights.data, "unknown": rlg.unknown,
        "sizes": rlg.sizes,
    }  # fmt: skip
    scene = Path(str(datamanager.config.dataparser.data)).resolve().name
    recording.text |= {"source": rlg.source, "scene": scene}
    means = engine.tables[0].parameters["means"].detach().cpu().numpy().astype(np.float64)
    recording.means = means.astype(np.float32)
    recording = compress(recording, means, block)
    save_recording(recording, path)
    CONSOLE.log(
        f"Recording: {path} ({len(recording.sets)} of {recording.views} views, {path.stat().st_size / 1e6:.1f} MB; "
        f"odin-simulate --trace {path})",
        markup=False,
    )
    return recording
