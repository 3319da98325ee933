"""Two levels: exact averaging inside a group, the method between groups.

The first worker of a group, its leader, runs the method unchanged, with a `Worker` whose ranks are
the groups. When the method asks for a gradient, the leader broadcasts the point inside the group,
every member computes its own batch there, and the answer is the mean of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

from gossamer.errors import ConfigurationError, PeerLost, RunOver
from gossamer.pending import Pending
from gossamer.replica import Fragment, Replica
from gossamer.worker import Gradient, Lesson, Message, Tag, Worker

Role = Callable[..., Coroutine[Any, Any, None]]
Groups = tuple[tuple[int, ...], ...]
Begin = Callable[[Coroutine[Any, Any, None], Gradient], object]
T = TypeVar("T")
V = TypeVar("V")


def even_groups(workers: int, groups: int) -> Groups:
    """This many groups of consecutive ranks."""
    if workers % groups:
        raise ConfigurationError(
            f"groups must divide the number of workers, got groups={groups} for {workers} workers"
        )
    return groups_of(workers, workers // groups)


def groups_of(workers: int, per_group: int) -> Groups:
    """Groups of this many consecutive ranks; the last group has what is left."""
    ranks = range(workers)
    return tuple(tuple(ranks[at : at + per_group]) for at in ranks[::per_group])


@dataclass(frozen=True)
class Grouping:
    """One worker's place among the groups; without groups every worker is its own leader."""

    rank: int
    size: int
    groups: Groups = ()

    @property
    def ends(self) -> int:
        """How many workers run the method itself."""
        return len(self.groups) or self.size

    @cached_property
    def speakers(self) -> frozenset[int]:
        """The workers whose models count: the leader of each group."""
        return frozenset(group[0] for group in self.groups) or frozenset(range(self.size))

    @cached_property
    def number(self) -> int:
        """The number of its group, which is the rank that the method sees."""
        found = [number for number, group in enumerate(self.groups) if self.rank in group]
        return found[0] if found else self.rank

    @property
    def group(self) -> tuple[int, ...]:
        """This worker and those that it computes with."""
        return self.groups[self.number] if self.groups else (self.rank,)

    @property
    def follows(self) -> bool:
        """Whether another worker leads this one."""
        return self.rank != self.group[0]

    def speaking(self, live: frozenset[int]) -> frozenset[int]:
        """The living workers whose models count."""
        return live & self.speakers if self.groups else live

    def working(self, live: frozenset[int]) -> frozenset[int]:
        """The living workers whose gradients count: a group without its leader does nothing."""
        if not self.groups:
            return live
        return frozenset(rank for group in self.groups if group[0] in live for rank in group) & live

    def lost(self, live: frozenset[int]) -> PeerLost:
        """The error that says that this worker's leader has died."""
        others = "the other groups go on" if self.speaking(live) else "no other group is left"
        members = ", ".join(map(str, self.group))
        return PeerLost(
            self.group[0], f"it led the group of workers {members}, which ends with it; {others}"
        )


def role_of(
    worker: Worker, replica: Replica, role: Role, options: Mapping[str, Any], grouping: Grouping, *,
    begin: Begin | None = None, on_orphaned: Callable[[PeerLost], None] | None = None,
) -> Coroutine[Any, Any, None]:  # fmt: skip
    """What a worker runs: the method itself, the method for its group, or a member's part.

    If the leader of a member dies, `on_orphaned` is called with the reason; without `on_orphaned`
    the reason is raised. `begin` begins to collect the gradients of a leader's group.
    """
    if not grouping.groups:
        return role(worker, replica, **options)
    if grouping.follows:
        return _follow(worker, replica, grouping, on_orphaned)
    leader = GroupLeader(worker, grouping.groups, grouping.number, begin)
    return _lead(leader, replica, role, options)


async def _lead(
    leader: GroupLeader, x: Replica, role: Role, options: Mapping[str, Any]
) -> None:  # fmt: skip
    await role(leader, x, **options)
    await leader.dismiss(x)


async def _follow(
    w: Worker, x: Replica, grouping: Grouping, on_orphaned: Callable[[PeerLost], None] | None
) -> None:
    """Compute at every point that the leader sends, until it sends an empty one or has died."""
    group = grouping.group
    while True:
        try:
            whole = await w.broadcast(None, root=group[0], over=group)
        except PeerLost:
            break
        if whole.numel() == 0:
            return
        point, lesson = Lesson.apart(whole, w.layout.total)
        x.assign_(point)
        await w.all_reduce(await w.gradient(point, lesson=lesson), over=group)
    lost = grouping.lost(w.live)
    if on_orphaned is None:
        raise lost
    on_orphaned(lost)


