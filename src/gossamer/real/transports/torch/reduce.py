"""All-reduces by messages. They give the same bits as the simulator, and survive deaths.

`reduce_state` decides what happens; this module moves the bytes, by these messages:

    CONTRIBUTION    The sender's piece of the part that the receiver adds up.
    MEAN            The part that the sender has added up. The message follows the last byte, so
                    that nobody waits for the rest if a death stops it halfway.
    FINISHED        After a death: which means the sender has finished.
    GIFT            After a death: a mean that the receiver lacks.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.transports.buffers import joined
from gossamer.real.transports.torch.departures import Departure, DepartureLog
from gossamer.real.transports.torch.links import Links
from gossamer.real.transports.torch.reduce_state import (
    Attempt,
    Finished,
    Head,
    Mean,
    ReduceState,
)
from gossamer.real.transports.torch.wire import finish_stream, host_copy, raw
from gossamer.real.transports.transport import StopToken
from gossamer.rules import mean_into

if TYPE_CHECKING:
    from gossamer.real.transports.torch.nccl import NcclMeans

CONTRIBUTION, MEAN, FINISHED, GIFT = range(32, 36)
KINDS = range(32, 48)
_HEAD = struct.Struct("<QIIII")


class MessageAllReduce:
    """The means to which this process contributes."""

    def __init__(
        self, links: Links, log: DepartureLog, stop: StopToken, nccl: NcclMeans | None = None,
        absent: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self._links = links
        self._log = log
        self._stop = stop
        self._nccl = nccl
        self._lock = threading.RLock()
        self._state = ReduceState(links.rank, links.size, absent)

    def start(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        """Replace the tensors by their mean; see `Transport.all_reduce`."""
        pending: Pending[None] = Pending("all_reduce")
        ranks = tuple(sorted(members))
        if len(ranks) == 1 or not any(tensor.numel() for tensor in tensors):
            pending.resolve(None)
            return pending
        home = tensors[0].device
        if self._nccl is not None and home.type == "cuda":
            value = joined([tensor.detach().reshape(-1) for tensor in tensors])
        else:
            value = host_copy(tensors)
        with self._lock:
            mean = self._state.start(value, home, ranks)
            attempt = mean.attempt
        if self._nccl is not None and attempt is not None and attempt.value.is_cuda:
            self._nccl.start(self, mean, attempt)
        else:
            self._open(mean)

        def forget() -> None:
            pending.settle = None  # so that nothing is written, and no cycle keeps the memory

        pending.settle = partial(self._put_in_place, mean.result, list(tensors), pending)
        pending.on_cancel = forget
        return pending

    def _put_in_place(
        self, found: Pending[Tensor], tensors: Sequence[Tensor], pending: Pending[None]
    ) -> None:
        is_there = threading.Event()
        found.when_done(is_there.set)
        while not is_there.wait(StopToken.patience):
            self._stop.check()
        if pending.done:
            return  # cancelled meanwhile
        pending.settle = pending.on_cancel = None  # a cycle would keep the memory of the mean
        try:
            parts = found.result().split([tensor.numel() for tensor in tensors])
            with torch.no_grad():
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))
            finish_stream(tensors[0])  # then the memory of the mean may be used again
        except PeerLost as lost:
            pending.fail(lost)
        else:
            pending.resolve(None)

    def own_finished(self) -> tuple[bool, Mapping[str, int]]:
        """See `ReduceState.own_finished`."""
        with self._lock:
            return self._state.own_finished()

    def announce(self, epoch: int) -> None:
        """Tell the others of the line in the log by which this process has left the sums."""
        self._tell(epoch, {})

    def depart(self, epoch: int, departure: Departure) -> None:
        """Apply a line of the log: stop the means that it changes, then begin them again."""
        with self._lock:
            again, finished = self._state.depart(departure)
        if departure.process == self._links.rank:
            return
        if finished is not None:
            self._tell(epoch, finished)
        for mean in again:
            self._open(mean)
        self._settle()

    # --- for NCCL

    def is_current(self, mean: Mean, attempt: Attempt) -> bool:
        """Whether no departure has changed the mean. Otherwise NCCL must not begin it: a process
        that begins a mean by NCCL implies that it has finished those before."""
        with self._lock:
            return mean.attempt is attempt

    def finish(self, mean: Mean, attempt: Attempt, *, is_by_nccl: bool = False) -> None:
        with self._lock:
            is_finished = self._state.finish(mean, attempt, is_by_nccl=is_by_nccl)
        if is_finished:
            mean.result.resolve(attempt.mean)

    # --- receiving

    def place(self, source: int, kind: int, head: bytes, length: int) -> Tensor | None:
        if kind not in (MEAN, GIFT):
            return None
        found = self._caught_up(head)
        with self._lock:
            return self._state.place(source, found, is_gift=kind == GIFT)

    def piece(self, source: int, kind: int, head: bytes, start: int, data: Tensor) -> None:
        if kind == FINISHED:
            self._learn(source, data)
        elif kind == CONTRIBUTION:
            found = self._caught_up(head)
            with self._lock:
                mean = self._state.contribution(source, found, start, data)
            if mean is not None:
                self._add_up(mean)

    def end(self, source: int, kind: int, head: bytes) -> None:
        if kind == FINISHED:
            return
        found, mean = self._caught_up(head), None
        with self._lock:
            if kind != CONTRIBUTION:
                mean = self._state.landed(source, found, is_gift=kind == GIFT)
            self._state.hear(source, found)
        if mean is not None and mean.attempt is not None:
            mean.result.resolve(mean.attempt.mean)

    def _caught_up(self, head: bytes) -> Head:
        """Return the head of a message, once this process has read the log as far as the sender."""
        found = Head(*_HEAD.unpack(head))
        if found.attempt > self._log.epoch:
            self._log.catch_up(found.attempt)
        return found

    def _learn(self, source: int, data: Tensor) -> None:
        epoch, told = json.loads(data.numpy().tobytes())
        finished = {int(key): (low, frozenset[int](done)) for key, (low, done) in told.items()}
        self._log.catch_up(epoch)
        with self._lock:
            self._state.tell(source, epoch, finished)
        self._settle()

    # --- computing a mean

    def _open(self, mean: Mean) -> None:
        """Open the present attempt, if that is allowed: send our contributions, and add up."""
        with self._lock:
            attempt = self._state.opened(mean)
        if attempt is None:
            return
        for owner, body, part in attempt.contributions():
            with suppress(PeerLost):  # its death will be in the log
                room = self._links[owner].expect(part)
                self._links[owner].post(CONTRIBUTION, self._head(mean, attempt, room), body)
        self._add_up(mean)

    def _add_up(self, mean: Mean) -> None:
        """Add up the complete pieces of our own part, and send their means to the others."""
        while True:
            with self._lock:
                attempt = mean.attempt
                work = None if attempt is None else attempt.next_addition()
            if attempt is None or work is None:
                return
            target, values = work
            # The lock is free, so other threads go on receiving. If a departure comes now, this
            # writes into memory and rooms of an attempt that nobody uses any more.
            mean_into(target, values, len(values))
            self._pass_on(mean, attempt, target)
            with self._lock:
                attempt.added()
                is_complete = attempt.is_complete
            if is_complete:
                self.finish(mean, attempt)

    def _pass_on(self, mean: Mean, attempt: Attempt, piece: Tensor) -> None:
        if attempt.is_by_each:
            return
        if not attempt.streams:
            length = attempt.part(self._links.rank, attempt.mean).numel()
            for peer in attempt.others:
                room = attempt.rooms.get(peer, 0)
                head = self._head(mean, attempt)
                with suppress(PeerLost):
                    attempt.streams[peer] = self._links[peer].begin(MEAN, head, length, room)
        for stream in attempt.streams.values():
            with suppress(PeerLost):
                stream.push(raw(piece))

    def _settle(self) -> None:
        with self._lock:
            again, gifts = self._state.settle()
        for to, head, mean in gifts:
            # A copy, because the memory of a mean is used again once everybody has it.
            self._send(to, GIFT, _HEAD.pack(*head), raw(host_copy([mean])))
        for mean in again:
            self._open(mean)

    # --- sending

    def _head(self, mean: Mean, attempt: Attempt, room: int = 0) -> bytes:
        return _HEAD.pack(*self._state.head(mean, attempt, room))

    def _tell(self, epoch: int, finished: Finished) -> None:
        told = {key: (low, sorted(done)) for key, (low, done) in finished.items()}
        text = bytearray(json.dumps((epoch, told)).encode())
        body = torch.frombuffer(text, dtype=torch.uint8)
        with self._lock:
            alive = self._state.alive
        for peer in alive:
            if peer != self._links.rank:
                self._send(peer, FINISHED, b"", body)

    def _send(self, to: int, kind: int, head: bytes, body: Tensor) -> None:
        with suppress(PeerLost):  # its death will be in the log
            self._links[to].post(kind, head, body)
