"""The simulated world: who is alive, what everybody's operations cost, what breaks when."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gossamer.config.faults import FOREVER, Fault
from gossamer.config.settings import Settings, split_groups
from gossamer.mailbox import Mailbox
from gossamer.membership import Membership
from gossamer.observe.callbacks import Callback
from gossamer.observe.observer import Observer, Span
from gossamer.observe.run_observer import RunObserver
from gossamer.optim.optimisers import make_optimiser
from gossamer.optim.schedules import make_schedule
from gossamer.payload import tensor_bytes, wire_bytes
from gossamer.pending import Gathered, Pending
from gossamer.replica import cut
from gossamer.sim.buckets import Bucket, make_buckets
from gossamer.sim.budget import Budget
from gossamer.sim.collectives import Collectives
from gossamer.sim.delivery import Delivery
from gossamer.sim.engine import Engine
from gossamer.sim.gradients import (
    GradientBatcher,
    GradientSource,
    SimulatedGradient,
    Updates,
)
from gossamer.sim.kernel import SECOND, Kernel, SimulatedTask
from gossamer.sim.replica_matrix import ReplicaStore, SimulatedReplica
from gossamer.sim.run_end import LABEL, RunEnd
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.split import make_sampler
from gossamer.worker import INBOX, Left, Message


class World:
    """Everything that the workers of one run share."""

    def __init__(
        self, settings: Settings, options: Mapping[str, Any], model: FlatModel, engine: Engine,
        observers: Sequence[Observer] = (), callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        """`options` are those of the method in this run."""
        self.cluster = cluster = settings.cluster
        self.seed = settings.seed
        self.size = cluster.workers
        self.method = settings.method.method
        self.groups = split_groups(settings.method.groups, cluster)
        self.speakers: Sequence[int] = [group[0] for group in self.groups] or range(self.size)
        """Whose replicas count; with groups, their first members'."""
        self.observer = RunObserver(self.size, others=observers, callbacks=callbacks)
        self.metrics = self.observer.metrics
        self._moves: dict[Pending[Any], list[Span]] | None = {} if observers else None
        """When what an open operation awaits was on its way."""
        self.kernel = Kernel(self.seed)
        self.kernel.on_park, self.kernel.on_resume = None, self._resumed
        self.kernel.resume_at = self._paused_until
        self._plan_samples(settings, is_synchronous=self.method.is_synchronous(options))
        self._make_replicas(settings, options, model)
        self.batcher = self._make_source(engine, model)
        own_bytes = model.layout.total * model.initial.element_size()
        self._byte_scale = settings.model_bytes / own_bytes if settings.model_bytes else 1.0
        """Bytes charged per byte of tensor, for questions about larger models than this one."""
        self.buckets = self._make_buckets(settings, model)
        cards = [cluster.machine_of(rank) for rank in range(self.size)]
        cards += self._server_machines(settings.method.placement)
        listening = self.observer if observers else None
        self.post = Delivery(self.kernel, cluster, cards, self.stream("network"), listening)
        self.mailboxes = [Mailbox() for _ in range(self.ends)]
        self.collectives = Collectives(self)
        self.alive = set(range(self.size))
        """Whose processes run. The others hear of a death a little later."""
        self.members = Membership(self.size)
        """What the workers know of each other."""
        self.ended: set[int] = set()
        self.ended_ns = [0] * self.size
        self.slow = [1.0] * self.size
        self.on_progress: Callable[[], None] = lambda: None
        """Called after each gradient that was delivered."""
        self.on_departure: Callable[[], None] = lambda: None
        """Called when a worker has ended or died."""
        self.on_step_end: Callable[[int, int], None] = lambda rank, step: None
        """Called when a worker has made a step, of that number."""
        self.ending = RunEnd(self)
        for store in (self.workers, *self.servers):
            store.on_change = self.ending.changed
        self._pauses: dict[int, int] = {}
        self._speaking: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._left: list[set[int]] = [set() for _ in range(self.ends)]
        """For each server, whose end or death it has been told."""
        for fault in cluster.faults:
            if fault.is_trait:
                # Nobody's first step may come before it.
                self.begin_fault(fault)
            else:
                self.kernel.at(round(fault.at * SECOND), self.begin_fault, fault)

    def _plan_samples(self, settings: Settings, *, is_synchronous: bool) -> None:
        assert settings.batch
        targets = settings.task.train.targets
        self.budget = Budget(
            settings.samples, settings.batch, len(settings.task.train), synchronous=is_synchronous,
            living=lambda: self.alive - self.ended, groups=self.groups,
        )  # fmt: skip
        self.sampler = make_sampler(
            targets, self.size, settings.batch, settings.split, settings.seed, is_synchronous
        )

    def _make_replicas(
        self, settings: Settings, options: Mapping[str, Any], model: FlatModel
    ) -> None:
        """The workers' replicas, and for each server one of its range of the parameters."""
        assert settings.optimiser
        assert settings.epochs
        assert settings.learning_rate
        optimiser = settings.method.optimiser(
            make_optimiser(settings.optimiser), len(self.speakers),
            is_synchronous=self.method.is_synchronous(options),
        )  # fmt: skip
        self.slices = (
            cut(model.layout.sizes, settings.method.servers) if self.method.has_server else ()
        )
        self.workers = ReplicaStore(self.size, model.initial, optimiser, clip=settings.clip)
        self.servers = tuple(
            ReplicaStore(1, model.initial[part], optimiser, clip=settings.clip)
            for part in self.slices
        )
        self.ends = self.size + len(self.servers)
        self.schedule = make_schedule(settings.schedule, epochs=settings.epochs, workers=self.size)
        self._base_rate = settings.learning_rate
        self.epochs = [0.0] * self.size
        self.updates = Updates(self)
        self.replicas = [
            SimulatedReplica(
                self.workers, rank, partial(self._rate_of, rank), self.updates.descended
            )
            for rank in range(self.size)
        ]
        self.replicas += [
            SimulatedReplica(store, 0, self._rate_of_servers, self.updates.descended)
            for store in self.servers
        ]

    def _make_source(self, engine: Engine, model: FlatModel) -> GradientSource:
        buffers = model.initial_buffers.repeat(self.size, 1)
        return GradientBatcher(engine, self.workers, buffers)

    def _make_buckets(self, settings: Settings, model: FlatModel) -> tuple[Bucket, ...]:
        sample = settings.task.train.inputs[:1].to(model.device)
        return make_buckets(model.module, sample, self._byte_scale)

    def _rate_of(self, rank: int) -> float:
        return self._base_rate * self.schedule.factor(self.epochs[rank])

    def _rate_of_servers(self) -> float:
        return self._base_rate * self.schedule.factor(self.budget.epochs)

    def _server_machines(self, placement: str) -> list[int]:
        """A machine for each server: one of its own, or those of the workers in turn."""
        machines = self.cluster.machine_of(self.size - 1) + 1
        if placement == "workers":
            return [server % machines for server in range(len(self.servers))]
        return [machines + server for server in range(len(self.servers))]

    def stream(self, *purpose: object) -> random.Random:
        """One generator per purpose: adding a worker does not shift the draws of others."""
        return random.Random("/".join(map(str, (self.seed, *purpose))))

    # ------------------------------------------------------------------ membership

    def live_seen_by(self, rank: int) -> frozenset[int]:
        """The same object until it changes: methods ask at every step."""
        live = self.members.live_for(rank)
        if rank < self.size:
            return live
        if live is not self._speaking[0]:
            # A server knows only those who push for themselves.
            self._speaking = (live, live.intersection(self.speakers))
        return self._speaking[1]

    def live_at(self, step: int) -> frozenset[int]:
        """The first who asks about a step fixes the members of its round for everybody."""
        known = self.members.members_of_round(step)
        return self.members.fix_round(step, self.members.live) if known is None else known

    def end_worker(self, rank: int) -> None:
        """A worker's main part is over."""
        self.ended.add(rank)
        self.ended_ns[rank] = self.kernel.now
        self.budget.give_back(rank, self.metrics.workers[rank].steps)
        self.collectives.reconsider()
        self.on_departure()
        for server in range(self.size, self.ends):
            # Like the end of a connection: it arrives behind the pushes still on their way.
            self.post.carry(rank, server, 0, partial(self._tell_server, server, rank))

    def progressed(self) -> None:
        """After each gradient that was delivered."""
        self.on_progress()
        self.ending.progressed()

    @property
    def duration_ns(self) -> int:
        """The virtual time of the run so far, or of all of it: to the last change of a replica."""
        if not self.over:
            return self.kernel.now
        end_ns = self.ending.finished_ns
        if end_ns is None:
            end_ns = max((self.ended_ns[rank] for rank in self.alive), default=self.kernel.now)
        return max(end_ns, self.ending.changed_ns)

    @property
    def over(self) -> bool:
        return self.alive <= self.ended

    # ------------------------------------------------------------------ faults

    def begin_fault(self, fault: Fault) -> None:
        end_ns = round(fault.lasts * SECOND) if fault.lasts != FOREVER else None
        self.observer.happened(max(fault.worker, 0), str(fault), self.kernel.now)
        if fault.kind == "kill":
            self._kill(fault.worker)
        elif fault.kind == "pause" and end_ns is not None:
            self._pause(fault.worker, end_ns)
        elif fault.kind == "slow":
            self.slow[fault.worker] *= fault.amount
        elif fault.kind == "slow-link":
            self.post.slow_card(fault.worker, fault.amount)
        elif fault.kind == "drop":
            self.post.drops.append(fault.amount)
        elif fault.kind == "delay":
            self.post.extra_delay_s += fault.amount
        elif fault.kind == "partition":
            self.post.partitions.append(fault.sides)
            self.kernel.at(round(self.cluster.deadline * SECOND), self._give_up_across, fault)
        if end_ns is not None:
            self.kernel.at(end_ns, self._end_fault, fault)

    def _end_fault(self, fault: Fault) -> None:
        if fault.kind == "slow":
            self.slow[fault.worker] /= fault.amount
        elif fault.kind == "slow-link":
            self.post.slow_card(fault.worker, 1 / fault.amount)
        elif fault.kind == "drop":
            self.post.drops.remove(fault.amount)
        elif fault.kind == "delay":
            self.post.extra_delay_s -= fault.amount
        elif fault.kind == "partition":
            self.post.heal(fault.sides)
            self._reach_again()
            self.collectives.reconsider()

    def _reach_again(self) -> None:
        """Who can be reached again counts as alive again."""
        for rank in range(self.size):
            lost = self.members.cut_off_from(rank)
            self.members.cut_off(rank, (r for r in lost if self.post.are_separated(rank, r)))

    def _give_up_across(self, fault: Fault) -> None:
        """The partition has outlasted the deadline: who is across counts as lost until it heals."""
        if fault.sides not in self.post.partitions:
            return
        for rank in self.alive:
            across = (r for r in range(self.size) if self.post.are_separated(rank, r))
            self.members.cut_off(rank, across)
        self.members.fail_lost()
        self.collectives.reconsider()

    def _kill(self, rank: int) -> None:
        if rank not in self.alive:
            return
        self.alive.discard(rank)
        if rank not in self.ended:
            self.ended_ns[rank] = self.kernel.now
        self.kernel.end_tasks(rank)
        self.post.bury(rank)
        self.abort_gradients(rank)
        if rank not in self.ended:
            self.budget.give_back(rank, self.metrics.workers[rank].steps)
        self.ending.reconsider()
        self.on_departure()
        self.kernel.at(round(self.cluster.failure_detection * SECOND), self._announce_death, rank)

    def abort_gradients(self, rank: int) -> list[SimulatedGradient]:
        """Discard what a worker is computing; its batches go back to be used by others."""
        aborted = self.batcher.abort(rank)
        for gradient in aborted:
            self.sampler.give_back(rank, gradient.batch)
        return aborted

    def _announce_death(self, rank: int) -> None:
        self.members.died(rank)
        self.observer.lost(rank, self.kernel.now)
        self.members.fail_lost()
        self.collectives.reconsider()
        for server in range(self.size, self.ends):
            self._tell_server(server, rank)

    def _tell_server(self, server: int, rank: int) -> None:
        self.mailboxes[server].deliver(INBOX, Message(rank, Left()))

    def received(self, server: int, message: Message) -> None:
        """What a server knows of its clients keeps step with what it has read of its inbox."""
        if isinstance(message.payload, Left):
            self._left[server].add(message.source)

    def clients_of(self, server: int) -> frozenset[int]:
        """Whom a server may still hear from."""
        return frozenset(self.speakers) - self._left[server]

    def _pause(self, rank: int, duration_ns: int) -> None:
        now = self.kernel.now
        before = max(now, self._pauses.get(rank, 0))
        until = max(before, now + duration_ns)
        self._pauses[rank] = until
        for gradient in self.batcher.under_way.get(rank, ()):
            # What it was computing stands still for as long.
            gradient.paused_ns += until - before

    def _paused_until(self, end: int) -> int:
        return self._pauses.get(end, 0)

    # ------------------------------------------------------------------ costs and observing

    def wire_size(self, payload: object) -> int:
        size = wire_bytes(payload)
        if self._byte_scale != 1.0:
            size += round((self._byte_scale - 1.0) * tensor_bytes(payload))
        return size

    def got_part(self, rank: int, payload: object) -> None:
        """From a server or a collective: as much of an exchange as it is of a model."""
        row = self.workers.parameters[0]
        share = tensor_bytes(payload) / max(1, row.nbytes)
        self.observer.exchanged(rank, None, self.kernel.now, share=share)

    def _resumed(self, task: SimulatedTask) -> None:
        """Waiting is time with nothing to compute and something awaited."""
        parked = task.parked
        if not task.is_main or task.worker >= self.size or parked is None:
            return
        if parked.label in ("gradient", "bucket", LABEL) or self.kernel.now == task.parked_since:
            return
        span = (task.parked_since, self.kernel.now)
        moving = self._moves_of(parked)
        self.observer.waited(task.worker, parked.label, parked.peer, span, moving)

    def moved(self, pending: Pending[Any] | None, start_ns: int) -> None:
        """What this operation awaits was on its way since then, and is there."""
        if self._moves is not None and pending is not None:
            self._moves.setdefault(pending, []).append((start_ns, self.kernel.now))

    def _moves_of(self, pending: Pending[Any]) -> list[Span]:
        if self._moves is None:
            return []
        parts = pending.parts if isinstance(pending, Gathered) else [pending]
        return [span for part in parts for span in self._moves.pop(part, ())]
