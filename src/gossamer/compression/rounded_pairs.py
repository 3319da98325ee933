"""Averages of two models whose numbers are rounded on the way, so that the sum of both is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from torch import Tensor

from gossamer.errors import Error
from gossamer.pending import Pending
from gossamer.replica import Replica
from gossamer.rules import pair_delta
from gossamer.worker import Worker

_TAG = "pair"


class RoundedPairs:
    """Each end adds half of the decoded theirs minus the decoded own: C(x_j) - C(x_i) over two at
    the one, and the very opposite at the other.

    Absolute parameters may be rounded only like this, because whatever the rounding takes from
    one end it gives to the other. Models come as near to each other as the rounding allows: after
    an exchange the two ends differ by the sum of their rounding errors.
    """

    def __init__(
        self, inner: Worker, x: Replica, encode: Callable[[Tensor], Awaitable[Tensor]],
        decode: Callable[[Tensor], Awaitable[Tensor]],
    ) -> None:  # fmt: skip
        """`encode` and `decode` are charged for their work."""
        self._inner = inner
        self._x = x
        self._encode = encode
        self._decode = decode
        self._under_way: list[Pending[None]] = []
        self._is_over = False

    def average(self, peer: int) -> Pending[None]:
        """Begin an exchange with this peer, whose `answer` makes the other half of it."""
        done: Pending[None] = Pending("average", peer)
        if self._is_over:
            return done  # nobody needs it any more; the loop beside the main one waits for ever
        self._under_way = [*(one for one in self._under_way if not one.done), done]
        self._inner.start(self._exchanged(peer, done))
        return done

    async def _exchanged(self, peer: int, done: Pending[None]) -> None:
        try:
            data = await self._encode(self._x.snapshot())
            mine = await self._decode(data)
            theirs = await self._decode(await self._inner.request(peer, data, tag=_TAG))
            self._x.add_(pair_delta(mine, theirs))
        except Error as error:
            done.fail(error)
        else:
            done.resolve(None)

    async def answer(self) -> None:
        """The other half of every exchange that a peer begins, as long as anybody does."""
        while True:
            message = await self._inner.receive(_TAG)
            theirs = await self._decode(message.payload)
            data = await self._encode(self._x.snapshot())
            self._x.add_(pair_delta(await self._decode(data), theirs))
            self._inner.reply(message, data)

    async def settle(self) -> None:
        """Begin nothing more, and wait for what this end has begun: half an exchange would take
        from the mean."""
        self._is_over = True
        for one in self._under_way:
            try:
                await one
            except Error:
                pass  # the peer has died, and its half with it
