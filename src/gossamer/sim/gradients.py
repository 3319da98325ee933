"""Simulated gradients: the whole life of one, their evaluation in batches, and their staleness.

    started --> under way --(its work is done)--> delivered --> applied
                 |     ^
                 |     +--- delayed: its worker was paused, so it comes later by that time
                 +--------> aborted: its worker died, or the run is over

The value of a gradient depends only on the point and the batch taken at its start. So nothing is
computed until the first value is needed; then all gradients under way are evaluated in one call.
Asynchronous runs are batched nearly as well as synchronous ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.observe.noise_scale import NoiseScale
from gossamer.pending import Pending
from gossamer.sim.engine import Engine
from gossamer.sim.kernel import SECOND
from gossamer.sim.replica_matrix import Point, ReplicaStore, SimulatedReplica
from gossamer.worker import Gradient

if TYPE_CHECKING:
    from gossamer.sim.world import World

Batch = NDArray[np.int64]
Read = tuple[int, int]
"""The version of a worker's replica, and the number of all updates, when a gradient's point was
read."""


class SimulatedGradient(Gradient):
    """One gradient, and its pieces, which are ready before the whole."""

    __slots__ = (
        "_is_one_piece", "_pieces", "_started_ns", "_stolen_ns", "_work_ns", "_world", "batch",
        "epoch", "key", "paused_ns", "point", "read", "statistics", "step", "value", "weight",
        "worker",
    )  # fmt: skip

    def __init__(self, worker: int, point: Point, batch: Batch, key: int) -> None:
        super().__init__("gradient")
        self.worker = worker
        self.point = point
        self.batch = batch
        self.key = key
        self.step = 0
        self.epoch = 0
        """In which its samples were read."""
        self.weight = 1.0
        """The factor of its value."""
        self.read: Read = (0, 0)
        self.paused_ns = 0
        """How much later than planned it is delivered, because its worker was paused."""
        self.value: Tensor | None = None
        self.statistics: Tensor | None = None
        self._pieces: list[Pending[Tensor]] = []

    def start(self, world: World, work_ns: int | None) -> None:
        """Schedule the delivery, after this work and the time that nothing overlaps with. Without a
        number, a pipeline makes the work and says by `done_after` when it is done."""
        self._world = world
        self._started_ns, self._work_ns = world.kernel.now, work_ns or 0
        self._is_one_piece = work_ns is None
        self._stolen_ns = world.post.stolen_ns(self.worker)
        world.batcher.start(self)
        if work_ns is not None:
            self.done_after(work_ns)

    def done_after(self, work_ns: int) -> None:
        """Its work takes or took so long, from its start."""
        whole_ns = work_ns + round(self._world.cluster.compute.unoverlapped_seconds * SECOND)
        passed_ns = self._world.kernel.now - self._started_ns
        self._world.kernel.at(whole_ns - passed_ns, self._deliver, whole_ns)

    def buckets(self) -> Sequence[Pending[Tensor]]:
        """If asked for right after the start, each piece comes at its share of backward time. A
        pipeline has its gradient when it is empty."""
        if self._is_one_piece:
            return [self]
        kernel, forward = self._world.kernel, self._world.cluster.compute.forward_share
        for bucket in self._world.buckets:
            piece: Pending[Tensor] = Pending("bucket")
            ready = self._work_ns * (forward + (1 - forward) * bucket.ready_share)
            passed = kernel.now - self._started_ns
            kernel.at(max(0, round(ready) - passed), self._ready, piece, bucket.start, bucket.end)
            self._pieces.append(piece)
        return self._pieces

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        for piece in self._pieces:
            piece.fail(error)

    @property
    def lost_ns(self) -> int:
        """The time in which its worker did not compute it: paused, or busy with communication."""
        stolen_ns = self._world.post.stolen_ns(self.worker) - self._stolen_ns
        return self.paused_ns + round(stolen_ns)

    @property
    def began_ns(self) -> int:
        return self._started_ns

    def _is_held_up(self, waited_ns: int, again: Callable[..., None], *arguments: Any) -> bool:
        """Whether more time was lost than `waited_ns`; if so, call `again` later."""
        lost_ns = self.lost_ns
        if lost_ns > waited_ns:
            self._world.kernel.at(lost_ns - waited_ns, again, *arguments, lost_ns)
        return lost_ns > waited_ns

    def _ready(self, piece: Pending[Tensor], start: int, end: int, waited_ns: int = 0) -> None:
        if self._is_held_up(waited_ns, self._ready, piece, start, end):
            return
        batcher = self._world.batcher
        # If its worker died or the run ended, nobody waits for the piece any more.
        if self.value is not None or batcher.is_under_way(self):
            piece.resolve(batcher.value_of(self)[start:end])

    def _deliver(self, whole_ns: int, waited_ns: int = 0) -> None:
        """The work is done: give the value to the worker and count the samples."""
        world, rank = self._world, self.worker
        if rank not in world.alive or self._is_held_up(waited_ns, self._deliver, whole_ns):
            return
        if not world.batcher.is_under_way(self):
            return
        value = world.batcher.value_of(self)
        if world.pipelines is not None:
            value = world.pipelines[rank].damped(value)
        world.batcher.under_way[rank].remove(self)
        world.updates.read[rank] = self.read
        span = (self._started_ns, world.kernel.now)
        world.budget.deliver(rank, len(self.batch), self.step, (span[1] - span[0]) / SECOND)
        world.observer.computed(rank, span, whole_ns, len(self.batch), self.loss)
        world.book.trained[self.epoch] += len(self.batch)
        if world.recoveries.is_open(rank):
            world.recoveries.ended(rank, "first gradient", world.kernel.now)
        self.resolve(value)
        world.on_progress()
        world.ending.progressed()


class GradientSource(Protocol):
    """Where gradients come from: an engine that evaluates many at once, or processes that run a
    user's script."""

    buffers: Tensor
    """BatchNorm statistics, one row per worker."""
    under_way: dict[int, list[SimulatedGradient]]
    """By worker, those that were started and neither delivered nor aborted."""

    @property
    def mean_width(self) -> float:
        """How many were evaluated at once."""
        ...

    def start(self, gradient: SimulatedGradient) -> None: ...

    def is_under_way(self, gradient: SimulatedGradient) -> bool: ...

    def abort(self, rank: int) -> list[SimulatedGradient]:
        """Discard all that a worker has under way without trace."""
        ...

    def value_of(self, gradient: SimulatedGradient) -> Tensor:
        """The gradient itself, computed by now; statistics of its batch take effect."""
        ...


