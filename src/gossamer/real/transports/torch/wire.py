"""Messages between processes as transports move them underneath the listener's frames.

A message has a kind, a short head and a body. A long body travels in pieces of `PIECE` bytes, so
that whoever receives works on the first pieces while the last are still under way; that makes an
exchange of two large windows take about as long as moving them both ways at once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gossamer.real.transports.buffers import take_elements

PIECE = 1 << 20
"""Bytes of a piece: a whole number of elements of every type, and small enough for a cache."""


class Stream(Protocol):
    """A body that is sent piece by piece as it comes into being."""

    def push(self, piece: Tensor) -> None:
        """The next bytes: `PIECE` of them unless they are the last. Not to be changed any more."""
        ...

    def abandon(self) -> None:
        """After the first piece: the rest, if any, will never come, and neither will the end."""
        ...


class Wire(Protocol):
    """Sends messages; in order per pair. Raises `PeerLost` where the process is gone."""

    rank: int
    size: int

    def post(self, to: int, kind: int, head: bytes, body: Tensor | None = None) -> None:
        """A whole message. The body, flat bytes, is not to be changed any more."""
        ...

    def begin(self, to: int, kind: int, head: bytes, length: int) -> Stream:
        """A message whose body of `length` bytes follows in pieces."""
        ...

    def expect(self, source: int, target: Tensor) -> int:
        """Make room for the body of an answer before it is asked for: it then need not be announced
        first. The number is for the one who answers; 0 where a body is too short for that."""
        ...

    def answer(self, to: int, kind: int, head: bytes, body: Tensor, room: int) -> None:
        """A message whose body lands in the room that the other has made. Only the end of it is
        told to the receiver there."""
        ...


class Receiver(Protocol):
    """What is called for a message, in the thread that receives from its source."""

    def place(self, source: int, kind: int, head: bytes, length: int) -> Tensor | None:
        """Where the body shall land; None: each piece in fresh memory of its own."""
        ...

    def piece(self, source: int, kind: int, head: bytes, start: int, data: Tensor) -> None:
        """Some of the body, from that byte on, in order."""
        ...

    def end(self, source: int, kind: int, head: bytes) -> None:
        """The message is complete, and was not abandoned."""
        ...


def raw(value: Tensor) -> Tensor:
    """The bytes of a flat tensor, in place."""
    return value.view(torch.uint8)


def host_copy(value: Tensor) -> Tensor:
    """A flat copy on the host."""
    return host_empty(value).copy_(value.detach().reshape(-1))


def host_empty(value: Tensor) -> Tensor:
    """Flat room on the host, pinned for what lies on a GPU: it is copied several times faster."""
    if value.is_cuda:
        return torch.empty(value.numel(), dtype=value.dtype, pin_memory=True)
    return take_elements(value.numel(), value.dtype)


def finish_stream(value: Tensor) -> None:
    """Wait until what this thread asked of a value's GPU is done."""
    if value.is_cuda:
        torch.cuda.current_stream(value.device).synchronize()
