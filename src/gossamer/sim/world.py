"""The simulated world: what the workers of one run share, who is alive and who waits for whom."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gossamer.batch_shares import BatchShares
from gossamer.config.settings import Settings, split_groups
from gossamer.mailbox import Mailbox
from gossamer.membership import Membership
from gossamer.methods import MethodSpec
from gossamer.observe.callbacks import Callback
from gossamer.observe.observer import Observer
from gossamer.observe.run_observer import RunObserver
from gossamer.optim.schedules import BatchGrowth
from gossamer.payload import tensor_bytes
from gossamer.pipeline.stages import StageCut
from gossamer.replica import cut as cut_evenly
from gossamer.sim.buckets import Bucket, make_buckets
from gossamer.sim.budget import Budget
from gossamer.sim.collectives import Collectives
from gossamer.sim.delivery import Delivery, cards_of
from gossamer.sim.engine import Engine
from gossamer.sim.faults.ledger import Recoveries, SampleBook
from gossamer.sim.faults.mortal_servers import MortalServers
from gossamer.sim.faults.newcomers import Newcomers
from gossamer.sim.faults.simulated_faults import SimulatedFaults
from gossamer.sim.gradients import (
    GradientBatcher,
    GradientSource,
    SimulatedGradient,
    Updates,
)
from gossamer.sim.kernel import SECOND, Kernel, SimulatedTask
from gossamer.sim.pipelines.lanes import LanedDelivery, MachineView, StageLanes
from gossamer.sim.pipelines.pipeline import Pipelines
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
        self._has_losses = settings.engine != "none"
        self.size = settings.replicas
        self.method = settings.method.method
        self.layout = model.layout
        self.groups = split_groups(settings.method.groups, cluster)
        self.speakers: Sequence[int] = [group[0] for group in self.groups] or range(self.size)
        """The workers whose replicas count: all, or the leaders of the groups."""
        shape, self.pipelines = settings.method.shape, None
        cut = settings.stage_cut() if shape.machines > 1 else None
        self._stages_of_servers = _stages_of_servers(settings.method, cut)
        self.lanes = None
        if cut is not None:
            self.lanes = _lanes_of(
                self.size, settings.method, cut, has_servers=bool(self._stages_of_servers)
            )
        """The machines of each replica, where it has several."""
        if self.lanes is not None:
            observers = [MachineView(one, self.lanes) for one in observers]
        self.observer = RunObserver(self.size, others=observers, callbacks=callbacks)
        self.metrics = self.observer.metrics
        self.kernel = Kernel(self.seed)
        self.kernel.on_resume = self._resumed
        absent = cluster.absent_at_first
        self.alive = set(range(self.size)) - absent
        """The workers whose processes run. The others learn of a death a little later."""
        self.working = set(self.alive)
        """Those of them that have not ended."""
        self.ended: set[int] = set()
        self.book, self.recoveries = SampleBook(), Recoveries()
        self.ended_ns = [0] * self.size
        self.members = Membership(self.size)
        """What the workers know of each other."""
        for rank in absent:
            self.members.died(rank)
        self.gone_ns = dict.fromkeys(absent, 0)
        """Since when each worker that is not there has not been."""
        self._plan_samples(settings, is_synchronous=self.method.is_synchronous(options))
        self._make_replicas(settings, options, model)
        self.batcher = self._make_source(engine, model)
        own_bytes = model.layout.total * model.initial.element_size()
        byte_scale = settings.model_bytes / own_bytes if settings.model_bytes else 1.0
        self.buckets = self._make_buckets(settings, model, byte_scale)
        self.post = self._make_post(settings, byte_scale, is_observed=bool(observers))
        self.post.share_with_others(self.stream)
        for rank in absent:
            self.post.bury(rank)
        self.mailboxes = [Mailbox() for _ in range(self.ends)]
        self.newcomers = Newcomers(self)
        self.collectives = Collectives(self)
        self.on_progress: Callable[[], None] = lambda: None
        """Called after each gradient that was delivered."""
        self.on_departure: Callable[[], None] = lambda: None
        """Called when a worker has ended or died."""
        self.on_step_end: Callable[[int, int], None] = lambda rank, step: None
        """Called with the rank and the number of a step that the worker has completed."""
        self.ending = RunEnd(self)
        self._clients = [frozenset(self.speakers) - absent] * len(self.servers)
        """For each server, the workers of whose end or death it has not read."""
        self._ordered: tuple[frozenset[int], tuple[int, ...]] = (frozenset(), ())
        self.faults = SimulatedFaults(self)
        if cut is not None:
            self.pipelines = Pipelines(self, shape, cut)

    def _make_post(self, settings: Settings, byte_scale: float, *, is_observed: bool) -> Delivery:
        arguments = (
            self.kernel, self.cluster,
            cards_of(
                self.cluster, len(self.slices), settings.method.placement,
                len(self.servers) - len(self.slices),
            ),
            self.stream("network"), self.observer if is_observed else None, byte_scale,
        )  # fmt: skip
        return Delivery(*arguments) if self.lanes is None else LanedDelivery(self.lanes, *arguments)

    def _plan_samples(self, settings: Settings, *, is_synchronous: bool) -> None:
        assert settings.batch
        targets = settings.task.train.labels
        is_balanced = settings.method.balance
        self.budget = budget = Budget(
            settings.samples, settings.batch, len(settings.task.train), synchronous=is_synchronous,
            working=self.working, groups=self.groups,
            shares=BatchShares(settings.batch, self.size) if is_balanced else None,
            growth=BatchGrowth(
                settings.made_schedule, settings.batch * self.size, self.metrics.known_noise
            )
            if settings.made_schedule.is_growing
            else None,
        )  # fmt: skip
        self.sampler = make_sampler(
            targets, self.size, settings.batch, settings.split, settings.seed, is_synchronous,
            budget.shares_of if is_balanced else None,
        )  # fmt: skip

    def _make_replicas(
        self, settings: Settings, options: Mapping[str, Any], model: FlatModel
    ) -> None:
        """Make the replicas of the workers, and one per server for its range of the parameters."""
        assert settings.epochs
        assert settings.learning_rate
        optimiser = settings.method.optimiser(
            settings.rule, len(self.speakers),
            is_synchronous=self.method.is_synchronous(options),
        )  # fmt: skip
        self.slices = ()
        if self.method.has_server:
            self.slices = self._stages_of_servers or cut_evenly(
                model.layout.sizes, settings.method.servers
            )

        def make_store(rows: int, part: slice) -> ReplicaStore:
            own = optimiser.suited(model.layout.within(part).shapes)
            return ReplicaStore(
                rows, model.initial[part], own, clip=settings.clip, kernel=self.kernel,
                clips_first=settings.method.clips_first,
            )  # fmt: skip

        self.workers = make_store(self.size, slice(0, model.layout.total))
        has_standbys = bool(settings.method.standby)
        self.servers = tuple(make_store(1, part) for part in self.slices * (1 + has_standbys))
        self.ends = self.size + len(self.servers)
        self.mortal = MortalServers(self, settings.method.standby)
        self.schedule = settings.made_schedule
        self._base_rate = settings.learning_rate
        self.epochs = [0.0] * self.size
        self.updates = Updates(self)
        self.replicas = [
            SimulatedReplica(
                self.workers, rank, partial(self._rate_of, rank), self.updates.descended,
                has_schedule=settings.schedule != "constant",
            )
            for rank in range(self.size)
        ]  # fmt: skip
        self.replicas += [
            SimulatedReplica(store, 0, self._rate_of_servers, self._server_descended)
            for store in self.servers
        ]

    def _make_source(self, engine: Engine, model: FlatModel) -> GradientSource:
        buffers = model.initial_buffers.repeat(self.size, 1)
        return GradientBatcher(
            engine, self.workers, buffers, has_losses=self._has_losses, noise=self.metrics.noise
        )

    def _make_buckets(
        self, settings: Settings, model: FlatModel, byte_scale: float
    ) -> tuple[Bucket, ...]:
        sample = settings.task.train.first(1).to(model.device)
        return make_buckets(model.module, sample, byte_scale)

    def _server_descended(self, replica: SimulatedReplica, read: Sequence[int]) -> None:
        if replica in self.mortal.acting:  # a standby repeats what its primary has told
            self.updates.descended(replica, read)

    def _rate_of(self, rank: int, pace: float) -> float:
        return self._base_rate * self.schedule.factor(self.epochs[rank] * pace)

    def _rate_of_servers(self, pace: float) -> float:
        return self._base_rate * self.schedule.factor(self.budget.epochs * pace)

    def stream(self, *purpose: object) -> random.Random:
        """One generator per purpose, so that another worker does not change the others' draws."""
        return random.Random("/".join(map(str, (self.seed, *purpose))))

    # ------------------------------------------------------------------ membership

    def end_worker(self, rank: int) -> None:
        """A worker's main part is over."""
        self.ended.add(rank)
        self._stop_working(rank)
        self.collectives.reconsider()
        self.on_departure()
        for server in range(self.size, self.ends):
            # As the end of a connection does, this arrives after the pushes sent before it.
            life = self.members.life_of(rank)
            self.post.carry(rank, server, 0, partial(self._tell_server, server, rank, life))

    def _stop_working(self, rank: int) -> None:
        self.working.remove(rank)
        self.ended_ns[rank] = self.kernel.now
        self.budget.give_back(rank, self.newcomers.rounds_made(rank, self.steps_of(rank)))

    @property
    def samples_read(self) -> int:
        """Of gradients that were begun."""
        return self.book.read.total()

    @property
    def samples_aborted(self) -> int:
        """Of those that nobody has got."""
        return self.book.given_again.total()

    def steps_of(self, rank: int) -> int:
        """How many gradients a worker has computed, in all its lives."""
        return self.metrics.workers[rank].steps

    @property
    def duration_ns(self) -> int:
        """The virtual time of the run so far; a whole run ends when a replica last changed."""
        if not self.over:
            return self.kernel.now
        end_ns = self.ending.finished_ns
        if end_ns is None:
            end_ns = max((self.ended_ns[rank] for rank in self.alive), default=self.kernel.now)
        stores = [self.workers, *(replica.store for replica in self.mortal.acting)]
        return max(end_ns, *(store.changed_ns for store in stores))

    @property
    def over(self) -> bool:
        return not self.working

    def kill(self, rank: int) -> None:
        """Its process is gone at once; the others learn of it after the time of detection."""
        if rank not in self.alive:
            self.newcomers.died(rank)
            return
        self.alive.discard(rank)
        self.recoveries.begin(rank, f"worker {rank}", "died", self.kernel.now)
        self.gone_ns[rank] = self.kernel.now
        self.kernel.end_tasks(rank)
        self.post.bury(rank)
        for gradient in self.abort_gradients(rank):
            self.metrics.workers[rank].lost(
                self.kernel.now - gradient.began_ns, len(gradient.batch)
            )
            self.book.lost[gradient.epoch] += len(gradient.batch)
        if rank in self.working:
            self._stop_working(rank)
        self.newcomers.died(rank)
        self.ending.reconsider()
        self.on_departure()
        detected = round(self.cluster.failure_detection * SECOND)
        self.kernel.at(detected, self._announce_death, rank, self.members.life_of(rank))

    def abort_gradients(self, rank: int) -> list[SimulatedGradient]:
        """Discard the gradients that a worker computes; others will use their batches."""
        aborted = self.batcher.abort(rank)
        if self.pipelines is not None:
            self.pipelines[rank].cancel()
        for gradient in aborted:
            for batch in self.budget.ordinary(gradient.batch):
                self.sampler.give_back(rank, batch)
            self.book.given_again[gradient.epoch] += len(gradient.batch)
        return aborted

    def _announce_death(self, rank: int, life: int) -> None:
        if not self.members.died(rank, life):
            return  # it has come back, and this was known before
        self.observer.lost(rank, self.kernel.now)
        self.recoveries.reached(rank, "noticed", self.kernel.now)
        self.members.fail_lost()
        self.collectives.reconsider()
        for server in range(self.size, self.ends):
            self._tell_server(server, rank, life)

    def _tell_server(self, server: int, rank: int, life: int) -> None:
        self.mailboxes[server].deliver(INBOX, Message(rank, Left(life)))

    def reach_again(self, rank: int) -> None:
        """A worker that was dead starts anew. It is no member yet, but others may write to it."""
        self._announce_death(rank, self.members.life_of(rank))
        self.post.unbury(rank)

    def admit(self, rank: int, step: int) -> None:
        """A worker takes part from this step on, as a new member."""
        self.members.joined(rank)
        if self.members.is_parted:
            others = range(self.size)
            self.members.cut_off(rank, (r for r in others if self.post.are_separated(rank, r)))
        self.metrics.workers[rank].absent_ns += self.kernel.now - self.gone_ns.pop(rank)
        self.alive.add(rank)
        self.working.add(rank)
        self.collectives.forget(rank)
        self.sampler.begin(rank, step)
        self._clients = [own | {rank} for own in self._clients]
        self.observer.happened(rank, "takes part", self.kernel.now)
        self.recoveries.reached(rank, "takes part", self.kernel.now)
        self.observer.joined(rank, self.kernel.now)

    def received(self, server: int, message: Message) -> None:
        """A server has read this message. It knows of an end only after reading of it."""
        left = message.payload
        if isinstance(left, Left) and left.life == self.members.life_of(message.source):
            self._clients[server - self.size] -= {message.source}

    def clients_of(self, server: int) -> frozenset[int]:
        """The workers that may still send to a server."""
        return self._clients[server - self.size]

    def in_order(self, ranks: frozenset[int]) -> Sequence[int]:
        """These ranks sorted. The last answer is kept, because all workers ask for the same."""
        if ranks is not self._ordered[0]:
            self._ordered = (ranks, tuple(sorted(ranks)))
        return self._ordered[1]

    # ------------------------------------------------------------------ observing

    def got_part(self, rank: int, payload: object) -> None:
        """A worker has got a part of a model from a server or a collective."""
        row = self.workers.parameters[0]
        share = tensor_bytes(payload) / max(1, row.nbytes)
        self.observer.exchanged(rank, None, self.kernel.now, share=share)

    def _resumed(self, task: SimulatedTask) -> None:
        """Tell how long the task waited: it awaited something and had nothing to compute."""
        parked = task.parked
        if not task.is_main or task.worker >= self.size or parked is None:
            return
        if parked.label in ("gradient", "bucket", LABEL) or self.kernel.now == task.parked_since:
            return
        span = (task.parked_since, self.kernel.now)
        moving = self.post.moves_of(parked)
        self.observer.waited(task.worker, parked.label, parked.peer, span, moving)


def _stages_of_servers(method: MethodSpec, cut: StageCut | None) -> tuple[slice, ...]:
    """With as many servers as stages, each server holds the parameters of one stage, as in
    DistBelief; empty where that is not so."""
    shape = method.shape
    is_alike = method.servers == shape.stages == shape.machines and shape.per_machine == 1
    return cut.in_order if cut is not None and is_alike else ()


def _lanes_of(
    replicas: int, method: MethodSpec, cut: StageCut, *, has_servers: bool
) -> StageLanes:  # fmt: skip
    """Each machine holds its share of the parameters of its stage."""
    shape = method.shape
    held = [0] * shape.stages
    for chunk, stage in enumerate(shape.places):
        held[stage] += cut.parameters(chunk)
    each = [size / (sum(held) * shape.tensor) for size in held]
    shares = [share for share in each for _ in range(shape.tensor)]
    return StageLanes(replicas, shares, has_servers_by_lane=has_servers)
