"""Memory that is used again: fresh pages cost several times what copying into them costs.

An array is free again once nobody refers to it; tensors and memory views of it count.
"""

from __future__ import annotations

import sys
import threading
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.real.transports.mpi.words import words

Bytes = NDArray[np.uint8]

_SMALL = 1 << 16
"""Below this the allocator is as quick."""
_KEPT = 12


class Pool:
    """Arrays of bytes; whoever lets go of one gives it back."""

    def __init__(self) -> None:
        self._arrays: list[Bytes] = []
        self._lock = threading.Lock()
        self._alone = _references([np.empty(1, np.uint8)], 0)

    def take(self, length: int) -> Bytes:
        """An array of that many bytes that nobody else uses; its content is arbitrary."""
        if length < _SMALL:
            return np.empty(length, np.uint8)
        with self._lock:
            # The one used last comes first: it may still be in the cache. The others age.
            for index in reversed(range(len(self._arrays))):
                fits = length <= len(self._arrays[index]) < 2 * length
                if fits and _references(self._arrays, index) == self._alone:
                    array = self._arrays.pop(index)
                    self._arrays.append(array)
                    return array[:length]
            array = np.empty(length, np.uint8)
            self._arrays.append(array)
            if len(self._arrays) > _KEPT:
                del self._arrays[0]
            return array[:]

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on such an array."""
        return self.pair(prod(shape), dtype)[0].reshape(shape)

    def pair(self, count: int, dtype: torch.dtype) -> tuple[Tensor, NDArray[Any]]:
        """A flat tensor, and the same memory as MPI sees it: `words`."""
        if count == 0:
            empty = torch.empty(0, dtype=dtype)
            return empty, words(empty)
        array = self.take(count * dtype.itemsize)
        return torch.from_numpy(array).view(dtype), array.view(f"i{dtype.itemsize}")


def _references(arrays: list[Bytes], index: int) -> int:
    # Compared with a measured count only: what an interpreter adds by looking differs by version.
    return sys.getrefcount(arrays[index])
