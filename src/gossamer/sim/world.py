"""The simulated world: who is alive, what everybody's operations cost, what breaks when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gossamer.callbacks import Callback
from gossamer.config.cluster import Cluster
from gossamer.config.faults import FOREVER, Fault
from gossamer.mailbox import Mailbox
from gossamer.membership import Membership
from gossamer.optim.schedules import Schedule
from gossamer.payload import tensor_bytes, wire_bytes
from gossamer.pending import Gathered, Pending
from gossamer.sim.accounts import Accounts, WorkerAccount
from gossamer.sim.buckets import Bucket
from gossamer.sim.budget import Budget
from gossamer.sim.collectives import Collectives
from gossamer.sim.ending import LABEL, Ending
from gossamer.sim.gradients import GradientDesk, Request
from gossamer.sim.kernel import SECOND, Kernel, Task
from gossamer.sim.replica_matrix import ReplicaStore, SimulatedReplica
from gossamer.sim.updates import Updates
from gossamer.sim.wires import Post
from gossamer.tasks.split import Sampler
from gossamer.trace import Recorder, Span
from gossamer.worker import INBOX, Left, Message


@dataclass(frozen=True)
class Rates:
    """What the optimisers' steps are multiplied by."""

    base: float
    schedule: Schedule

    def at(self, epoch: float) -> float:
        return self.base * self.schedule.factor(epoch)


@dataclass
class Parts:
    """What a world is made of."""

    cluster: Cluster
    seed: int
    budget: Budget
    rates: Rates
    sampler: Sampler
    desk: GradientDesk
    workers: ReplicaStore
    servers: tuple[ReplicaStore, ...]
    """One store of one row each: a server's range of the parameters."""
    slices: tuple[slice, ...]
    server_machines: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    shares_replica: bool = False
    """Whether others change a worker's parameters."""
    servers_hold_model: bool = False
    """Whether gradients are applied on servers alone."""
    byte_scale: float = 1.0
    """Bytes charged per byte of tensor, for questions about larger models than the one at hand."""


