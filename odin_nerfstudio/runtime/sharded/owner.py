"""The owner of a shard: projects its rows for every view, takes their gradients back, publishes them.

For step t and each of its lanes the owner takes the candidates among its rows as soon as t comes within the look-ahead,
so that a view that sees none of them is told so at once and never waits for this owner. The others are projected when
the policy's gate opens on the owner's own versions; nothing of other shards matters. From then on the rows that the
view sees, and no others, are pending until their gradients are back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from odin_nerfstudio.rendering.stages import Projection, StageView, ViewSplats
from odin_nerfstudio.runtime import hazards, rows
from odin_nerfstudio.runtime.evidence import EvidenceStore
from odin_nerfstudio.runtime.faults import NonFiniteGradient
from odin_nerfstudio.runtime.frontier import TaskPlan
from odin_nerfstudio.runtime.gate import Awaited, Gate, GatePolicy
from odin_nerfstudio.runtime.messages import Triple
from odin_nerfstudio.runtime.publication import Publisher
from odin_nerfstudio.runtime.shadow import ShadowPool, TableShadow
from odin_nerfstudio.runtime.sharded.packets import GradientPacket, SplatPacket
from odin_nerfstudio.runtime.sharded.staging import OwnerStaging
from odin_nerfstudio.runtime.sharded.view_rows import ViewRows
from odin_nerfstudio.runtime.sharded.views import NO_GRADIENT
from odin_nerfstudio.runtime.sharded.watch import OwnerWatch
from odin_nerfstudio.runtime.staging import Phase
from odin_nerfstudio.runtime.store import RowTable
from odin_nerfstudio.runtime.telemetry import Telemetry, now

Recolor = Callable[[Mapping[str, Tensor], Tensor], Mapping[str, Tensor]]
"""Parameters of rows, by name [at least n, ...], and these rows of the table [n] int32 -> such parameters."""


class Projector(Protocol):
    """How a model's rows become splats."""

    @property
    def kind(self) -> type[ViewSplats]:
        """What kind of splats these are."""
        ...

    def view(self, step: int, view: int, /) -> StageView:
        """The camera of a training view at a step."""
        ...

    def project(self, step: int, view: StageView, leaves: Mapping[str, Tensor], /) -> Projection:
        """Project rows of the parameters, as the model has them at a step; differentiable."""
        ...


