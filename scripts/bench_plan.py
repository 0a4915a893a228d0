"""How good plans are, and what they cost to make.

    python scripts/bench_plan.py conflict --data FOLDER [FOLDER ...]   # RLG against random order
    python scripts/bench_plan.py search --data FOLDER [FOLDER ...]     # against long annealing searches
    python scripts/bench_plan.py forms --data FOLDER [FOLDER ...]      # which RLG form predicts shared footprints
    python scripts/bench_plan.py footprints --data FOLDER [FOLDER ...] # what views see, by tracks and by projection
    python scripts/bench_plan.py scale                                 # time and memory, 100 to 10,000 views
    python scripts/bench_plan.py report --views 10000 --ranks 64       # all that odin-plan does after reading

Times are processor time; run with OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import numba
import numpy as np

from odin_nerfstudio.planning import colmap
from odin_nerfstudio.planning.prediction import predict
from odin_nerfstudio.planning.rlg import relative_locality_graph
from odin_nerfstudio.planning.schedule import make_plan
from odin_nerfstudio.planning.slots import rank_of_lanes
from odin_nerfstudio.planning.synthetic import aerial_tracks
from odin_nerfstudio.planning.tracks import Tracks, find_model
from odin_nerfstudio.tools.plan_dataset import training_tracks

RANDOM_ORDERS = 10
SEEDS = 3
EPOCHS = 5


def conflict(folders: list[Path]) -> None:
    """Predicted conflict between neighbouring steps and cost imbalance, RLG against the mean of 10 random orders."""
    print("| set | ranks | conflict random | rlg | ratio | imbalance random | rlg | plan s | epoch ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for folder in folders:
        rlg = relative_locality_graph(training_tracks(folder))
        for ranks in (2, 4, 8):
            made, planned, epoch = [], [], []
            for seed in range(SEEDS):
                start = time.process_time()
                plan = make_plan(rlg, ranks=ranks, views_per_step=ranks, seed=seed)
                planned.append(time.process_time() - start)
                for number in range(0, 20, 2):
                    plan.epoch_order(number)
                epoch.append((time.process_time() - start - planned[-1]) / 10)
                made.append(predict(plan))
            random = [
                predict(make_plan(rlg, ranks=ranks, views_per_step=ranks, seed=s, order="random"))
                for s in range(RANDOM_ORDERS)
            ]
            c, r = (float(np.mean([p.conflict[0] for p in group])) for group in (made, random))
            ib, ir = (float(np.mean([p.imbalance for p in group])) for group in (made, random))
            print(
                f"| {folder.name} | {ranks} | {r:.4f} | {c:.4f} | {c / r:.3f} | {ir:.3f} | {ib:.3f} "
                f"| {np.mean(planned):.2f} | {1e3 * np.mean(epoch):.1f} |",
                flush=True,
            )


def search(folders: list[Path]) -> None:
    """The plan's weighted conflicts against those that long annealings of five whole epochs find: one in which views
    keep their ranks, as a plan's must, and one that may give them to another rank each epoch. The best of several
    runs counts. Costs are taken as equal and diversity as worthless, so that only conflicts are compared."""
    lag_weight = np.array([0.0, 1.0, 0.25, 0.0625])
    print("| set | ranks | random | plan | search, stable ranks | share | search, free | share |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for folder in folders:
        rlg = relative_locality_graph(training_tracks(folder))
        views = np.arange(rlg.views)
        weights = rlg.between(views[:, None], views[None, :]).astype(np.float64)
        for ranks in (4, 8):
            lanes = rank_of_lanes(ranks, ranks)

            def score(stream: np.ndarray, weights=weights, lanes=lanes) -> float:
                return stream_conflict(weights, stream, lanes) @ lag_weight[1:]

            def shuffle(seed: int, views=views) -> np.ndarray:
                rng = np.random.default_rng(seed)
                return np.concatenate([rng.permutation(views) for _ in range(EPOCHS)])

            random = np.mean([score(shuffle(s)) for s in range(RANDOM_ORDERS)])
            plans = [
                make_plan(rlg, ranks=ranks, views_per_step=ranks, seed=s, diversity=0.0, cost=np.ones(len(views)))
                for s in range(SEEDS)
            ]
            ours = np.mean([score(np.concatenate([p.epoch_order(e) for e in range(EPOCHS)])) for p in plans])
            free, stable = [], []
            for seed in range(SEEDS):
                stream = shuffle(100 + seed)
                anneal(weights, stream, len(views), lanes, lag_weight, 6_000_000, 0.5, seed)
                free.append(score(stream))
                stream, home = stable_start(len(views), lanes, seed)
                anneal_stable(weights, stream, lanes, lag_weight, home, 20_000_000, 2.0, seed)
                stable.append(score(stream))
            shares = [(random - ours) / (random - min(found)) for found in (stable, free)]
            print(
                f"| {folder.name} | {ranks} | {random:.4f} | {ours:.4f} | {min(stable):.4f} | {shares[0]:.3f} "
                f"| {min(free):.4f} | {shares[1]:.3f} |",
                flush=True,
            )


def stream_conflict(weights: np.ndarray, stream: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Mean weight between tasks of different ranks 1, 2 and 3 steps apart."""
    steps = stream[: len(stream) // len(lanes) * len(lanes)].reshape(-1, len(lanes))
    other = lanes[:, None] != lanes[None, :]
    return np.array(
        [np.mean([weights[np.ix_(a, b)][other].mean() for a, b in zip(steps, steps[d:])]) for d in (1, 2, 3)]
    )


@numba.njit(cache=True)
def _cost(weights, stream, lanes, slot, lag_weight):
    count = lanes.shape[0]
    step, rank, view, total = slot // count, lanes[slot % count], stream[slot], 0.0
    for d in range(1, lag_weight.shape[0]):
        for other in range(count):
            if lanes[other] != rank:
                before, after = (step - d) * count + other, (step + d) * count + other
                if before >= 0:
                    total += lag_weight[d] * weights[stream[before], view]
                if after < stream.shape[0]:
                    total += lag_weight[d] * weights[view, stream[after]]
    return total


@numba.njit(cache=True)
def anneal(weights, stream, views, lanes, lag_weight, proposals, heat, seed):
    """Plain simulated annealing: exchange any two tasks of one epoch."""
    np.random.seed(seed)
    for i in range(proposals):
        temperature = heat * (1.0 - i / proposals) ** 2 + 1e-9
        first = np.random.randint(stream.shape[0] // views) * views
        a, b = first + np.random.randint(views), first + np.random.randint(views)
        # Both sums hold the pair itself, before and after the exchange; where it matters the two differ little.
        before = _cost(weights, stream, lanes, a, lag_weight) + _cost(weights, stream, lanes, b, lag_weight)
        stream[a], stream[b] = stream[b], stream[a]
        change = _cost(weights, stream, lanes, a, lag_weight) + _cost(weights, stream, lanes, b, lag_weight) - before
        if change > 0 and np.random.random() >= np.exp(-change / temperature):
            stream[a], stream[b] = stream[b], stream[a]


def stable_start(views: int, lanes: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random stream in which views keep their ranks, and the rank of each view (-1 for the V mod L that move)."""
    rng = np.random.default_rng(seed)
    ranks = int(lanes.max()) + 1
    home = np.full(views, -1)
    home[: views // len(lanes) * len(lanes)] = np.repeat(np.arange(ranks), np.bincount(lanes) * (views // len(lanes)))
    home = rng.permutation(home)
    stream = np.empty(EPOCHS * views, np.int64)
    for epoch in range(EPOCHS):
        slots = np.arange(epoch * views, (epoch + 1) * views)
        movers = rng.permutation(np.flatnonzero(home < 0))
        for rank in range(ranks):
            own, places = np.flatnonzero(home == rank), slots[lanes[slots % len(lanes)] == rank]
            extra, movers = np.split(movers, [len(places) - len(own)])
            stream[places] = rng.permutation(np.concatenate([own, extra]))
    return stream, home


@numba.njit(cache=True)
def _exchange_everywhere(stream, where, home, u, v):
    for e in range(where.shape[0]):
        a, b = where[e, u], where[e, v]
        stream[a], stream[b] = v, u
        where[e, u], where[e, v] = b, a
    home[u], home[v] = home[v], home[u]


@numba.njit(cache=True)
def _cost_everywhere(weights, stream, lanes, where, u, v, lag_weight):
    total = 0.0
    for e in range(where.shape[0]):
        total += _cost(weights, stream, lanes, where[e, u], lag_weight)
        total += _cost(weights, stream, lanes, where[e, v], lag_weight)
    return total


@numba.njit(cache=True)
def anneal_stable(weights, stream, lanes, lag_weight, home, proposals, heat, seed):
    """As ``anneal`` with stable ranks: exchange two tasks of one rank in one epoch, or two views of different ranks
    (three of ten proposals) in all epochs at once."""
    np.random.seed(seed)
    views, count = home.shape[0], lanes.shape[0]
    where = np.zeros((stream.shape[0] // views, views), np.int64)
    for i in range(stream.shape[0]):
        where[i // views, stream[i]] = i
    for i in range(proposals):
        temperature = heat * (1.0 - i / proposals) ** 2 + 1e-9
        if np.random.random() < 0.3:
            u, v = np.random.randint(views), np.random.randint(views)
            if home[u] == home[v]:
                continue
            before = _cost_everywhere(weights, stream, lanes, where, u, v, lag_weight)
            _exchange_everywhere(stream, where, home, u, v)
            change = _cost_everywhere(weights, stream, lanes, where, u, v, lag_weight) - before
            if change > 0 and np.random.random() >= np.exp(-change / temperature):
                _exchange_everywhere(stream, where, home, u, v)
            continue
        epoch = np.random.randint(where.shape[0])
        a, b = epoch * views + np.random.randint(views), epoch * views + np.random.randint(views)
        u, v = stream[a], stream[b]
        if lanes[a % count] != lanes[b % count] and (home[u] >= 0 or home[v] >= 0):
            continue
        before = _cost(weights, stream, lanes, a, lag_weight) + _cost(weights, stream, lanes, b, lag_weight)
        stream[a], stream[b] = v, u
        change = _cost(weights, stream, lanes, a, lag_weight) + _cost(weights, stream, lanes, b, lag_weight) - before
        if change > 0 and np.random.random() >= np.exp(-change / temperature):
            stream[a], stream[b] = u, v
        else:
            where[epoch, u], where[epoch, v] = b, a


def forms(folders: list[Path]) -> None:
    """Correlation, over ordered pairs of views, of both RLG forms with the overlap of projected footprints: every point
    a disc of splatfacto's initial size, counted where its centre falls into the image (which is what a renderer reads
    at the start of training, hidden points included), plain and weighted by area."""
    from odin_nerfstudio.planning.geometry import ViewGeometry, coverage
    from odin_nerfstudio.planning.tracks import incidence_matrix

    print("| set | form | visible points | visible area |")
    print("| --- | --- | --- | --- |")
    for folder in folders:
        tracks = training_tracks(folder)
        cameras = _model_cameras(folder, tracks)
        assert isinstance(cameras, ViewGeometry)
        rows = [
            np.sort(cameras.project(v, tracks.xyz.astype(np.float64))[0]).astype(np.int32) for v in range(tracks.views)
        ]
        indptr = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
        incidence = incidence_matrix(indptr, np.concatenate(rows), tracks.points)
        visible = Tracks(incidence, tracks.names, tracks.xyz, "visible", tracks.centers)
        truth = [
            relative_locality_graph(visible),
            relative_locality_graph(visible, coverage(cameras, incidence, tracks.xyz)),
        ]
        weighted = coverage(cameras, tracks.incidence, tracks.xyz)
        for name, rlg in (
            ("plain", relative_locality_graph(tracks)),
            ("by coverage", relative_locality_graph(tracks, weighted)),
        ):
            off = ~np.eye(tracks.views, dtype=bool)
            values = [np.corrcoef(rlg.weights.toarray()[off], t.weights.toarray()[off])[0, 1] for t in truth]
            print(f"| {folder.name} | {name} | {values[0]:.3f} | {values[1]:.3f} |", flush=True)


def footprints(folders: list[Path]) -> None:
    """Mean share of the seed points that a view sees: as tracks say, as the advice on placement fills them up, and in
    the image by the COLMAP model's cameras, hidden points included."""
    from odin_nerfstudio.planning.placement import Footprints

    print("| set | observed | filled | in the image |")
    print("| --- | --- | --- | --- |")
    for folder in folders:
        tracks = training_tracks(folder)
        cameras = _model_cameras(folder, tracks)
        inside = [len(cameras.project(v, tracks.xyz.astype(np.float64))[0]) for v in range(tracks.views)]
        observed = np.diff(tracks.incidence.indptr).mean() / tracks.points
        filled = Footprints.of(tracks).visible()
        print(f"| {folder.name} | {observed:.2f} | {filled:.2f} | {np.mean(inside) / tracks.points:.2f} |", flush=True)


def _model_cameras(folder: Path, tracks: Tracks):
    import pycolmap

    from odin_nerfstudio.planning.geometry import ViewGeometry

    model = find_model(folder)
    assert model is not None and colmap.has_model(model)
    reconstruction = pycolmap.Reconstruction(str(model))
    by_name = {image.name: image for image in reconstruction.images.values()}
    images = [by_name[Path(name).as_posix()] for name in tracks.names]
    pose = np.tile(np.eye(4), (len(images), 1, 1))
    pose[:, :3] = [image.cam_from_world().matrix() for image in images]
    cameras = [reconstruction.cameras[image.camera_id] for image in images]
    return ViewGeometry(
        pose,
        np.stack([c.calibration_matrix() for c in cameras]),
        np.array([c.width for c in cameras]),
        np.array([c.height for c in cameras]),
    )


def scale_one(views: int, ranks: int) -> None:
    """One row of the scale table, in a process of its own so that peak memory is its own."""
    relative_locality_graph(aerial_tracks(20))  # compile
    make_plan(relative_locality_graph(aerial_tracks(40)), ranks=2, views_per_step=2).epoch_order(0)
    tracks = aerial_tracks(views, points_per_view=2000)
    start = time.process_time()
    rlg = relative_locality_graph(tracks)
    graph = time.process_time() - start
    plan = make_plan(rlg, ranks=ranks, views_per_step=ranks)
    planned = time.process_time() - start - graph
    plan.epoch_order(0)
    epoch = time.process_time() - start - graph - planned
    ours = predict(plan).conflict[0]
    random = predict(make_plan(rlg, ranks=ranks, views_per_step=ranks, order="random")).conflict[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"| {views:,} | {ranks} | {tracks.incidence.nnz:,} | {rlg.weights.nnz:,} | {graph:.2f} | {planned:.2f} "
        f"| {epoch:.2f} | {peak:.2f} | {random:.5f} | {ours:.5f} |",
        flush=True,
    )


def scale() -> None:
    """Time and memory on synthetic aerial captures."""
    print("| views | ranks | observations | edges | graph s | plan s | epoch s | peak GiB | random | rlg |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for views, ranks in ((100, 8), (1000, 8), (1000, 64), (10_000, 8), (10_000, 64)):
        subprocess.run(
            [sys.executable, __file__, "scale-one", "--views", str(views), "--ranks", str(ranks)], check=True
        )


def report(views: int, ranks: int) -> None:
    """Time and memory of everything that ``odin-plan`` does once a dataset is read, on a synthetic aerial capture."""
    from odin_nerfstudio.planning.gain import Gain
    from odin_nerfstudio.planning.placement import Wish, advise
    from odin_nerfstudio.planning.report import make_report
    from odin_nerfstudio.planning.schedule import Plan
    from odin_nerfstudio.simulation.expected import expected_gain, scene_of_tracks

    make_report(aerial_tracks(20), ranks=2, views_per_step=2)  # compile
    tracks = aerial_tracks(views, points_per_view=2000)
    gaining = 0.0

    def gain(tracks: Tracks, plan: Plan) -> Gain:
        nonlocal gaining
        start = time.process_time()
        found = expected_gain(plan, scene_of_tracks(tracks, plan.rlg), 0.2)
        gaining = time.process_time() - start
        return found

    start = time.process_time()
    made = make_report(tracks, ranks=ranks, views_per_step=ranks, diversity=0.2, gain_of=gain)
    planned = time.process_time() - start - gaining
    start = time.process_time()
    advise(tracks, made.plan, Wish(80e9))
    advised = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("| views | ranks | graph, plan, 10 random orders s | simulated gain s | placement s | peak GiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(f"| {views:,} | {ranks} | {planned:.1f} | {gaining:.1f} | {advised:.1f} | {peak:.2f} |", flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["conflict", "search", "forms", "scale", "scale-one", "report", "footprints"])
    parser.add_argument("--data", nargs="+", type=Path, default=[])
    parser.add_argument("--views", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.what == "scale":
        scale()
    elif arguments.what == "scale-one":
        scale_one(arguments.views, arguments.ranks)
    elif arguments.what == "report":
        report(arguments.views, arguments.ranks)
    elif not arguments.data:
        parser.error("--data is needed: COLMAP captures or anything else that odin-plan reads")
    else:
        measures = {"conflict": conflict, "search": search, "forms": forms, "footprints": footprints}
        measures[arguments.what](arguments.data)


if __name__ == "__main__":
    main()
