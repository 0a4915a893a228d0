"""The trainer of sharded primitives: no rank has the whole model, so all take part where it is looked at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE
from nerfstudio.viewer.viewer import Viewer
from torch import Tensor

from odin_nerfstudio.glue.checkpoint import CheckpointError, read_checkpoint
from odin_nerfstudio.glue.odin_trainer import STOP, OdinTrainer, OdinTrainerConfig
from odin_nerfstudio.glue.shard_rows import (
    OnDisk,
    cut_checkpoint,
    means_of,
    per_row_tensors,
    put_whole,
    rows_of,
    shard_tree,
)
from odin_nerfstudio.glue.sharded_runner import ShardedRunner
from odin_nerfstudio.runtime.transport import Activity


class PumpingLock:
    """A lock whose first owner, the training thread, answers questions while it waits for it.

    The viewer renders while it holds the trainer's lock, and what it renders comes from the training thread.
    """

    def __init__(self) -> None:
        self._lock, self._training = threading.Lock(), threading.get_ident()
        self.pump: Callable[[], None] = lambda: None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        if blocking and timeout < 0 and threading.get_ident() == self._training:
            while not self._lock.acquire(timeout=0.02):
                self.pump()
            return True
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class ShardedTrainer(OdinTrainer):
    """Trains with ``--pipeline.odin.placement sharded``."""

    runner: ShardedRunner
    stops_at_once = False
    _evaluated = False
    _cut: tuple[Tensor, int] | None = None

    def __init__(self, config: OdinTrainerConfig, local_rank: int = 0, world_size: int = 1) -> None:
        super().__init__(config, local_rank, world_size)
        self._pumping = PumpingLock()
        self.train_lock = cast(Any, self._pumping)

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        super().setup(test_mode)
        word = b"evaluates" if self._evaluates() else b""
        self._evaluated = self.runner.engine.exchange_of_shards.broadcast(word) == b"evaluates"
        self._pumping.pump = self.runner.requests.pump

    def _make_runner(self) -> ShardedRunner:
        return ShardedRunner(
            self.pipeline, self.optimizers, self.transport, self._start_step, self.timer, self._cut, self._is_fence
        )

    def _is_fence(self, step: int) -> bool:
        """Whether all rows are looked at after a step; the same on all ranks."""
        last = step == self._start_step + self.config.max_num_iterations - 1
        saves = step_check(step, self.config.steps_per_save)
        return last or saves or (self._evaluated and self._evaluation_due(step))

    def _train_step(self, step: int) -> None:
        super()._train_step(step)
        self.runner.requests.pump()

    def _update_viewer_state(self, step: int) -> None:
        with self.runner.engine.attended():  # the viewer may hold training up while somebody moves the camera
            super()._update_viewer_state(step)

    def _let_go(self) -> bool:
        """Where the viewer stays open, so do all ranks, since they have what it shows."""
        engine = self.runner.engine
        stays = self.rank == 0 and self.config.is_viewer_enabled() and not self.config.viewer.quit_on_train_completion
        if engine.exchange_of_shards.broadcast(b"stays" if stays else b"") == b"stays":
            with engine.busy(Activity.PAUSED):
                if self.rank == 0:
                    self._after_train()
                else:
                    self._serve_until_stopped()
            engine.close()
            return False
        return super()._let_go()

    def _train_complete_viewer(self) -> None:
        """nerfstudio's, which waits for Ctrl-C, while pictures are still made for the viewer."""
        self.training_state = "completed"
        if isinstance(self.viewer_state, Viewer):
            self.viewer_state.training_complete()
        CONSOLE.print("Use ctrl+c to quit", justify="center")
        self._serve_until_stopped()

    def _serve_until_stopped(self) -> None:
        engine = self.runner.engine
        while not engine.announced(STOP):
            if self._interrupt.requested:
                engine.announce(STOP)
            engine.idle(0.02)

    def _evaluate_if_due(self, step: int) -> None:
        """Evaluates on rank 0, where the other ranks project what it asks for; then all go on."""
        if not self._evaluated or not self._evaluation_due(step):
            return
        engine = self.runner.engine
        with engine.busy():
            engine.drain()
            if self.rank == 0:
                with self.train_lock:
                    self.eval_iteration(step)
            engine.exchange_of_shards.broadcast(b"evaluated")

    def save_checkpoint(self, step: int) -> None:
        """Gathers the last finished step on rank 0, in files, and saves it there; every rank takes part."""
        step = self.finished_step
        if step == self._saved_step:
            return
        if step < 0:
            super().save_checkpoint(step)
            return
        engine = self.runner.engine
        with engine.busy():
            engine.drain()
            disk = OnDisk(self._staging)
            try:
                tensors = per_row_tensors(self.pipeline.model, self.optimizers)
                whole = self.runner.requests.gather(tensors, disk.make)
                if whole is not None:
                    state = self._state(step)
                    put_whole(state, whole, engine.owner.total)
                    del whole
                    self._write_checkpoint(step, state)
            finally:
                disk.remove()
        self._saved_step = step

    def _read_checkpoint(self, path: Path) -> dict[str, Any]:
        state = read_checkpoint(path, mapped=True)
        ranks, rank = self.transport.world_size, self.transport.rank
        plan = self.pipeline.prepare_training(rank, ranks)
        try:
            means = means_of(state)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        ids = rows_of(shard_tree(means, plan, self.pipeline, ranks), means, rank)
        self._cut = (ids, means.shape[0])
        return cut_checkpoint(state, ids)