class GradientBatcher:
    """Keeps the gradients under way and evaluates all of them when the first value is needed."""

    def __init__(
        self, engine: Engine, store: ReplicaStore, buffers: Tensor, *, has_losses: bool = True,
        noise: NoiseScale | None = None,
    ) -> None:  # fmt: skip
        """Without losses nobody is told any, because the run computes none. `noise` is shown all
        gradients."""
        self._has_losses, self._noise = has_losses, noise
        self.buffers = buffers
        """BatchNorm statistics, one row per worker."""
        self.under_way: dict[int, list[SimulatedGradient]] = {}
        """The gradients of each worker that were started and neither delivered nor aborted."""
        self.evaluations = 0
        self.rows_evaluated = 0
        self.engine = engine
        self._store = store
        self._unevaluated: dict[SimulatedGradient, None] = {}

    @property
    def mean_width(self) -> float:
        return self.rows_evaluated / self.evaluations if self.evaluations else 0.0

    def start(self, gradient: SimulatedGradient) -> None:
        self._unevaluated[gradient] = None
        self.under_way.setdefault(gradient.worker, []).append(gradient)

    def is_under_way(self, gradient: SimulatedGradient) -> bool:
        return gradient in self.under_way.get(gradient.worker, ())

    def abort(self, rank: int) -> list[SimulatedGradient]:
        """Discard all gradients that a worker has under way."""
        aborted = self.under_way.pop(rank, [])
        for gradient in aborted:
            self._unevaluated.pop(gradient, None)
            self._store.forget(gradient.point)
        return aborted

    def value_of(self, gradient: SimulatedGradient) -> Tensor:
        """Its value. The statistics of its batch take effect now, not when it was evaluated."""
        if gradient.value is None:
            self._evaluate()
        assert gradient.value is not None
        if gradient.statistics is not None and self.buffers.shape[1]:
            self.buffers[gradient.worker] = gradient.statistics
        return gradient.value

    def _evaluate(self) -> None:
        gradients = list(self._unevaluated)
        self._unevaluated.clear()
        kinds = [self._kind(gradient) for gradient in gradients]
        for kind in sorted(set(kinds)):
            alike = [one for one, own in zip(gradients, kinds, strict=True) if own == kind]
            self._evaluate_group(alike)

    def _kind(self, gradient: SimulatedGradient) -> tuple[int, int]:
        """What gradients have in common that are evaluated together: the size of their batches,
        and how much their points hold."""
        value = gradient.point.value
        width = self._store.parameters.shape[1]
        return len(gradient.batch), width if value is None else value.numel()

    def _evaluate_group(self, gradients: Sequence[SimulatedGradient]) -> None:
        self.evaluations += 1
        self.rows_evaluated += len(gradients)
        # In order of rank, the rows of consecutive workers are a view of the matrix.
        ordered = sorted(gradients, key=lambda gradient: gradient.worker)
        points = self._store.take([gradient.point for gradient in ordered])
        device = points.device
        batches = torch.from_numpy(np.stack([gradient.batch for gradient in ordered])).to(device)
        keys = torch.tensor([gradient.key for gradient in ordered], device=device)
        result = self.engine.evaluate(points, self._statistics_of(ordered), batches, keys)
        width = self._store.parameters.shape[1]
        if self._noise is not None and self._has_losses:
            self._noise.add(result.gradients[:, :width], len(ordered[0].batch))
        for row, gradient in enumerate(ordered):
            # A point of a pipeline may be two vectors, and one with a lesson holds its teachers
            # too; the gradient is by the first.
            value = result.gradients[row][:width]
            gradient.value = value if gradient.weight == 1.0 else value * gradient.weight
            gradient.loss = result.losses[row] if self._has_losses else None
            gradient.statistics = result.buffers[row]

    def _statistics_of(self, gradients: Sequence[SimulatedGradient]) -> Tensor:
        if not self.buffers.shape[1]:
            return self.buffers.new_empty(len(gradients), 0)
        workers = [gradient.worker for gradient in gradients]
        return self.buffers[torch.tensor(workers, device=self.buffers.device)]


