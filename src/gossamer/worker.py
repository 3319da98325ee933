"""Everything a method may touch.

Every operation is a plain method that *starts* the work and returns a `Pending`; `await` only
waits. Overlap means: start now, await later. A method awaits its outstanding gradient before
anything else that blocks, because in a user's own training loop the loop *is* the gradient.
"""

from __future__ import annotations

import random
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from gossamer.errors import ProtocolError
from gossamer.payload import payload
from gossamer.pending import Pending
from gossamer.replica import Replica

T = TypeVar("T")
Tag = str | tuple[str, int]
INBOX: Tag = "inbox"
"""Where servers receive; the world puts `Left` there, too."""


@payload
@dataclass(frozen=True, slots=True)
class Left:
    """A worker has ended or died, and no server need wait for it any longer."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a receive delivers."""

    source: int
    payload: Any
    reply_to: int = 0
    """Set by `request`: which of the sender's requests this is."""


class Gradient(Pending[Tensor]):
    """A started gradient. Its parts become available during the backward pass."""

    __slots__ = ()

    def buckets(self) -> Sequence[Pending[Tensor]]:
        """Pieces of the flat gradient in the order in which backward finishes them: last first.

        A world that knows nothing better delivers it in one piece.
        """
        return [self]


_MOST_IDLE_STEPS = 1000


def check_idle(rank: int, steps: int) -> None:
    """Refuse a method that makes step after step and asks for no gradient: it would never end."""
    if steps >= _MOST_IDLE_STEPS:
        raise ProtocolError(
            f"worker {rank} made {steps} steps without asking for a gradient; put `await "
            "w.gradient(x)` into the loop over w.steps()"
        )


class Worker(Protocol):
    """One worker's (or server's) view of the world, simulated or real."""

    rank: int
    size: int
    """How many workers there are; servers are not counted."""
    rng: random.Random

    @property
    def peers(self) -> Sequence[int]:
        """The other workers believed alive, and answering, in order of rank."""
        ...

    def answering(self, peers: Sequence[int]) -> Sequence[int]:
        """Those of them that are not silent at present, as a stopped process is. In virtual time
        nobody is: one-sided words do not need the other's process."""
        ...

    @property
    def live(self) -> frozenset[int]:
        """The workers believed alive, this one included."""
        ...

    def live_at(self, step: int) -> frozenset[int]:
        """The live set agreed on for one step: the same for everyone who asks about it."""
        ...

    @property
    def servers(self) -> Sequence[int]:
        """The addresses of the method's servers (or of its centre)."""
        ...

    @property
    def slices(self) -> Sequence[slice]:
        """Which range of the flat vector each server holds, cut at parameter boundaries."""
        ...

    @property
    def clients(self) -> frozenset[int]:
        """For servers: the workers that are alive, not at their end, and push for themselves."""
        ...

    @property
    def expected_steps(self) -> int:
        """About how many steps each worker will make in this run."""
        ...

    @property
    def over(self) -> bool:
        """Whether every live worker has ended: side loops that run freely stop then."""
        ...

    def observe(self, what: str, value: float = 1.0) -> None:
        """Tell the metrics what only the method knows: a dropped gradient, a gap of clocks, or an
        "update" of its own ("shared update": of parameters that all share) made without `descend_`,
        which counts staleness by itself."""
        ...

    def now(self) -> float: ...

    def steps(self) -> Iterator[int]:
        """0, 1, 2, ... until all workers together have processed the run's samples."""
        ...

    def gradient(self, at: Tensor | Replica, batch: Tensor | None = None) -> Gradient:
        """The gradient of the next batch's loss; reads its point now, delivers after computing."""
        ...

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        """Resolves when the bytes have left. Not cancel-safe: it may arrive all the same."""
        ...

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        """Posted when started. Cancel-safe: a message that had arrived is put back."""
        ...

    def collect(self, tag: Tag) -> list[Message]:
        """All messages of that tag that have already arrived; never waits."""
        ...

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        """Send, then wait for the `reply` to exactly this message."""
        ...

    def reply(self, message: Message, payload: Any) -> Pending[None]: ...

    def broadcast(self, value: Tensor | None, *, root: int, over: Sequence[int]) -> Pending[Tensor]:
        """Everyone in `over` gets the root's value."""
        ...

    def all_gather(
        self, value: Tensor, *, over: Sequence[int] | None = None
    ) -> Pending[dict[int, Tensor]]:
        """Everyone's value by rank, of those alive."""
        ...

    def all_reduce(self, value: Tensor, *, over: Sequence[int] | None = None) -> Pending[Tensor]:
        """The mean over the living, added in order of rank, the same bits for everyone.

        A member that dies is left out: the group is rebuilt over the survivors.
        """
        ...

    def read(self, peer: int) -> Pending[Tensor]:
        """One-sided: the peer's published parameters; its own thread is not involved."""
        ...

    def accumulate(self, peer: int, delta: Tensor, *, start: int = 0) -> Pending[None]:
        """One-sided: add to the peer's published parameters from `start` on, atomically."""
        ...

    def average(self, peer: int) -> Pending[None]:
        """One-sided: this worker's and the peer's published parameters both become their mean.

        Each end adds half the difference of what it gave and what it got, so the sum is kept
        whatever else changes them meanwhile.
        """
        ...

    def sleep(self, seconds: float) -> Pending[None]: ...

    def within(self, seconds: float, pending: Pending[T]) -> Pending[T]:
        """The same result, or `Late` if it is not there in time."""
        ...

    def start(self, task: Coroutine[Any, Any, T]) -> Pending[T]:
        """Run a coroutine beside this one; await the result or leave it."""
        ...

    async def together(self, main: Coroutine[Any, Any, T], *side: Coroutine[Any, Any, Any]) -> T:
        """Run `main` here and the side loops beside it until every live worker has ended."""
        ...
