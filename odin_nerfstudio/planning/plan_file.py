"""Plans as files: .npz to load again, .json to read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from scipy import sparse

from odin_nerfstudio.planning.rlg import Rlg
from odin_nerfstudio.planning.schedule import Plan, restore_plan
from odin_nerfstudio.planning.template import Template
from odin_nerfstudio.planning.turns import Turns

FORMAT = 1
_SETTINGS = ("ranks", "plan_ranks", "views_per_step", "seed", "order", "max_delay", "steps", "diversity", "turn_every")


def save_plan(plan: Plan, path: Path, epochs: int | None = None) -> None:
    """Write a plan, with its first epochs as they are.

    Args:
        plan: The plan.
        path: ``.npz``, which :func:`load_plan` reads, or ``.json``: settings and, per step, views, ranks, predicted
            conflicts and windows.
        epochs: Epochs to write; default all those of a plan with an end, at most 64, else one.

    Raises:
        ValueError: The file has another suffix.
    """
    path = Path(path)
    if epochs is None:
        epochs = 1 if plan.steps is None else min(64, -(-plan.steps * plan.views_per_step // plan.views))
    settings = {name: getattr(plan, name) for name in _SETTINGS} | {"format": FORMAT, "source": plan.rlg.source}
    if path.suffix == ".json":
        steps = epochs * plan.views // plan.views_per_step
        steps = steps if plan.steps is None else min(steps, plan.steps)
        rows = [plan.step(s) for s in range(steps)]
        table = [
            {
                "views": row.views.tolist(),
                "ranks": row.ranks.tolist(),
                "conflict": np.round(row.conflict.astype(float), 4).tolist(),
                "window": row.window.tolist(),
            }
            for row in rows
        ]
        path.write_text(json.dumps(settings | {"views": plan.views, "plan": table}) + "\n", encoding="utf-8")
    elif path.suffix == ".npz":
        orders = np.stack([plan.epoch_order(e) for e in range(epochs)]) if epochs else np.zeros((0, plan.views))
        weights, turns = plan.rlg.weights, plan.template.turns
        with path.open("wb") as file:
            np.savez_compressed(
                file, settings=np.array(json.dumps(settings | {"importance": plan.rlg.importance})),
                indptr=weights.indptr, indices=weights.indices, data=weights.data, unknown=plan.rlg.unknown,
                sizes=plan.rlg.sizes, load=plan.load, rank=plan.template.rank, step=plan.template.step,
                turn_steps=turns.steps, turn_seam=turns.seam, orders=orders.astype(np.int64),
            )  # fmt: skip
    else:
        raise ValueError(f"cannot write a plan to {path}: use .npz (to load again) or .json (to read)")


def load_plan(path: Path) -> Plan:
    """Read a plan written by :func:`save_plan`. The epochs in the file are used as they are; later ones are made.

    Raises:
        ValueError: The file is no plan, or one of another format.
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {name: file[name] for name in file.files}
        settings = json.loads(str(data["settings"]))
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a plan written by save_plan as .npz ({error})") from error
    if settings["format"] != FORMAT:
        raise ValueError(f"{path} has plan format {settings['format']}, this version reads {FORMAT}: plan again")
    settings.setdefault("turn_every", 0)
    views = len(data["unknown"])
    weights = sparse.csr_matrix((data["data"], data["indices"], data["indptr"]), shape=(views, views))
    rlg = Rlg(weights, data["unknown"], data["sizes"], settings["source"], settings["importance"])
    turns = Turns(int(data["turn_steps"]), data["turn_seam"], settings["seed"])
    template = Template(data["rank"], data["step"], turns)
    orders = dict(enumerate(data["orders"]))
    return restore_plan(rlg, {name: settings[name] for name in _SETTINGS}, data["load"], template, orders)
