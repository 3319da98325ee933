"""Messages between processes, below the listener's frames.

A message has a kind, a short head and a body. A long body travels in pieces of `PIECE` bytes, so
that whoever receives works on the first pieces while the last are still under way; that makes an
exchange of two large windows take about as long as moving them both ways at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gossamer.real.transports.buffers import joined, take_elements

PIECE = 1 << 20
"""Bytes of a piece: a whole number of elements of every type, and small enough for a cache."""
SLOT = 1 << 14
"""Bytes up to which a body travels inside of its message."""


class Stream(Protocol):
    """A body that is sent piece by piece as it comes into being."""

    def push(self, piece: Tensor) -> None:
        """The next bytes: `PIECE` of them unless they are the last. Not to be changed any more."""
        ...


class Wire(Protocol):
    """Sends messages, in order per pair. Raises `PeerLost` where the process is gone."""

    rank: int
    size: int

    def expect(self, source: int, target: Tensor) -> int:
        """Make room for a body before it is sent: the sender then need not announce it and wait.

        The number of the room is for the sender; 0 where the body is too short for that.
        """
        ...

    def post(
        self, to: int, kind: int, head: bytes, body: Tensor | None = None, room: int = 0
    ) -> None:
        """A whole message. The body, flat bytes, is not to be changed any more."""
        ...

    def begin(self, to: int, kind: int, head: bytes, length: int, room: int = 0) -> Stream:
        """A message whose body of `length` bytes follows in pieces.

        With a room the message is sent behind the last piece, so a stream may be left unfinished.
        Without one it is sent ahead, and the receiver waits for all of the body.
        """
        ...


class Receiver(Protocol):
    """What is called for a message, in the thread that receives from its source."""

    def place(self, source: int, kind: int, head: bytes, length: int) -> Tensor | None:
        """Where a body without a room shall land; None: each piece in fresh memory of its own."""
        ...

    def piece(self, source: int, kind: int, head: bytes, start: int, data: Tensor) -> None:
        """Some of the body, from that byte on, in order."""
        ...

    def end(self, source: int, kind: int, head: bytes) -> None:
        """The message is complete."""
        ...


def raw(value: Tensor) -> Tensor:
    """The bytes of a flat tensor, in place."""
    return value.view(torch.uint8)


def host_copy(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors one after the other in main memory."""
    whole = joined([tensor.detach().reshape(-1) for tensor in tensors])
    # Joined on their GPU first: that is one copy to the host, not one for each tensor.
    if whole.is_cuda:
        return host_empty(whole.numel(), whole.dtype, whole.device).copy_(whole)
    return whole


def host_empty(count: int, dtype: torch.dtype, home: torch.device) -> Tensor:
    """Flat room on the host, pinned for what lies on a GPU: it is copied several times faster."""
    if home.type == "cuda":
        return torch.empty(count, dtype=dtype, pin_memory=True)
    return take_elements(count, dtype)


def finish_stream(value: Tensor) -> None:
    """Wait until what this thread asked of a value's GPU is done."""
    if value.is_cuda:
        torch.cuda.current_stream(value.device).synchronize()