class Owner:
    """One rank's shard, between the oldest step that is not published entirely, `low`, and the look-ahead."""

    def __init__(
        self,
        plan: TaskPlan,
        table: RowTable,
        ids: Tensor,
        total: int,
        policy: GatePolicy,
        publisher: Publisher,
        telemetry: Telemetry,
        projector: Projector,
        lookahead: int,
        limit: Callable[[], int],
        ship: Callable[[int, SplatPacket], int],
        start_step: int,
        views: ViewRows | None = None,
    ) -> None:
        """
        Args:
            ids: Place in the whole model of each row of the table, ascending. [n] int32, on the table's device.
            total: Rows of the whole model.
            limit: Last step that may be projected and published for the time being.
            ship: Hands a packet to a rank, which may be this one; returns the bytes sent.
            views: Parameters of views, where some are trained.
        """
        self.plan, self.table, self.ids, self.total = plan, table, ids, total
        self.publisher, self.telemetry, self.projector = publisher, telemetry, projector
        self.lookahead, self._limit, self._ship, self._views = lookahead, limit, ship, views
        self.low = self.current = start_step
        self.watch = OwnerWatch(table)
        self.evidence: EvidenceStore | None = None
        self.use_policy(policy)
        self.staged_rows = 0
        """Gradient rows staged since the start."""
        self.changed = True
        """Something happened since all that may be done was done."""
        self._pool = ShadowPool(table)
        self._steps: dict[int, OwnerStaging] = {}
        self._kept: dict[tuple[int, int], tuple[TableShadow, Projection]] = {}
        self._candidates: dict[tuple[int, int], Tensor] = {}

    def use_policy(self, policy: GatePolicy) -> None:
        """Decide by a policy from now on."""
        self.policy = policy
        if isinstance(evidence := getattr(policy, "evidence", None), EvidenceStore):
            self.evidence = evidence

    @property
    def outstanding(self) -> bool:
        """Something of a step is projected or staged."""
        return bool(self._steps)

    # -- what may be done now

    def advance(self) -> None:
        """Publish, project and ship all that may be."""
        while self.changed:
            self.changed = False
            if self._views is not None:
                self._views.advance()
            self._publish_complete()
            if self.policy.partial:
                self._project_open()
            else:
                self._project_together()

    def _horizon(self) -> int:
        return min(self.low + (self.lookahead if self.policy.partial else 0), self._limit())

    def _project_open(self) -> None:
        for step in range(self.low, self._horizon() + 1):
            staged = self.staging(step)
            for number in self._waiting(staged):
                if self._sees_nothing(staged, number):
                    self._send(staged, number, None)
            for number in self._waiting(staged):
                self._try(staged, number)

    def _project_together(self) -> None:
        """As synchronized training does: all views of a step, then one exchange of all to all."""
        if self.low > self._horizon() or (self._views is not None and self._views.low < self.low):
            return
        staged = self.staging(self.low)
        made = [(number, self._project(staged, number)) for number in self._waiting(staged)]
        for number, packet in made:
            self._send(staged, number, packet)

    def _try(self, staged: OwnerStaging, number: int) -> None:
        """Project a lane if its gate is open."""
        step = staged.step
        if self._views is not None and not self._views.ready(staged.views[number], step):
            return
        ids = self._candidate_ids(staged, number)
        gate = Gate(
            step,
            staged.views[number],
            [ids],
            [self.table],
            lambda: [self.staging(s) for s in range(self.low, step)],
            lambda one: one.track(),
            self.lookahead,
        )
        decision = self.policy.decide(gate)
        if not decision.open:
            if decision.rows and self.watch.asks(step, number):
                self._publish_some(step)  # else rows that nobody is pending on would look late, too
                self.watch.refused(step, number, ids)
            return
        if self.low < step:
            self._publish_some(step)
        hazards.check_read(self.table, ids, step, self.policy.max_delay)
        if decision.delayed is not None:
            self.telemetry.record(step).delayed.append(decision.delayed)
        self._send(staged, number, self._project(staged, number))

    # -- projecting

    def staging(self, step: int) -> OwnerStaging:
        """The staging of a step, made at first use, with the candidates of all of its lanes."""
        staged = self._steps.get(step)
        if staged is None:
            self.watch.step(step)
            views = [self.plan.view(step, n) for n in range(self.plan.views_per_step)]
            staged = self._steps[step] = OwnerStaging(step, views, [self.table])
            for lane, view in zip(staged.lanes, views):
                if view >= 0:
                    mask = torch.empty(self.table.count, dtype=torch.uint8, device=self.table.device)
                    self.table.reads.mark(step, view, self.table.versions, self.policy.least_lag, mask)
                    lane.candidates = [mask]
        return staged

    @staticmethod
    def _waiting(staged: OwnerStaging) -> list[int]:
        return [n for n, lane in enumerate(staged.lanes) if lane.phase == Phase.WAITING]

    def _candidate_ids(self, staged: OwnerStaging, number: int) -> Tensor:
        """Rows that a lane can see; looked up once, though its gate may be asked many times."""
        key = (staged.step, number)
        if key not in self._candidates:
            candidates = staged.lanes[number].candidates
            assert candidates is not None
            self._candidates[key] = rows.ids_of_mask(candidates[0])
        return self._candidates[key]

    def _sees_nothing(self, staged: OwnerStaging, number: int) -> bool:
        return not self._candidate_ids(staged, number).shape[0]

    def _project(self, staged: OwnerStaging, number: int) -> SplatPacket | None:
        """Project a lane from the rows as they are; None if it sees none of them."""
        step, view = staged.step, staged.views[number]
        begin = now()
        ids = self._candidate_ids(staged, number)
        if not ids.shape[0]:
            return None
        self.watch.projected(step, number, ids)
        shadow = self._pool.take(ids, view)
        projection = self.projector.project(step, self.projector.view(step, view), shadow.leaves)
        if projection.rows.shape[0] and int(projection.rows[-1]) >= shadow.count:
            raise RuntimeError("a padding row was visible; the padding row of a view must lie outside its image")
        record = self.telemetry.record(step)
        record.candidate_rows += shadow.count
        record.acquire += now() - begin
        if not projection.rows.shape[0]:
            self._pool.give_back(shadow)
            return None
        self._kept[(step, number)] = (shadow, projection)
        places = self.ids[shadow.ids[projection.rows].long()]
        return SplatPacket(step, number, places, projection.splats)

    def _send(self, staged: OwnerStaging, number: int, packet: SplatPacket | None) -> None:
        step = staged.step
        self._candidates.pop((step, number), None)
        if packet is None:
            nothing = torch.empty((0, 0), device=self.table.device)
            packet = SplatPacket(step, number, self.ids[:0], nothing)
            staged.shipped(number, self.ids[:0])
            staged.returned(number, self.ids[:0], nothing, staged.empty_statistics())
            self.changed = True
        else:
            shadow, projection = self._kept[(step, number)]
            staged.shipped(number, shadow.ids[projection.rows])
        self.telemetry.record(step).sent += self._ship(self.plan.rank(step, number), packet)

    # -- gradients

    def returned(self, packet: GradientPacket) -> None:
        """Take a lane's gradients of this owner's splats back to its rows, and stage them.

        Raises:
            RuntimeError: The packet does not fit what was shipped.
            NonFiniteGradient: Some gradient of a row is not finite.
        """
        step, number = packet.step, packet.lane
        kept = self._kept.pop((step, number), None)
        if kept is None or packet.count != kept[1].rows.shape[0]:
            raise RuntimeError(
                f"gradients of {packet.count} splats came back for step {step} lane {number}, for which"
                f" {'none were' if kept is None else f'{kept[1].rows.shape[0]} were'} shipped"
            )
        shadow, projection = kept
        begin = now()
        staged, layout = self._steps[step], self.table.layout(step)
        if packet.rows.shape[0]:
            projection.backward(packet.rows, packet.gradients)
        if self._views is not None:
            self._views.send_sums(step, number, projection.camera_sums())
        statistics = self._statistics(staged, number, shadow, projection, packet)
        gradients = {n: leaf.grad.contiguous() for n, leaf in shadow.leaves.items() if leaf.grad is not None}
        ordered = [gradients.get(name) for name in layout.names]
        ids, _, values, bad = rows.pack_active(ordered, layout.widths, shadow.ids, None)
        if bad:
            raise NonFiniteGradient(
                f"step {step}: view {staged.views[number]} gave gradients of primitives that are not finite, though"
                " those of their splats are. Look at the view's camera and at degenerate primitives near it"
            )
        staged.returned(number, ids, values, statistics)
        self.watch.returned(ids, self.plan.rank(step, number))
        self._pool.give_back(shadow)
        self.staged_rows += int(ids.shape[0])
        record = self.telemetry.record(step)
        record.active_rows += int(ids.shape[0])
        record.contribute += now() - begin
        if self.evidence is not None:
            self.evidence.learn(self.table, step, staged.views[number], staged.lanes[number].parts[0])
        self.changed = True

    def _statistics(
        self, staged: OwnerStaging, number: int, shadow: TableShadow, projection: Projection, packet: GradientPacket
    ) -> Triple | None:
        keeper = self.table.statistics
        if keeper is None or not keeper.wanted(staged.step):
            return None
        if packet.norms is None and self.projector.kind.has_norms:
            raise RuntimeError(f"step {staged.step} lane {number}: no norms for the densification statistics came back")
        view = self.projector.view(staged.step, staged.views[number])
        info: dict[str, Any] = {"means2d": NO_GRADIENT, "gradient_2dgs": NO_GRADIENT, "radii": projection.radii[None]}
        # a step's loss is the mean over its views, which gsplat takes for so many cameras
        info |= {"width": view.width, "height": view.height, "n_cameras": self.plan.views_per_step}
        _, norms, radii = keeper.collect(info | projection.info(), packet.count)
        if packet.norms is not None:
            norms[packet.rows] = packet.norms
        return shadow.ids[projection.rows], norms, radii

    # -- publication

    def _publish_complete(self) -> None:
        limit = self._limit()
        while self.low <= limit and self.staging(self.low).complete:
            staged = self.staging(self.low)
            with self.telemetry.timed(staged.step, "publish"):
                if not staged.started:
                    self.publisher.whole(staged)
                else:
                    staged.track()
                    self.publisher.some(staged, 0)
                    self.publisher.finish(staged)
                self.publisher.statistics(staged)
            self._retire(staged)

    def _publish_some(self, step: int) -> None:
        """Publish the rows of incomplete steps before one that no lane is pending on."""
        changed = False
        for number in range(self.low, step):
            staged = self.staging(number)
            changed = changed or staged.changed
            if changed:
                with self.telemetry.timed(number, "publish"):
                    staged.track()
                    self.publisher.some(staged, number - self.low)
                staged.changed = False

    def _retire(self, staged: OwnerStaging) -> None:
        del self._steps[staged.step]
        self.low = staged.step + 1
        if self.low in self._steps:
            self._steps[self.low].changed = True

    # -- for those who wait

    def awaited(self, before: int) -> tuple[Awaited, ...]:
        """Lanes of steps before one that have been projected and whose gradients are not back; only these hold up what
        is not projected yet."""
        known = (staged for s in range(self.low, before) if (staged := self._steps.get(s)) is not None)
        return tuple(Awaited(s.step, n) for s in known for n, lane in enumerate(s.lanes) if lane.phase == Phase.IDS)

    def waiting_rows(self) -> int:
        """Gradient rows staged for steps that are not published entirely."""
        return sum(s.staged_rows() for s in self._steps.values())

    def take_rows(self, ids: Tensor, total: int, version: int) -> None:
        """Own other rows from now on, all at a version, after a structural step. ids: see the constructor."""
        if self._steps or self._kept:
            raise RuntimeError(f"rows change at step {self.low} while steps {sorted(self._steps)} are not published")
        self.ids, self.total = ids, total
        self.table.versions.fill_(version)
        self.changed = True

    def snapshot(
        self, view: StageView, step: int, ids: Tensor, recolor: Recolor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Project some rows as they are now, for nobody's training.

        Args:
            ids: Rows of the table, ascending. [n] int32.
            recolor: Gives the copies of the rows other colours.

        Returns:
            Places in the whole model of those that the view sees [V] int32, and their splats [V, C].
        """
        shadow = self._pool.take(ids, 0)
        with torch.no_grad():
            leaves = shadow.leaves if recolor is None else recolor(shadow.leaves, ids)
            projection = self.projector.project(step, view, leaves)
        seen = projection.rows < shadow.count  # padding may be visible in a view that is no training view
        self._pool.give_back(shadow)
        return self.ids[shadow.ids[projection.rows[seen]].long()], projection.splats[seen]
