"""One worker's view of the simulated world (the `Worker` protocol)."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from gossamer.errors import Late, PeerLost, ProtocolError, RunOver
from gossamer.groups import mapped
from gossamer.mailbox import Receive, Reply
from gossamer.pending import Pending
from gossamer.replica import Fragment, Layout, Replica
from gossamer.rules import pair_delta
from gossamer.sim.gradients import Batch, SimulatedGradient
from gossamer.sim.kernel import SECOND
from gossamer.sim.replica_matrix import Point, SimulatedReplica
from gossamer.sim.world import World
from gossamer.tasks.keyed import key_of
from gossamer.topology import Others
from gossamer.worker import Lesson, Message, Tag, check_idle, check_lesson

T = TypeVar("T")


class SimulatedWorker:
    """What a method may touch, in virtual time."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank = rank
        self.size = world.size if rank < world.size else len(world.speakers)
        self.rng = world.stream("worker", rank)
        life = world.members.life_of(rank) if rank < world.size else 0
        self._next = self.step = world.newcomers.first_step.get(rank, 0)
        self._world = world
        self._compute_rng = world.stream("compute", rank, *([life] if life else []))
        # No late answer to an earlier life is taken for one to this life.
        self._requests = life << 32
        self._peers: tuple[frozenset[int], Sequence[int]] = (frozenset(), [])
        self._clients: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._to_itself: deque[tuple[Tag, Message, Pending[None]]] = deque()
        self._gradients = world.steps_of(rank) if rank < world.size else 0
        self._idle = 0
        self._seen: int | None = None
        """The number of all updates when the parameters of a server were last read."""

    @property
    def peers(self) -> Sequence[int]:
        live = self.live
        if live is not self._peers[0]:
            ranks = self._world.in_order(live)
            self._peers = (live, Others(ranks, bisect_left(ranks, self.rank)))
        return self._peers[1]

    def answering(self, peers: Sequence[int]) -> Sequence[int]:
        return peers

    @property
    def live(self) -> frozenset[int]:
        """The same object until it changes, because methods ask at every step."""
        live = self._world.members.live_for(self.rank)
        if self.rank < self._world.size:
            return live
        if live is not self._clients[0]:
            # A server knows only the workers that push for themselves.
            self._clients = (live, live.intersection(self._world.speakers))
        return self._clients[1]

    def live_at(self, step: int) -> frozenset[int]:
        """The first worker that asks about a step fixes the members of its round for everybody."""
        members = self._world.members
        known = members.members_of_round(step)
        return members.fix_round(step, members.live) if known is None else known

    @property
    def servers(self) -> Sequence[int]:
        return range(self._world.size, self._world.size + len(self._world.slices))

    @property
    def slices(self) -> Sequence[slice]:
        return self._world.slices

    @property
    def layout(self) -> Layout:
        return self._world.layout

    @property
    def clients(self) -> frozenset[int]:
        return self._world.clients_of(self.rank)

    def observe(self, what: str, value: float = 1.0) -> None:
        if what in ("update", "shared update"):
            self._world.updates.told(self.rank, is_shared=what == "shared update")
            return
        self._world.observer.observed(self.rank, what, value, self._world.kernel.now)

    @property
    def expected_steps(self) -> int:
        return self._world.budget.expected_steps(self._world.size)

    @property
    def over(self) -> bool:
        return not self._world.working

    def now(self) -> float:
        return self._world.kernel.now / SECOND

    def steps(self) -> Iterator[int]:
        world = self._world
        while True:
            if world.budget.is_synchronous and self._next == world.budget.rounds:
                world.newcomers.open_round(self.rank, self._next)
            if (epoch := world.budget.open_step(self._next)) is None:
                return
            world.epochs[self.rank] = epoch
            world.ending.between.add(self.rank)
            self.step = self._next
            before = self._gradients
            yield self.step
            self._idle = self._idle + 1 if self._gradients == before else 0
            check_idle(self.rank, self._idle)
            world.newcomers.ended_step(self.rank, self.step)
            world.on_step_end(self.rank, self.step)
            self._next += 1

    def gradient(
        self, at: Tensor | Replica, batch: Tensor | None = None, *, lesson: Lesson | None = None
    ) -> SimulatedGradient:
        world, kernel = self._world, self._world.kernel
        pipeline = None if world.pipelines is None else world.pipelines[self.rank]
        if lesson is not None:
            check_lesson(is_divided=pipeline is not None)
            at = lesson.beside(at if isinstance(at, Tensor) else at.snapshot())
        if pipeline is not None and pipeline.is_lagging:
            now = at if isinstance(at, Tensor) else at.snapshot()
            point = Point(-1, pipeline.point(now))
        elif isinstance(at, SimulatedReplica):
            point = at.store.point(at.row)
        elif isinstance(at, Tensor):
            point = Point(-1, at)
        else:
            raise ProtocolError(f"a gradient is taken at a tensor or a replica, got {type(at)}")
        world.ending.between.discard(self.rank)
        if not world.budget.begin(self.rank):
            raise RunOver
        indices = self._next_batch() if batch is None else np.asarray(batch)
        epoch = int(world.budget.epochs)
        world.book.read[epoch] += len(indices)
        key = key_of(world.seed, self.rank, self._gradients)
        self._gradients += 1
        gradient = SimulatedGradient(self.rank, point, indices, key)
        gradient.step, gradient.epoch = self.step, epoch
        if batch is None:
            gradient.weight = world.budget.weight(self.rank, self.step, self.live)
        updates = world.updates.count if self._seen is None else self._seen
        lag = 0 if pipeline is None else pipeline.lag
        gradient.read = (world.workers.versions[self.rank] - lag, updates)
        self._seen = None
        if pipeline is None:
            drawn = world.cluster.compute.draw(self._compute_rng, len(indices))
            if lesson is not None:  # each teacher makes a forward pass
                drawn *= 1 + world.cluster.compute.forward_share * len(lesson.teachers)
            gradient.start(world, round(drawn * world.faults.slowness(self.rank) * SECOND))
        else:
            gradient.start(world, None)
            pipeline.begin(gradient)
        if kernel.current is not None:
            kernel.current.gradient = gradient
        return gradient

    def _next_batch(self) -> Batch:
        """The samples of the next gradient: one ordinary batch, or several where batches grow."""
        world = self._world
        parts = [world.sampler.next(self.rank) for _ in range(world.budget.multiple(self.step))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    # ------------------------------------------------------------------ messages

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        message = Message(self.rank, payload)
        if to != self.rank:
            return self._post("send", to, message, tag)
        # What the loops of one worker tell each other needs no network, and arrives in order.
        gone: Pending[None] = Pending("send", to)
        self._to_itself.append((tag, message, gone))
        self._world.kernel.at(0, self._arrive_at_itself)
        return gone

    def _arrive_at_itself(self) -> None:
        tag, message, gone = self._to_itself.popleft()
        self._world.mailboxes[self.rank].deliver(tag, message)
        gone.resolve(None)

    def _post(self, what: str, to: int, message: Message, tag: Tag) -> Pending[None]:
        world = self._world
        gone: Pending[None] = Pending("send", to)
        step, sent_ns = self.step, world.kernel.now

        def arrived() -> None:
            self._count_exchange(to, message.payload, step)
            world.post.moved(gone, sent_ns)
            world.post.moved(world.mailboxes[to].deliver(tag, message), sent_ns)
            gone.resolve(None)

        world.members.watch(gone, self.rank)
        world.post.carry(self.rank, to, world.post.wire_size(message.payload), arrived, what)
        return gone

    def _count_exchange(self, to: int, payload: Any, step: int) -> None:
        """Tell that a model has reached another worker. Its age is the number of steps that the
        sender has made meanwhile."""
        if self.rank >= self._world.size:
            self._world.got_part(to, payload)
        if to < self.size and self.rank < self.size and payload is not None:
            self._exchanged(to, self.rank, self.step - step)

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        pending = Receive("receive", source)
        if self.rank >= self._world.size:
            pending.when_done(lambda: self._read(pending))
        self._world.mailboxes[self.rank].receive(tag, pending)
        if not pending.done:
            self._world.members.watch(pending, self.rank)
        return pending

    def _read(self, pending: Pending[Message]) -> None:
        try:
            message = pending.result()
        except PeerLost:
            return  # nothing came; whoever awaits it gets the error
        self._world.received(self.rank, message)

    def collect(self, tag: Tag) -> list[Message]:
        return self._world.mailboxes[self.rank].collect(tag)

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        world = self._world
        self._requests += 1
        number = self._requests
        answer = Reply("reply", to)
        world.mailboxes[self.rank].receive(("reply", number), answer)
        world.members.watch(answer, self.rank)
        asked_ns = world.kernel.now
        gone = self._post("request", to, Message(self.rank, payload, reply_to=number), tag)
        gone.when_done(lambda: world.post.moved(answer, asked_ns))
        return answer

    def reply(self, message: Message, payload: Any) -> Pending[None]:
        answer = Message(self.rank, payload)
        return self._post("reply", message.source, answer, ("reply", message.reply_to))

    # ------------------------------------------------------------------ collectives

    def all_reduce(
        self, value: Tensor, *, over: Sequence[int] | None = None,
        reference: Tensor | None = None, part: Fragment | None = None,
    ) -> Pending[Tensor]:  # fmt: skip
        return self._collective("all_reduce", value, over)

    def all_gather(
        self, value: Tensor, *, over: Sequence[int] | None = None
    ) -> Pending[dict[int, Tensor]]:
        return self._collective("all_gather", value, over)

    def broadcast(self, value: Tensor | None, *, root: int, over: Sequence[int]) -> Pending[Tensor]:
        return self._collective("broadcast", value, over, root)

    def _collective(
        self, kind: str, value: Tensor | None, over: Sequence[int] | None, root: int | None = None
    ) -> Pending[Any]:
        size = 0 if value is None else self._world.post.wire_size(value)
        members = None if over is None else tuple(over)
        step = self.step if self._world.newcomers.are_in_rounds else 0
        return self._world.collectives.join(kind, self.rank, value, size, members, root, step)

    # ------------------------------------------------------------------ one-sided

    def _needs(self, label: str, peer: int) -> Pending[Any]:
        """An operation that fails if the peer dies or cannot be reached."""
        operation: Pending[Any] = Pending(label, peer)
        self._world.members.watch(operation, self.rank)
        return operation

    def read(self, peer: int) -> Pending[Tensor]:
        world = self._world
        answer = self._needs("read", peer)

        def asked() -> None:
            # The value is what the memory holds when the request arrives.
            value = world.replicas[peer].snapshot()
            if peer >= world.size:
                count = world.updates.count  # the whole is as old as its oldest range
                self._seen = count if self._seen is None else min(self._seen, count)
            size = world.post.wire_size(value)
            world.post.carry(peer, self.rank, size, lambda: arrived(value), "read")

        step = self._world.steps_of(peer) if peer < self.size else 0
        asked_ns = world.kernel.now

        def arrived(value: Tensor) -> None:
            if peer < self.size:
                self._exchanged(self.rank, peer, self._world.steps_of(peer) - step)
            else:
                world.got_part(self.rank, value)
            world.post.moved(answer, asked_ns)
            answer.resolve(value)

        world.post.carry(self.rank, peer, 32, asked, "ask to read")
        return answer

    def accumulate(self, peer: int, delta: Tensor, *, start: int = 0) -> Pending[None]:
        world = self._world
        done = self._needs("accumulate", peer)
        sent_ns = world.kernel.now

        def arrived() -> None:
            replica = world.replicas[peer]
            replica.store.writable(replica.row)[start : start + delta.numel()].add_(delta)
            world.post.moved(done, sent_ns)
            done.resolve(None)

        world.post.carry(self.rank, peer, world.post.wire_size(delta), arrived, "accumulate")
        return done

    def average(self, peer: int) -> Pending[None]:
        world = self._world
        if world.ending.finished_ns is not None:
            # Nobody needs this average any more, so the side loop waits for ever.
            return Pending("average", peer)
        done = self._needs("average", peer)
        own, step = world.replicas[self.rank], self.step
        mine, asked_ns = own.snapshot(), world.kernel.now

        def asked() -> None:
            replica = world.replicas[peer]
            theirs = replica.snapshot()
            size = world.post.wire_size(theirs)
            answer = partial(answered, theirs, self._world.steps_of(peer))
            world.post.carry(peer, self.rank, size, answer, "average, back")
            replica.add_(pair_delta(theirs, mine))
            self._exchanged(peer, self.rank, self.step - step)

        def answered(theirs: Tensor, since: int) -> None:
            own.add_(pair_delta(mine, theirs))
            self._exchanged(self.rank, peer, self._world.steps_of(peer) - since)
            world.post.moved(done, asked_ns)
            done.resolve(None)

        world.post.carry(self.rank, peer, world.post.wire_size(mine), asked, "average")
        return done

    def _exchanged(self, receiver: int, giver: int, age: int) -> None:
        self._world.observer.exchanged(receiver, giver, self._world.kernel.now, age=age)

    # ------------------------------------------------------------------ time and tasks

    def sleep(self, seconds: float) -> Pending[None]:
        pending: Pending[None] = Pending("sleep")
        self._world.kernel.at(round(seconds * SECOND), pending.resolve, None)
        return pending

    def within(self, seconds: float, pending: Pending[T]) -> Pending[T]:
        bounded = mapped(pending, lambda value: value)
        what = f"{pending.label} did not end within {seconds:g} s"
        timer = self._world.kernel.at(
            round(seconds * SECOND), self._too_late, bounded, pending, what
        )
        pending.when_done(timer.cancel)
        return bounded

    @staticmethod
    def _too_late(bounded: Pending[Any], pending: Pending[Any], what: str) -> None:
        bounded.fail(Late(what))
        # A receive that stays posted would take the next message and lose it.
        pending.cancel()

    def start(self, task: Coroutine[Any, Any, T]) -> Pending[T]:
        return self._world.kernel.spawn(task, self.rank, is_main=False).finished

    async def together(self, main: Coroutine[Any, Any, T], *side: Coroutine[Any, Any, Any]) -> T:
        for task in side:
            self.start(task)
        return await main
