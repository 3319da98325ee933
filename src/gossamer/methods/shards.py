"""The servers of a method, seen from a worker: one range of the parameters per server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.payload import payload
from gossamer.pending import Pending, gather
from gossamer.worker import INBOX, Worker


@payload
@dataclass(frozen=True, slots=True)
class Push:
    """A gradient (or none: a plain pull), the version it was computed from, the sender's clock."""

    gradient: Tensor | None
    read: int
    clock: int = 0


@payload
@dataclass(frozen=True, slots=True)
class Parameters:
    """A server's answer: its range of the parameters, their version, the slowest clock."""

    value: Tensor
    version: int
    clock: int = 0


class Shards:
    """All servers at once. With one server the ranges are the whole vector."""

    def __init__(self, w: Worker) -> None:
        self._w = w
        self._versions = [0] * len(w.servers)
        self.clock = 0
        """The clock that all workers had reached, by the last answer."""

    async def pull(self, *, clock: int = 0) -> Tensor:
        """The parameters, when every server grants them."""
        return await self.push(None, clock=clock)

    async def push(self, gradient: Tensor | None, *, clock: int = 0) -> Tensor:
        """Send a gradient; the answer is the parameters, so that no pull is needed."""
        return self.adopt(await self.ask(gradient, clock=clock))

    def ask(self, gradient: Tensor | None, *, clock: int = 0) -> Pending[list[Parameters]]:
        """The same, started: what has come is for `adopt`, which may be later."""
        w = self._w
        pushes = self._cut(gradient, clock)
        return gather(
            [w.request(s, push, tag=INBOX) for s, push in zip(w.servers, pushes, strict=True)]
        )

    def adopt(self, answers: list[Parameters]) -> Tensor:
        """The parameters of an answer; what is pushed from now on was computed from them."""
        self._versions = [answer.version for answer in answers]
        self.clock = min(answer.clock for answer in answers)
        return torch.cat([answer.value for answer in answers])

    def send(self, gradient: Tensor, *, clock: int = 0) -> None:
        """Send a gradient and expect no answer."""
        for server, push in zip(self._w.servers, self._cut(gradient, clock), strict=True):
            self._w.send(server, push, tag=INBOX)

    def read(self) -> Pending[list[Tensor]]:
        """One-sided: the parameters of the servers, range by range."""
        return gather([self._w.read(server) for server in self._w.servers])

    def accumulate(self, delta: Tensor, *, pieces: int = 1) -> Pending[list[None]]:
        """One-sided: add a delta, in pieces between which others may read; with 0 pieces, every
        run of components that are not zero."""
        w = self._w
        adds: list[Pending[None]] = []
        for server, part in zip(w.servers, w.slices, strict=True):
            own = delta[part]
            for begin, end in _runs(own) if pieces == 0 else _even(len(own), pieces):
                adds.append(w.accumulate(server, own[begin:end], start=begin))
        return gather(adds)

    def _cut(self, gradient: Tensor | None, clock: int) -> Sequence[Push]:
        parts = [None if gradient is None else gradient[part] for part in self._w.slices]
        return [
            Push(part, version, clock) for part, version in zip(parts, self._versions, strict=True)
        ]


def _even(length: int, pieces: int) -> list[tuple[int, int]]:
    """Where pieces of about the same length begin and end."""
    size = max(1, -(-length // pieces))
    return [(begin, min(begin + size, length)) for begin in range(0, length, size)]


def _runs(delta: Tensor) -> list[tuple[int, int]]:
    """Where runs of components that are not zero begin and end."""
    changed = delta.nonzero().flatten().tolist()
    begins = [at for before, at in pairwise([-2, *changed]) if at != before + 1]
    ends = [at + 1 for at, after in pairwise([*changed, -2]) if after != at + 1]
    return list(zip(begins, ends, strict=True))
