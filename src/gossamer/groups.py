"""Two levels: exact averaging inside a group, the method between groups.

The first worker of a group runs the method's text unchanged, over a handle whose ranks are the
groups. When that text asks for a gradient, the point is broadcast inside the group, every member
computes its own batch there, and the mean of their gradients is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from gossamer.errors import ConfigurationError, PeerLost, RunOver
from gossamer.pending import Pending
from gossamer.replica import Replica
from gossamer.worker import Gradient, Message, Tag, Worker

Role = Callable[..., Coroutine[Any, Any, None]]
Groups = tuple[tuple[int, ...], ...]


def even_groups(workers: int, groups: int) -> Groups:
    """So many groups of consecutive ranks."""
    if workers % groups:
        raise ConfigurationError(
            f"groups must divide the number of workers, got groups={groups} for {workers} workers"
        )
    return groups_of(workers, workers // groups)


def groups_of(workers: int, per_group: int) -> Groups:
    """Groups of so many consecutive ranks; of the last one, what is left."""
    ranks = range(workers)
    return tuple(tuple(ranks[at : at + per_group]) for at in ranks[::per_group])


async def lead(leader: GroupLeader, x: Replica, role: Role, options: Mapping[str, Any]) -> None:
    """The method's own text, and then the members are sent home."""
    await role(leader, x, **options)
    await leader.dismiss(x)


async def follow(w: Worker, x: Replica, group: Sequence[int]) -> bool:
    """Compute at every point the leader sends, until it sends an empty one, or has died.

    Whether it was sent home: a group without its leader has nobody to speak for it.
    """
    while True:
        try:
            point = await w.broadcast(None, root=group[0], over=group)
        except PeerLost:
            return False
        if point.numel() == 0:
            return True
        x.assign_(point)
        await w.all_reduce(await w.gradient(point), over=group)


class GroupLeader:
    """The `Worker` of a whole group: its rank is the group's number."""

    def __init__(self, inner: Worker, groups: Groups, number: int) -> None:
        self.rank = number
        self.size = len(groups)
        self.rng = inner.rng
        self._inner = inner
        self._group = groups[number]
        self._leaders = [group[0] for group in groups]
        self._number = {leader: number for number, leader in enumerate(self._leaders)}
        self._live: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    def _among(self, ranks: frozenset[int]) -> frozenset[int]:
        """The groups whose leader is in a set of ranks; the same object while nothing changes."""
        if ranks is not self._live[0]:
            numbers = frozenset(n for leader, n in self._number.items() if leader in ranks)
            self._live = (ranks, numbers)
        return self._live[1]

    def _address(self, number: int) -> int:
        if number < self.size:
            return self._leaders[number]
        return self._inner.servers[number - self.size]

    @property
    def live(self) -> frozenset[int]:
        return self._among(self._inner.live)

    def live_at(self, step: int) -> frozenset[int]:
        return self._among(self._inner.live_at(step))

    @property
    def peers(self) -> Sequence[int]:
        return self.answering(sorted(self.live - {self.rank}))

    def answering(self, peers: Sequence[int]) -> Sequence[int]:
        leaders = [self._leaders[number] for number in peers]
        return [self._number[leader] for leader in self._inner.answering(leaders)]

    @property
    def servers(self) -> Sequence[int]:
        return range(self.size, self.size + len(self._inner.servers))

    @property
    def slices(self) -> Sequence[slice]:
        return self._inner.slices

    @property
    def clients(self) -> frozenset[int]:
        return self._among(self._inner.clients)

    def observe(self, what: str, value: float = 1.0) -> None:
        self._inner.observe(what, value)

    @property
    def expected_steps(self) -> int:
        return self._inner.expected_steps

    @property
    def over(self) -> bool:
        return self._inner.over

    def now(self) -> float:
        return self._inner.now()

    def steps(self) -> Iterator[int]:
        return self._inner.steps()

    def gradient(self, at: Tensor | Replica, batch: Tensor | None = None) -> Gradient:
        gradient = Gradient("gradient")
        point = at if isinstance(at, Tensor) else at.snapshot()

        async def collect() -> None:
            w = self._inner
            try:
                own = w.gradient(point, batch)
            except RunOver as over:
                gradient.fail(over)
                return
            sent = w.broadcast(point, root=w.rank, over=self._group)
            mine = await own
            await sent
            gradient.resolve(await w.all_reduce(mine, over=self._group))

        self._inner.start(collect())
        return gradient

    def dismiss(self, x: Replica) -> Pending[Tensor]:
        """Tell the members that the run is over."""
        nothing = x.snapshot()[:0]
        return self._inner.broadcast(nothing, root=self._inner.rank, over=self._group)

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        return self._inner.send(self._address(to), payload, tag=tag)

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        origin = None if source is None else self._address(source)
        return mapped(self._inner.receive(tag, source=origin), self._from_group)

    def _from_group(self, message: Message) -> Message:
        beyond = message.source - self._inner.size
        number = self._number.get(message.source, self.size + beyond)
        return Message(number, message.payload, message.reply_to)

    def collect(self, tag: Tag) -> list[Message]:
        return [self._from_group(message) for message in self._inner.collect(tag)]

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        return self._inner.request(self._address(to), payload, tag=tag)

    def reply(self, message: Message, payload: Any) -> Pending[None]:
        sender = Message(self._address(message.source), message.payload, message.reply_to)
        return self._inner.reply(sender, payload)

    def _members(self, over: Sequence[int] | None) -> Sequence[int]:
        return self._leaders if over is None else [self._address(number) for number in over]

    def all_reduce(self, value: Tensor, *, over: Sequence[int] | None = None) -> Pending[Tensor]:
        return self._inner.all_reduce(value, over=self._members(over))

    def all_gather(
        self, value: Tensor, *, over: Sequence[int] | None = None
    ) -> Pending[dict[int, Tensor]]:
        gathered = self._inner.all_gather(value, over=self._members(over))
        return mapped(gathered, lambda by: {self._number[rank]: v for rank, v in by.items()})

    def broadcast(self, value: Tensor | None, *, root: int, over: Sequence[int]) -> Pending[Tensor]:
        return self._inner.broadcast(value, root=self._address(root), over=self._members(over))

    def read(self, peer: int) -> Pending[Tensor]:
        return self._inner.read(self._address(peer))

    def accumulate(self, peer: int, delta: Tensor, *, start: int = 0) -> Pending[None]:
        return self._inner.accumulate(self._address(peer), delta, start=start)

    def average(self, peer: int) -> Pending[None]:
        return self._inner.average(self._address(peer))

    def sleep(self, seconds: float) -> Pending[None]:
        return self._inner.sleep(seconds)

    def within(self, seconds: float, pending: Pending[Any]) -> Pending[Any]:
        return self._inner.within(seconds, pending)

    def start(self, task: Coroutine[Any, Any, Any]) -> Pending[Any]:
        return self._inner.start(task)

    async def together(
        self, main: Coroutine[Any, Any, Any], *side: Coroutine[Any, Any, Any]
    ) -> Any:
        return await self._inner.together(main, *side)


def mapped(pending: Pending[Any], function: Callable[[Any], Any]) -> Pending[Any]:
    """The same operation with its result passed through a function."""
    result: Pending[Any] = Pending(pending.label, pending.peer)
    result.on_cancel = pending.cancel

    def ended() -> None:
        try:
            result.resolve(function(pending.result()))
        except Exception as error:
            result.fail(error)

    pending.when_done(ended)
    return result