class World:
    """Everything that the workers of one run share."""

    def __init__(
        self, parts: Parts, recorder: Recorder | None = None, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.cluster = cluster = parts.cluster
        self.seed = parts.seed
        self.size = cluster.workers
        self.parts = parts
        self.budget = parts.budget
        self.desk = parts.desk
        self.recorder = recorder
        self.callbacks = callbacks
        self._moves: dict[Pending[Any], list[Span]] | None = None if recorder is None else {}
        """When what an open operation awaits was on its way."""
        self.kernel = Kernel(parts.seed)
        self.kernel.on_park, self.kernel.on_resume = None, self._resumed
        self.kernel.resume_at = self._paused_until
        cards = [cluster.machine_of(rank) for rank in range(self.size)]
        cards += parts.server_machines
        self.ends = self.size + len(parts.servers)
        self.post = Post(self.kernel, cluster, cards, self.stream("network"), recorder)
        self.mailboxes = [Mailbox() for _ in range(self.ends)]
        self.collectives = Collectives(self)
        self.accounts = Accounts([WorkerAccount() for _ in range(self.size)])
        self.epochs = [0.0] * self.size
        self.alive = set(range(self.size))
        """Whose processes run. The others hear of a death a little later."""
        self.members = Membership(self.size)
        """What the workers know of each other."""
        self.ended: set[int] = set()
        self.ended_ns = [0] * self.size
        self.outstanding: dict[int, list[Request]] = {}
        self.updates = Updates(self)
        self.slow = [1.0] * self.size
        self.speakers: Sequence[int] = range(self.size)
        """Whose replicas count; with groups, their first members'."""
        self.replicas = [self._replica(parts.workers, rank) for rank in range(self.size)]
        self.replicas += [self._replica(store, 0) for store in parts.servers]
        self.on_progress: Callable[[], None] = lambda: None
        """Called after each gradient that was delivered."""
        self.on_departure: Callable[[], None] = lambda: None
        """Called when a worker has ended or died."""
        self.on_step_end: Callable[[int, int], None] = lambda rank, step: None
        """Called when a worker has made a step, of that number."""
        self.ending = Ending(self)
        for store in (parts.workers, *parts.servers):
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

    def stream(self, *purpose: object) -> random.Random:
        """One generator per purpose: adding a worker does not shift the draws of others."""
        return random.Random("/".join(map(str, (self.seed, *purpose))))

    def _replica(self, store: ReplicaStore, row: int) -> SimulatedReplica:
        if store is self.parts.workers:
            return SimulatedReplica(
                store, row, lambda: self.parts.rates.at(self.epochs[row]), self.updates.descended
            )
        return SimulatedReplica(
            store, row, lambda: self.parts.rates.at(self.budget.epochs), self.updates.descended
        )

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
        self.budget.give_back(rank, self.accounts.workers[rank].steps)
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
        if self.recorder is not None:
            self.recorder.happened(max(fault.worker, 0), str(fault), self.kernel.now)
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
        for request in self.outstanding.pop(rank, []):
            self.desk.abort(request)
            self.parts.sampler.give_back(rank, request.batch)
        if rank not in self.ended:
            self.budget.give_back(rank, self.accounts.workers[rank].steps)
        self.ending.reconsider()
        self.on_departure()
        self.kernel.at(round(self.cluster.failure_detection * SECOND), self._announce_death, rank)

    def _announce_death(self, rank: int) -> None:
        self.members.died(rank)
        for callback in self.callbacks:
            callback.on_membership(rank, False, self.kernel.now / SECOND)
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
        for request in self.outstanding.get(rank, ()):
            # What it was computing stands still for as long.
            request.paused_ns += until - before

    def _paused_until(self, end: int) -> int:
        return self._pauses.get(end, 0)

    # ------------------------------------------------------------------ costs and books

    def wire_size(self, payload: object) -> int:
        size = wire_bytes(payload)
        if self.parts.byte_scale != 1.0:
            size += round((self.parts.byte_scale - 1.0) * tensor_bytes(payload))
        return size

    def got_part(self, rank: int, payload: object) -> None:
        """From a server or a collective: as much of an exchange as it is of a model."""
        row = self.parts.workers.parameters[0]
        self.accounts.workers[rank].exchanges += tensor_bytes(payload) / max(1, row.nbytes)

    def draw_compute_ns(self, rank: int, rng: random.Random) -> int:
        return round(self.cluster.compute.draw(rng) * self.slow[rank] * SECOND)

    def delivered(self, request: Request, started_ns: int, computing_ns: int) -> Tensor:
        """A gradient is there: its samples count now."""
        rank = request.worker
        gradient = self.desk.deliver(request)
        self.outstanding[rank].remove(request)
        self.updates.read[rank] = request.read
        account = self.accounts.workers[rank]
        account.steps += 1
        account.computing_ns += computing_ns
        account.samples += len(request.batch)
        self.budget.deliver(rank, len(request.batch))
        if request.loss is not None:
            self.accounts.losses.append(request.loss)
        if self.recorder is not None:
            self.recorder.computed(rank, started_ns, self.kernel.now)
        for callback in self.callbacks:
            loss = None if request.loss is None else float(request.loss)
            callback.on_step(rank, account.steps, self.kernel.now / SECOND, loss)
        return gradient

    def _resumed(self, task: Task) -> None:
        """Waiting is time with nothing to compute and something awaited."""
        parked = task.parked
        if not task.is_main or task.worker >= self.size or parked is None:
            return
        if parked.label in ("gradient", "bucket", LABEL) or self.kernel.now == task.parked_since:
            return
        waiting = self.accounts.workers[task.worker].waiting_ns
        whom = self._name_of(parked.peer)
        # Of a server it says which: that is where bottlenecks are.
        cause = parked.label if parked.peer in range(self.size) else parked.label + whom
        waiting[cause] = waiting.get(cause, 0) + self.kernel.now - task.parked_since
        if self.recorder is not None:
            self.recorder.waited(
                task.worker, parked.label, whom, task.parked_since, self.kernel.now,
                self._moves_of(parked),
            )  # fmt: skip

    def _name_of(self, end: int | None) -> str:
        if end is None:
            return ""
        return f" from worker {end}" if end < self.size else f" from server {end - self.size}"

    def moved(self, pending: Pending[Any] | None, start_ns: int) -> None:
        """What this operation awaits was on its way since then, and is there."""
        if self._moves is not None and pending is not None:
            self._moves.setdefault(pending, []).append((start_ns, self.kernel.now))

    def _moves_of(self, pending: Pending[Any]) -> list[Span]:
        if self._moves is None:
            return []
        parts = pending.parts if isinstance(pending, Gathered) else [pending]
        return [span for part in parts for span in self._moves.pop(part, ())]
