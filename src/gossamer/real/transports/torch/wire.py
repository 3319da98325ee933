"""What a message between processes consists of, and the memory that its body comes from.

A message has a kind, a short head and a body. A long body travels in pieces of `PIECE` bytes, so
that its receiver works on the first pieces while the last ones are still on their way. So the
exchange of two large windows takes about as long as moving both at once.
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
"""Bytes of a message. A body that fits travels inside of it."""


class Receiver(Protocol):
    """Handles the messages of some kinds, in the thread that receives from their source."""

    def place(self, source: int, kind: int, head: bytes, length: int) -> Tensor | None:
        """The memory for a body without a room; None for fresh memory for each piece."""
        ...

    def piece(self, source: int, kind: int, head: bytes, start: int, data: Tensor) -> None:
        """A piece of the body has arrived, which begins at that byte. Pieces come in order."""
        ...

    def end(self, source: int, kind: int, head: bytes) -> None:
        """The message is complete."""
        ...


def raw(value: Tensor) -> Tensor:
    """The bytes of a flat tensor, in place."""
    return value.view(torch.uint8)


def host_copy(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of the tensors, one after the other, in main memory."""
    whole = joined([tensor.detach().reshape(-1) for tensor in tensors])
    # They were joined on their GPU, so there is one copy to the host and not one for each tensor.
    if whole.is_cuda:
        return host_empty(whole.numel(), whole.dtype, whole.device).copy_(whole)
    return whole


def host_empty(count: int, dtype: torch.dtype, home: torch.device) -> Tensor:
    """Flat main memory, pinned for the values of a GPU, which then copies several times faster."""
    if home.type == "cuda":
        return torch.empty(count, dtype=dtype, pin_memory=True)
    return take_elements(count, dtype)


def finish_stream(value: Tensor) -> None:
    """Wait until the GPU of this value has done what this thread asked of it."""
    if value.is_cuda:
        torch.cuda.current_stream(value.device).synchronize()