class WorkerAmong:
    """The `Worker` of a smaller world: its ranks number some of the inner worker's.

    Operations that name no rank (`steps`, `start`, `within`, ...) are those of the inner worker.
    """

    def __init__(self, inner: Worker, rank: int, members: Sequence[int]) -> None:
        """`members` are the inner ranks of all workers of this world, in order."""
        self.rank = rank
        self.size = len(members)
        self.rng = inner.rng
        self._inner = inner
        self._members = members
        self._number = {member: number for number, member in enumerate(members)}
        self._live: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _among(self, ranks: frozenset[int]) -> frozenset[int]:
        """The numbers of those among the ranks; the same object while nothing changes."""
        if ranks is not self._live[0]:
            numbers = frozenset(n for member, n in self._number.items() if member in ranks)
            self._live = (ranks, numbers)
        return self._live[1]

    def _address(self, number: int) -> int:
        if number < self.size:
            return self._members[number]
        return self._inner.servers[number - self.size]

    def _number_of(self, address: int) -> int:
        return self._number.get(address, self.size + address - self._inner.size)

    @property
    def live(self) -> frozenset[int]:
        return self._among(self._inner.live)

    def live_at(self, step: int) -> frozenset[int]:
        return self._among(self._inner.live_at(step))

    @property
    def peers(self) -> Sequence[int]:
        return self.answering(sorted(self.live - {self.rank}))

    def answering(self, peers: Sequence[int]) -> Sequence[int]:
        known = [self._members[number] for number in peers]
        return [self._number[member] for member in self._inner.answering(known)]

    @property
    def servers(self) -> Sequence[int]:
        return range(self.size, self.size + len(self._inner.servers))

    @property
    def clients(self) -> frozenset[int]:
        return self._among(self._inner.clients)

    def gradient(
        self, at: Tensor | Replica, batch: Tensor | None = None, *, lesson: Lesson | None = None
    ) -> Gradient:
        return self._inner.gradient(at, batch, lesson=lesson)

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        return self._inner.send(self._address(to), payload, tag=tag)

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        origin = None if source is None else self._address(source)
        return mapped(self._inner.receive(tag, source=origin), self._renumbered)

    def _renumbered(self, message: Message) -> Message:
        return Message(self._number_of(message.source), message.payload, message.reply_to)

    def collect(self, tag: Tag) -> list[Message]:
        return [self._renumbered(message) for message in self._inner.collect(tag)]

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        return self._inner.request(self._address(to), payload, tag=tag)

    def reply(self, message: Message, payload: Any) -> Pending[None]:
        sender = Message(self._address(message.source), message.payload, message.reply_to)
        return self._inner.reply(sender, payload)

    def _addresses(self, over: Sequence[int] | None) -> Sequence[int]:
        return self._members if over is None else [self._address(number) for number in over]

    def all_reduce(
        self, value: Tensor, *, over: Sequence[int] | None = None,
        reference: Tensor | None = None, part: Fragment | None = None,
    ) -> Pending[Tensor]:  # fmt: skip
        return self._inner.all_reduce(
            value, over=self._addresses(over), reference=reference, part=part
        )

    def all_gather(
        self, value: Tensor, *, over: Sequence[int] | None = None
    ) -> Pending[dict[int, Tensor]]:
        gathered = self._inner.all_gather(value, over=self._addresses(over))
        return mapped(gathered, lambda by: {self._number[rank]: v for rank, v in by.items()})

    def broadcast(self, value: Tensor | None, *, root: int, over: Sequence[int]) -> Pending[Tensor]:
        members = self._addresses(over)
        return self._inner.broadcast(value, root=self._address(root), over=members)

    def read(self, peer: int) -> Pending[Tensor]:
        return self._inner.read(self._address(peer))

    def accumulate(self, peer: int, delta: Tensor, *, start: int = 0) -> Pending[None]:
        return self._inner.accumulate(self._address(peer), delta, start=start)

    def average(self, peer: int) -> Pending[None]:
        return self._inner.average(self._address(peer))


class GroupLeader(WorkerAmong):
    """The `Worker` of a whole group: its rank is the group's number."""

    def __init__(
        self, inner: Worker, groups: Groups, number: int, begin: Begin | None = None
    ) -> None:
        """`begin` starts the coroutine that resolves the gradient of the group; by default it is
        one more task of the inner worker."""
        super().__init__(inner, number, [group[0] for group in groups])
        self._begin: Begin = begin or (lambda task, gradient: inner.start(task))
        self._group = groups[number]

    def gradient(
        self, at: Tensor | Replica, batch: Tensor | None = None, *, lesson: Lesson | None = None
    ) -> Gradient:
        gradient = Gradient()
        point = at if isinstance(at, Tensor) else at.snapshot()
        whole = point if lesson is None else lesson.beside(point)

        async def collect() -> None:
            w = self._inner
            try:
                own = w.gradient(point, batch, lesson=lesson)
                sent = w.broadcast(whole, root=w.rank, over=self._group)
                mine = await own
                gradient.loss = own.loss
            except RunOver as over:
                gradient.fail(over)
                return
            await sent
            gradient.resolve(await w.all_reduce(mine, over=self._group))

        self._begin(collect(), gradient)
        return gradient

    def dismiss(self, x: Replica) -> Pending[Tensor]:
        """Tell the members that the run is over."""
        nothing = x.snapshot()[:0]
        return self._inner.broadcast(nothing, root=self._inner.rank, over=self._group)


def mapped(
    pending: Pending[T], function: Callable[[T], V], label: str | None = None
) -> Pending[V]:  # fmt: skip
    """The same operation; its result is passed through a function."""
    result: Pending[V] = Pending(label or pending.label, pending.peer)
    result.on_cancel = pending.cancel

    def ended() -> None:
        try:
            result.resolve(function(pending.result()))
        except Exception as error:
            result.fail(error)

    pending.when_done(ended)
    return result
