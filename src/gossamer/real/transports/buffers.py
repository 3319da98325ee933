"""Large buffers that are used again: fresh memory can cost more than moving the bytes into it.

A block goes back by itself: a tensor made from it holds the one reference that is counted, and so
do its views and arrays; when the last of them has gone, the block is free for the next taker.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL = 1 << 16
_KINDS = 16
_KEPT_BYTES = 128 << 20
_KEPT_BLOCKS = 8
_LOOKS = 16


class BufferPool:
    """Blocks by size, each ring oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rings: OrderedDict[int, deque[mmap.mmap]] = OrderedDict()
        self._alone = _references(deque([_map(_SMALL)]))

    def take(self, length: int) -> Tensor:
        """That many bytes, with whatever they held before."""
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
    # Compared with a measured count only: what an interpreter adds by looking differs by version.
    return sys.getrefcount(ring[0])


def _map(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


_POOL = BufferPool()


def take(length: int) -> Tensor:
    """That many bytes from this process's pool, with whatever they held before."""
    return _POOL.take(length)


def take_elements(count: int, dtype: torch.dtype) -> Tensor:
    """Flat elements from this process's pool."""
    return take(count * dtype.itemsize).view(dtype)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """A new vector of all pieces; a large one in main memory lies in the pool."""
    first = pieces[0]
    if first.device.type != "cpu":
        return torch.cat(list(pieces))
    whole = take_elements(sum(piece.numel() for piece in pieces), first.dtype)
    return torch.cat(list(pieces), out=whole)