class Updates:
    """Counts the gradients that any replica applies, and the updates that each has missed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._are_on_servers = world.method.servers_hold_model
        self.count = 0
        self.read: dict[int, Read] = {}
        """When the last gradient of each worker was read."""

    def descended(self, replica: SimulatedReplica, read: Sequence[int]) -> None:
        """Count an update. `read` holds the versions at which a server's gradients were read; for a
        worker's own update it is the version of its last gradient."""
        world = self._world
        is_worker = replica.store is world.workers
        if is_worker and self._are_on_servers:
            return  # this replica is only a copy that moves between two reads of the servers
        known = self.read.get(replica.row) if is_worker and not read else None
        versions = read if known is None else (known[0],)
        if is_worker and read and world.pipelines is not None:
            lag = world.pipelines[replica.row].lag
            versions = [version - lag for version in read]
        end = replica.row if is_worker else world.replicas.index(replica, world.size)
        now = replica.store.versions[replica.row]
        for version in versions:
            # A version that was lost with a server is not older than what its standby has.
            self._applied(end, max(0, now - version), known)
        self.count += not versions

    def told(self, rank: int, *, is_shared: bool) -> None:
        """A worker has updated its own or shared parameters without `descend_`."""
        versions = self._world.workers.versions
        version, count = self.read[rank]
        missed = self.count - count if is_shared else versions[rank] - version
        versions[rank] += not is_shared
        self._applied(rank, missed)

    def _applied(self, end: int, missed: int, read: Read | None = None) -> None:
        world = self._world
        of_all = self.count - read[1] if read and world.method.shares_replica else None
        world.observer.stale(end, missed, world.kernel.now, of_all)
        self.count += 1
