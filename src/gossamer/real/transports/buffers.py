"""A pool of large buffers, because fresh memory can cost more than moving bytes into it.

Nobody gives a buffer back. A tensor that was made from it, and every view and array of that tensor,
refer to it; when the last of them is gone, the pool may hand the buffer out again.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.real.transports.transport import Part

_SMALL = 1 << 16
_KINDS = 16
_KEPT_BYTES = 128 << 20
_KEPT_BLOCKS = 8
_LOOKS = 16


class BufferPool:
    """Blocks of memory by their size; those of one size form a ring, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rings: OrderedDict[int, deque[mmap.mmap]] = OrderedDict()
        self._alone = _references(deque([_map(_SMALL)]))

    def take(self, length: int) -> Tensor:
        """Return that many bytes, with whatever content they had before."""
        if length < _SMALL:
            return torch.empty(length, dtype=torch.uint8)
        size = -(-length // _SMALL) * _SMALL
        with self._lock:
            ring = self._ring(size)
            block = self._idle(ring)
            if block is None:
                block = _map(size)
                ring.append(block)
                if len(ring) > max(_KEPT_BLOCKS, _KEPT_BYTES // size):
                    ring.popleft()
            return torch.frombuffer(block, dtype=torch.uint8, count=length)

    def _ring(self, size: int) -> deque[mmap.mmap]:
        ring = self._rings.setdefault(size, deque())
        self._rings.move_to_end(size)
        if len(self._rings) > _KINDS:
            self._rings.popitem(last=False)
        return ring

    def _idle(self, ring: deque[mmap.mmap]) -> mmap.mmap | None:
        for _ in range(min(_LOOKS, len(ring))):
            is_idle = _references(ring) == self._alone
            ring.rotate(-1)
            if is_idle:
                return ring[-1]
        return None


def _references(ring: deque[mmap.mmap]) -> int:
    # The count is only compared with a measured one: how many references the call itself adds
    # differs between versions of Python.
    return sys.getrefcount(ring[0])


def _map(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


_POOL = BufferPool()


def take(length: int) -> Tensor:
    """Return that many bytes of this process's pool, with whatever content they had before."""
    return _POOL.take(length)


def take_elements(count: int, dtype: torch.dtype) -> Tensor:
    """Return so many elements of this process's pool as a flat tensor."""
    return take(count * dtype.itemsize).view(dtype)


def copy_parts(parts: Iterable[Part], target: NDArray[np.uint8]) -> None:
    """Copy the parts into the target, one after the other."""
    at = 0
    for part in parts:
        if memoryview(part).nbytes:
            source = np.frombuffer(part, np.uint8)  # numpy lets other threads run while it copies
            target[at : at + len(source)] = source
            at += len(source)


def joined_bytes(parts: Sequence[Part], padding: int = 0) -> Tensor:
    """A copy of the parts as bytes from the pool, with so many more bytes after them."""
    whole = take(sum(memoryview(part).nbytes for part in parts) + padding)
    copy_parts(parts, whole.numpy())
    return whole


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Return a new vector of all pieces. In main memory it comes from the pool."""
    first = pieces[0]
    if first.device.type != "cpu":
        return torch.cat(list(pieces))
    whole = take_elements(sum(piece.numel() for piece in pieces), first.dtype)
    return torch.cat(list(pieces), out=whole)
