"""All operations that a method may use.

Every operation is a plain function that *starts* the work and returns a `Pending`; `await` only
waits. Overlap means: start now, await later. A method awaits its outstanding gradient before
anything else that blocks, because in a user's own training loop the loop computes the gradient.
"""

from __future__ import annotations

import random
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, ProtocolError
from gossamer.payload import payload
from gossamer.pending import Pending
from gossamer.replica import Fragment, Layout, Replica

T = TypeVar("T")
Tag = str | tuple[str, int]
INBOX: Tag = "inbox"
"""The tag under which servers receive; the world delivers `Left` there, too."""


@payload
@dataclass(frozen=True, slots=True)
class Left:
    """A worker has ended or died, and no server needs to wait for it."""

    life: int = 0
    """Which of its lives is over; a worker may come back."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a receive delivers."""

    source: int
    payload: Any
    reply_to: int = 0
    """Set by `request`: which of the sender's requests this is."""


class Gradient(Pending[Tensor]):
    """A started gradient. Its parts become available during the backward pass."""

    __slots__ = ("loss",)

    def __init__(self, label: str = "gradient", peer: int | None = None) -> None:
        super().__init__(label, peer)
        self.loss: Tensor | None = None
        """The loss of its batch, once it is there; None where none is computed."""

    def buckets(self) -> Sequence[Pending[Tensor]]:
        """The pieces of the flat gradient in the order in which backward finishes them: last layer
        first. By default the gradient is one piece."""
        return [self]


@dataclass(frozen=True, slots=True)
class Lesson:
    """Other models whose predictions for its own batch a worker learns, beside the labels: `weight`
    times the loss against the mean of their predictions is added to its loss."""

    teachers: Sequence[Tensor]
    """Their parameters as flat vectors."""
    weight: float | Tensor

    def beside(self, point: Tensor) -> Tensor:
        """One vector that holds the point, the weight and the teachers, in this order."""
        weight = torch.as_tensor(self.weight, dtype=point.dtype, device=point.device).reshape(1)
        return torch.cat([point, weight, *self.teachers])

    @staticmethod
    def apart(whole: Tensor, size: int) -> tuple[Tensor, Lesson | None]:
        """The point of such a vector, whose length is known, and the lesson; None if it holds the
        point alone."""
        if whole.numel() == size:
            return whole, None
        rest = whole[size:].detach()
        return whole[:size], Lesson(rest[1:].split(size), rest[0])


_MOST_IDLE_STEPS = 1000


def check_idle(rank: int, steps: int) -> None:
    """Refuse a method that makes step after step and asks for no gradient: it would never end."""
    if steps >= _MOST_IDLE_STEPS:
        raise ProtocolError(
            f"worker {rank} made {steps} steps without asking for a gradient; put `await "
            "w.gradient(x)` into the loop over w.steps()"
        )


def check_lesson(*, is_divided: bool) -> None:
    """Refuse a lesson where no machine holds a whole model that could predict."""
    if is_divided:
        raise ConfigurationError(
            "teachers predict with whole models, and here each machine holds a part of one; leave "
            "out stages= and tensor=, or use another method"
        )


class Worker(Protocol):
    """One worker's (or server's) view of the world, simulated or real."""

    rank: int
    size: int
    """How many workers there are; servers are not counted."""
    rng: random.Random

    @property
    def peers(self) -> Sequence[int]:
        """The other workers that are believed alive and answer, in order of rank."""
        ...

    def answering(self, peers: Sequence[int]) -> Sequence[int]:
        """Those of the peers that answer at present; a stopped process does not. In virtual time
        all do, because one-sided operations do not need the process of the other worker."""
        ...

    @property
    def live(self) -> frozenset[int]:
        """The workers believed alive, this one included."""
        ...

    def live_at(self, step: int) -> frozenset[int]:
        """The workers that take part in one step; all workers get the same answer."""
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
    def layout(self) -> Layout:
        """The place of each parameter of the model in the flat vector."""
        ...

    @property
    def clients(self) -> frozenset[int]:
        """For servers: the workers that are alive, have not ended and push for themselves."""
        ...

    @property
    def expected_steps(self) -> int:
        """About how many steps each worker will make in this run."""
        ...

    @property
    def over(self) -> bool:
        """Whether every live worker has ended; then free-running side loops stop."""
        ...

    def observe(self, what: str, value: float = 1.0) -> None:
        """Tell the metrics what only the method knows: a dropped gradient, a gap of clocks, or an
        "update" without `descend_` ("shared update" if all workers share the parameters).
        `descend_` counts staleness by itself."""
        ...

    def now(self) -> float: ...

    def steps(self) -> Iterator[int]:
        """0, 1, 2, ... until all workers together have processed the run's samples."""
        ...

    def gradient(
        self, at: Tensor | Replica, batch: Tensor | None = None, *, lesson: Lesson | None = None
    ) -> Gradient:
        """The gradient of the loss of the next batch, with a lesson of what other models predict
        for it, too. Its point is read now."""
        ...

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        """Resolves when the bytes have left. After `cancel` the message may still arrive."""
        ...

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        """It is posted when it is started. After `cancel` another receive gets the message."""
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

    def all_reduce(
        self, value: Tensor, *, over: Sequence[int] | None = None,
        reference: Tensor | None = None, part: Fragment | None = None,
    ) -> Pending[Tensor]:  # fmt: skip
        """The mean over the living, added in order of rank, the same bits for everyone.

        A member that dies is left out: the group is rebuilt over the survivors. Two hints are for
        compression only, and ignored without it: `reference` is what all members hold already, so
        that only the difference to it need travel, and `part` is the part of the flat vector that
        this is, so that what was not sent stays with its own part.
        """
        ...

    def read(self, peer: int) -> Pending[Tensor]:
        """One-sided: the peer's published parameters; the peer's thread does nothing."""
        ...

    def accumulate(self, peer: int, delta: Tensor, *, start: int = 0) -> Pending[None]:
        """One-sided: add to the peer's published parameters from `start` on, atomically."""
        ...

    def average(self, peer: int) -> Pending[None]:
        """One-sided: this worker's and the peer's published parameters both become their mean.

        Each end adds half the difference between what it got and what it gave, so the sum is kept
        even if others change the parameters meanwhile.
        """
        ...

    def sleep(self, seconds: float) -> Pending[None]: ...

    def within(self, seconds: float, pending: Pending[T]) -> Pending[T]:
        """The same result, or `Late` if it does not come in time."""
        ...

    def start(self, task: Coroutine[Any, Any, T]) -> Pending[T]:
        """Run a coroutine beside this one; its result may be awaited."""
        ...

    async def together(self, main: Coroutine[Any, Any, T], *side: Coroutine[Any, Any, Any]) -> T:
        """Run `main` here and the side loops beside it until every live worker has ended."""
        ...
