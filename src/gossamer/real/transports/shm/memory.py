"""The memory of one process that others see, too, as bytes, words and tensors."""

from __future__ import annotations

from mmap import mmap

import torch
from torch import Tensor

_TENSORS = 256


class Block:
    """Bytes, in main memory or a GPU's, seen as tensors."""

    def __init__(self, whole: Tensor) -> None:
        self.device = whole.device
        self._bytes = whole
        self._tensors: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Few of them are asked for over and over: one object each."""
        key = (start, count, dtype)
        known = self._tensors.get(key)
        if known is None:
            if len(self._tensors) >= _TENSORS:
                self._tensors.clear()
            known = self._bytes[start : start + count * dtype.itemsize].view(dtype)
            self._tensors[key] = known
        return known


class Memory(Block):
    """Stays mapped for as long as anybody holds a view of it."""

    def __init__(self, file: int, length: int) -> None:
        self.map = mmap(file, length)
        self._view = memoryview(self.map)
        super().__init__(torch.frombuffer(self.map, dtype=torch.uint8))

    def region(self, start: int, length: int) -> memoryview:
        return self._view[start : start + length]

    def words(self, start: int, count: int) -> memoryview:
        return self.region(start, 8 * count).cast("Q")
