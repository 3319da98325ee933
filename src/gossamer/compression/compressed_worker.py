"""A worker whose messages are compressed, below the method that it runs.

It is a `Worker` around a `Worker`, the same for simulated, real and joined workers. What a method
gives to an exchange is encoded here, and what it gets has been decoded; its text says at most what
everybody knows already (`reference`), because absolute parameters are never quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.compression.compressor import Coder, Compressor, MeanRound, Stream
from gossamer.errors import Error
from gossamer.pending import Pending
from gossamer.replica import Replica
from gossamer.worker import Worker

_MEMORY = "compression"
Role = Callable[..., Coroutine[Any, Any, None]]
Price = Callable[[Compressor, int], float]
"""Seconds to encode or to decode so many numbers."""


def compressed(
    role: Role, compressor: Compressor | None, exchange: str, price: Price | None = None
) -> Role:
    """The same role with its exchanges compressed; itself where there is no compressor."""
    if compressor is None:
        return role

    async def text(w: Worker, x: Replica, **options: Any) -> None:
        handle = CompressedWorker(w, x, compressor, exchange, price)
        await role(cast(Worker, handle), x, **options)

    return text


class Kept(dict[str, Tensor]):
    """The state of one stream, kept in the memory of a replica, so that checkpoints have it."""

    def __init__(self, memory: dict[str, Tensor], name: str) -> None:
        self._memory = memory
        self._prefix = f"{_MEMORY} {name} "
        known = {key: value for key, value in memory.items() if key.startswith(self._prefix)}
        super().__init__({key.removeprefix(self._prefix): own for key, own in known.items()})

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value)
        self._memory[self._prefix + key] = value


def is_compression(key: str) -> bool:
    """Whether an entry of a replica's memory is a compressor's and none of the method."""
    return key.startswith(_MEMORY)


class CompressedWorker:
    """The `Worker` of a method whose exchanges are compressed.

    Operations that exchange nothing are those of the worker itself.
    """

    def __init__(
        self, inner: Worker, x: Replica, compressor: Compressor, exchange: str,
        price: Price | None = None,
    ) -> None:  # fmt: skip
        """`exchange` says what kind the method exchanges; `price` is charged in virtual time."""
        self._inner = inner
        self._x = x
        self._compressor = compressor
        self._exchange = exchange
        self._price = price
        self._seed = inner.rng.getrandbits(32)
        self._coders: dict[str, Coder] = {}
        self._left = 0
        """Of a gradient that is reduced piece by piece, last layer first: where the rest ends."""
        self._last: Pending[Any] | None = None
        """The exchange before. All workers make theirs in the same order, one after the other."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _coder(self, name: str, part: slice) -> Coder:
        coder = self._coders.get(name)
        if coder is None:
            stream = Stream(
                self._inner.layout.within(part), name, self._seed, self._inner.expected_steps,
                Kept(self._x.memory, name),
            )  # fmt: skip
            coder = self._coders[name] = Coder(self._compressor, stream)
        return coder

    # ------------------------------------------------------------------ all-reduce

    def all_reduce(
        self, value: Tensor, *, over: Sequence[int] | None = None,
        reference: Tensor | None = None, part: slice | None = None,
    ) -> Pending[Tensor]:  # fmt: skip
        is_step = reference is None
        if is_step and self._exchange != "gradients":
            return self._inner.all_reduce(value, over=over)
        place = part or self._place_of(value)
        coder = self._coder(f"mean {place.start}", place)
        own = value.detach().clone() if reference is None else value - reference
        if is_step:
            coder.at_rate(self._x.learning_rate)
        result: Pending[Tensor] = Pending("all_reduce")
        before, self._last = self._last, result
        self._inner.start(self._reduce(before, coder, own, reference, over, result))
        return result

    def _place_of(self, value: Tensor) -> slice:
        """Which part of the flat vector this is. The pieces of a gradient come last layer first."""
        total, size = self._inner.layout.total, value.numel()
        end = self._left or total
        if size == total or size > end:
            return slice(0, size)
        self._left = end - size
        return slice(end - size, end)

    async def _reduce(
        self, before: Pending[Any] | None, coder: Coder, own: Tensor, reference: Tensor | None,
        over: Sequence[int] | None, result: Pending[Tensor],
    ) -> None:  # fmt: skip
        try:
            if before is not None:
                await _ended(before)
            mean = await self._averaged(coder, own, over)
        except Error as error:
            result.fail(error)
            return
        result.resolve(mean if reference is None else mean.add_(reference))

    async def _averaged(self, coder: Coder, own: Tensor, over: Sequence[int] | None) -> Tensor:
        """Make the rounds of the compressor, and be charged for its work before and after them."""
        inner = self._inner
        rounds = coder.rounds(own)
        await self._charged(own.numel())
        asked = next(rounds)
        while True:
            if isinstance(asked, MeanRound):
                answer = [await inner.all_reduce(asked.value, over=over)]
            else:
                gathered: Mapping[int, Tensor] = await inner.all_gather(asked.value, over=over)
                answer = [gathered[rank] for rank in sorted(gathered)]
            try:
                asked = rounds.send(answer)
            except StopIteration as end:
                mean, _ = end.value
                break
        await self._charged(own.numel())
        self._observe(coder)
        return mean

    # ---------------------------------------------------------- what a method encodes itself

    async def encode(self, vector: Tensor) -> Tensor:
        """The bytes of one vector a round, for a method that keeps by itself what they lose."""
        await self._charged(vector.numel())
        coder = self._coder("own", slice(0, vector.numel()))
        coder.stream.sent()  # first, so that what is decoded in this round has the same number
        return coder.compressor.encode(vector, coder.stream)

    async def decode(self, data: Tensor) -> Tensor:
        """The vector that somebody has encoded in this round."""
        layout = self._inner.layout
        await self._charged(layout.total)
        coder = self._coder("own", slice(0, layout.total))
        return coder.decode(data)

    async def _charged(self, count: int) -> None:
        if self._price is not None and (seconds := self._price(self._compressor, count)) > 0:
            await self._inner.sleep(seconds)

    def _observe(self, coder: Coder) -> None:
        residual = coder.residual
        if residual is not None and not residual.is_meta:
            self._inner.observe("residual", float(torch.linalg.vector_norm(residual)))


def encoding(w: Worker) -> CompressedWorker:
    """The worker of a method that exchanges copies: by its row it always has a compressor."""
    assert isinstance(w, CompressedWorker)
    return w


async def _ended(pending: Pending[Any]) -> None:
    """Wait for the end of an operation, however it ends."""
    try:
        await pending
    except Error:
        pass  # whoever started it is told
