"""A worker whose messages are compressed, below the method that it runs.

It is a `Worker` around a `Worker`, the same for simulated, real and joined workers. What a method
gives to an exchange is encoded here, and what it gets has been decoded; its text says at most what
everybody knows already (`reference`), because absolute parameters are never quantised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gossamer.compression.compressor import Coder, Compressor, MeanRound, Stream
from gossamer.compression.rounded_pairs import RoundedPairs
from gossamer.errors import Error
from gossamer.pending import Pending
from gossamer.replica import OF_RUN, Fragment, Replica
from gossamer.worker import Left, Message, Tag, Worker

_MEMORY = "compression"
Role = Callable[..., Coroutine[Any, Any, None]]
T = TypeVar("T")
Turn = tuple[Pending[None], Pending[None]]
"""The end of the operation before, and what is resolved at the end of this one."""
Price = Callable[[Compressor, int, bool], float]
"""Seconds to encode so many numbers, or (True) to decode them."""


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


def is_compression(key: str, name: str = "") -> bool:
    """Whether an entry of a replica's memory is a compressor's, of this stream if it is named."""
    return key.startswith(f"{_MEMORY} {name} " if name else f"{_MEMORY} ")


def without_residuals(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of all that a method remembers, for another worker to go on with. What the one has
    not sent yet it will send itself."""
    kept = {key: value.clone() for key, value in memory.items() if not key.startswith(OF_RUN)}
    for key in kept:
        if is_compression(key) and key.endswith(" residual"):
            kept[key].zero_()
    return kept


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
        """Where the rest ends of a gradient that is reduced piece by piece, last layer first."""
        self._turn: Pending[None] = Pending.resolved("encode", None)
        """Ends when the exchange before has: all workers make theirs in the same order."""
        self._pairs = RoundedPairs(inner, x, self._encoded_model, self._decoded_model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _coder(
        self, name: str, part: slice | Fragment, compressor: Compressor | None = None
    ) -> Coder:
        coder = self._coders.get(name)
        if coder is None:
            is_range = isinstance(part, slice)
            layout = self._inner.layout.within(part) if is_range else part.layout
            first = part.start if is_range else part.places[0].start
            stream = Stream(
                layout, name, f"{first}", self._seed,
                self._inner.expected_steps, Kept(self._x.memory, name),
            )  # fmt: skip
            coder = self._coders[name] = Coder(compressor or self._compressor, stream)
        return coder

    def _coder_of_mean(self, part: slice | Fragment) -> Coder:
        first = part.start if isinstance(part, slice) else part.places[0].start
        return self._coder(f"mean {first}", part)

    def _in_turn(self, operation: str, peer: int | None = None) -> tuple[Pending[Any], Turn]:
        """A new operation, and the turn of its encoding. One end encodes one vector at a time."""
        before, self._turn = self._turn, Pending[None]("encode")
        return Pending(operation, peer), (before, self._turn)

    # ------------------------------------------------------------------ all-reduce

    def all_reduce(
        self, value: Tensor, *, over: Sequence[int] | None = None,
        reference: Tensor | None = None, part: Fragment | None = None,
    ) -> Pending[Tensor]:  # fmt: skip
        if reference is None and self._exchange != "gradients":
            return self._inner.all_reduce(value, over=over)
        coder = self._coder_of_mean(part or self._place_of(value))
        if reference is None:
            own = self._x.clipped(value.detach().clone())
            coder.at_rate(self._x.learning_rate)
        else:
            own = value - reference
        result, turn = self._in_turn("all_reduce")
        self._inner.start(self._reduce(turn, coder, own, reference, over, result))
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
        self, turn: Turn, coder: Coder, own: Tensor, reference: Tensor | None,
        over: Sequence[int] | None, result: Pending[Tensor],
    ) -> None:  # fmt: skip
        before, ended = turn
        await before
        try:
            mean = await self._averaged(coder, own, over)
        except Error as error:
            result.fail(error)
        else:
            result.resolve(mean if reference is None else mean.add_(reference))
        finally:
            ended.resolve(None)

    async def _averaged(self, coder: Coder, own: Tensor, over: Sequence[int] | None) -> Tensor:
        """Make the rounds of the compressor, and be charged for its work before and after them."""
        inner = self._inner
        rounds = coder.rounds(own)
        await self._charged(own.numel())
        began = inner.now()
        asked, times = next(rounds), 1
        self._coded(began)
        while True:
            self._count(asked.value.nbytes)
            if isinstance(asked, MeanRound):
                answer = [await inner.all_reduce(asked.value, over=over)]
            else:
                gathered: Mapping[int, Tensor] = await inner.all_gather(asked.value, over=over)
                answer = [gathered[rank] for rank in sorted(gathered)]
                times = len(answer)
            began = inner.now()
            try:
                asked = rounds.send(answer)
            except StopIteration as end:
                mean = end.value[0]  # what else there is would be held while others compute
                break
            finally:
                self._coded(began)
        self._inner.observe("plain bytes", own.nbytes)
        await self._charged(times * own.numel(), decodes=True)
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

    # ------------------------------------------------------------------ averages in pairs

    def average(self, peer: int) -> Pending[None]:
        return self._pairs.average(peer)

    async def together(self, main: Coroutine[Any, Any, T], *side: Coroutine[Any, Any, Any]) -> T:
        if self._exchange != "pairs":
            return await self._inner.together(main, *side)
        result = await self._inner.together(main, *side, self._pairs.answer())
        await self._pairs.settle()
        return result

    async def _encoded_model(self, model: Tensor) -> Tensor:
        await self._charged(model.numel())
        began = self._inner.now()
        coder = self._coder("pair", slice(0, model.numel()))
        data = coder.compressor.encode(model, coder.stream)
        self._coded(began)
        self._count(data.nbytes, model.nbytes)
        return data

    async def _decoded_model(self, data: Tensor) -> Tensor:
        layout = self._inner.layout
        await self._charged(layout.total, decodes=True)
        began = self._inner.now()
        model = self._coder("pair", slice(0, layout.total)).decode(data)
        self._coded(began)
        return model

    # ------------------------------------------------------------------ servers

    @property
    def _is_server(self) -> bool:
        return self._inner.rank in self._inner.servers

    def _range_of(self, server: int) -> slice:
        inner = self._inner
        return inner.slices[list(inner.servers).index(server)]

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        if self._is_server or to not in self._inner.servers:
            return self._inner.send(to, payload, tag=tag)
        result, turn = self._in_turn("send", to)

        async def sent() -> None:
            encoded = await self._pushed(turn, to, payload)
            await _passed_on(self._inner.send(to, encoded, tag=tag), result)

        self._inner.start(sent())
        return result

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        if self._is_server or to not in self._inner.servers:
            return self._inner.request(to, payload, tag=tag)
        result, turn = self._in_turn("reply", to)

        async def asked() -> None:
            encoded = await self._pushed(turn, to, payload)
            try:
                answer = await self._inner.request(to, encoded, tag=tag)
                await self._charged_for(answer, decodes=True)
            except Error as error:
                result.fail(error)
                return
            result.resolve(_with_tensors(answer, partial(self._known, to)))

        self._inner.start(asked())
        return result

    async def _pushed(self, turn: Turn, server: int, payload: Any) -> Any:
        """The payload with its gradients encoded."""
        before, ended = turn
        await before
        part = self._range_of(server)
        rate = self._x.learning_rate

        def encoded(value: Tensor) -> Tensor:
            if value.numel() != part.stop - part.start:
                return value
            coder = self._coder(f"up {server}", part)
            if self._exchange == "server":
                coder.at_rate(rate)
                value = self._x.clipped(value)
            began = self._inner.now()
            data = coder.encode(value)
            self._coded(began)
            self._count(data.nbytes, value.nbytes)
            self._observe(coder)
            return data

        encoding = _with_tensors(payload, encoded)
        await self._charged_for(encoding)
        ended.resolve(None)
        return encoding

    def _known(self, server: int, value: Tensor) -> Tensor:
        """What a server has answered: parameters, or the difference to its last answer."""
        kept = Kept(self._x.memory, f"known {server}")
        if value.dtype != torch.uint8:
            if self._compressor.down:
                kept["value"] = value.clone()
            return value
        coder = self._coder(f"down {server}", self._range_of(server), self._compressor.answering())
        if value.numel():
            kept["value"].add_(coder.decode(value))
        return kept["value"].clone()

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        inner = self._inner.receive(tag, source=source)
        if not self._is_server:
            return inner
        result: Pending[Message] = Pending("receive", source)
        result.on_cancel = inner.cancel

        async def received() -> None:
            try:
                message = await inner
                await self._charged_for(message.payload, decodes=True)
            except Error as error:
                result.fail(error)
                return
            result.resolve(self._decoded(message))

        self._inner.start(received())
        return result

    def collect(self, tag: Tag) -> list[Message]:
        messages = self._inner.collect(tag)
        return [self._decoded(message) for message in messages] if self._is_server else messages

    def _decoded(self, message: Message) -> Message:
        """A client's message. What is known of a client that has left is forgotten."""
        source = message.source
        if isinstance(message.payload, Left):
            for key in [key for key in self._x.memory if is_compression(key, f"known {source}")]:
                del self._x.memory[key]
            return message

        def decoded(value: Tensor) -> Tensor:
            if value.dtype != torch.uint8:
                return value
            return self._coder("up", self._range_of(self._inner.rank)).decode(value)

        return Message(source, _with_tensors(message.payload, decoded), message.reply_to)

    def reply(self, message: Message, payload: Any) -> Pending[None]:
        if not self._is_server or not self._compressor.down:
            return self._inner.reply(message, payload)
        client, part = message.source, self._range_of(self._inner.rank)

        def encoded(value: Tensor) -> Tensor:
            """What the client lacks. All that was not sent before is in the next difference; who
            asks again before anything has changed, as after a restart, is told nothing new."""
            kept, version = Kept(self._x.memory, f"known {client}"), self._x.version
            if value.numel() != part.stop - part.start:
                return value
            is_known, was = "value" in kept, kept.get("version")
            kept["version"] = torch.tensor(version)
            if not is_known:
                kept["value"] = value.clone()
                return value
            if self._exchange == "server" and was is not None and int(was) == version:
                return torch.empty(0, dtype=torch.uint8, device=value.device)
            coder = self._coder(f"down {client}", part, self._compressor.answering())
            began = self._inner.now()
            data = coder.encode(value - kept["value"])
            kept["value"].add_(coder.decode(data))
            self._coded(began)
            self._count(data.nbytes, value.nbytes)
            return data

        answer = _with_tensors(payload, encoded)
        result, turn = self._in_turn("reply", client)

        async def replied() -> None:
            before, ended = turn
            await before
            await self._charged_for(answer)
            ended.resolve(None)
            await _passed_on(self._inner.reply(message, answer), result)

        self._inner.start(replied())
        return result

    # ------------------------------------------------------------------ time and measures

    def _coded(self, began: float) -> None:
        """Tell how long encoding or decoding took; in virtual time it is charged instead."""
        if self._price is None:
            self._inner.observe("coding", self._inner.now() - began)

    def _count(self, encoded: int, plain: int = 0) -> None:
        self._inner.observe("encoded bytes", encoded)
        if plain:
            self._inner.observe("plain bytes", plain)

    async def _charged(self, count: int, *, decodes: bool = False) -> None:
        if self._price is None:
            return
        seconds = self._price(self._compressor, count, decodes)
        self._inner.observe("coding", seconds)
        if seconds > 0:
            await self._inner.sleep(seconds)

    async def _charged_for(self, payload: Any, *, decodes: bool = False) -> None:
        """Be charged for encoding or decoding what a payload holds in bytes."""
        if self._price is None:
            return
        found: list[Tensor] = []
        _with_tensors(payload, lambda value: found.append(value) or value)
        if any(value.dtype == torch.uint8 for value in found):
            whole = self._inner.rank if self._is_server else self._inner.servers[0]
            part = self._range_of(whole)
            await self._charged(part.stop - part.start, decodes=decodes)

    def _observe(self, coder: Coder) -> None:
        residual = coder.residual
        if residual is not None and not residual.is_meta:
            self._inner.observe("residual", float(torch.linalg.vector_norm(residual)))


def encoding(w: Worker) -> CompressedWorker:
    """The worker of a method that exchanges copies: by its row it always has a compressor."""
    assert isinstance(w, CompressedWorker)
    return w


def _with_tensors(payload: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same payload with its tensors changed."""
    if isinstance(payload, Tensor):
        return change(payload)
    if payload is None or not dataclasses.is_dataclass(payload) or isinstance(payload, type):
        return payload
    named = {field.name: getattr(payload, field.name) for field in dataclasses.fields(payload)}
    tensors = {name: change(own) for name, own in named.items() if isinstance(own, Tensor)}
    return dataclasses.replace(payload, **tensors) if tensors else payload


async def _passed_on(operation: Pending[T], result: Pending[T]) -> None:
    """Let the result end as the operation does."""
    try:
        result.resolve(await operation)
    except Error as error:
        result.fail(error)
