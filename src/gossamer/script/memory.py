"""The models of a simulation of scripts, in memory that all of their processes see."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 64
"""Bytes: where memory of torch's own begins. Some kernels round otherwise elsewhere."""
_VECTORS = ("value", "gradient", "descent", "point", "output")


@dataclass(frozen=True)
class MemoryPlan:
    """What lies there: for each worker some vectors like its model, and its buffers as bytes."""

    workers: int
    numbers: int
    """Of a model."""
    dtype: str
    statistics: int
    """Bytes of the buffers that a mean makes sense of."""
    counters: int
    """Bytes of the others."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> MemoryPlan:
        return MemoryPlan(**values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def type_of_numbers(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class ModelMemory:
    """One row for each worker:

    value        its replica
    gradient     what its loop has computed last
    descent      what its optimiser is to descend along
    point        where a gradient is to be taken, or was, if not at the replica
    output       the output model of the moment at which it asked for it
    statistics   its buffers, and `counters`, as of its last gradient
    served       of all servers together: the values, and `pushed`: what they descend along
    """

    def __init__(self, plan: MemoryPlan, file: int | None = None) -> None:
        """New, or what an open file holds."""
        self.plan = plan
        width = _rounded(plan.numbers * plan.type_of_numbers.itemsize)
        sizes = dict.fromkeys(_VECTORS, (plan.workers, width))
        sizes |= {"served": (1, width), "pushed": (1, width)}
        for name in ("statistics", "counters", "output_statistics", "output_counters"):
            kind = name.removeprefix("output_")
            sizes[name] = (plan.workers, _rounded(getattr(plan, kind)))
        total = max(1, sum(rows * each for rows, each in sizes.values()))
        self.file = new_file(total) if file is None else file
        self._map = mmap.mmap(self.file, total)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        at = 0
        self._bytes: dict[str, Tensor] = {}
        for name, (rows, each) in sizes.items():
            self._bytes[name] = whole[at : at + rows * each].view(rows, each)
            at += rows * each
        self.value = self._vectors("value")
        self.gradient = self._vectors("gradient")
        self.descent = self._vectors("descent")
        self.point = self._vectors("point")
        self.output = self._vectors("output")
        self.served = self._vectors("served")[0]
        self.pushed = self._vectors("pushed")[0]

    def _vectors(self, name: str) -> Tensor:
        return self._bytes[name].view(self.plan.type_of_numbers)[:, : self.plan.numbers]

    def raw(self, name: str, worker: int) -> Tensor:
        """Statistics or counters as bytes."""
        kind = name.removeprefix("output_")
        return self._bytes[name][worker, : getattr(self.plan, kind)]

    def close(self) -> None:
        """The file only: the memory goes with the last tensor that lies in it."""
        os.close(self.file)


def new_file(size: int) -> int:
    """An open file without a name."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("gossamer")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, size)
    return file


def file_of(value: Tensor) -> int:
    """An open file that holds this tensor's bytes."""
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    file = new_file(max(1, raw.numel()))
    if raw.numel():
        torch.frombuffer(mmap.mmap(file, raw.numel()), dtype=torch.uint8).copy_(raw)
    return file


def tensor_of(file: int, dtype: torch.dtype) -> Tensor:
    """The inverse; the file is closed."""
    size = os.fstat(file).st_size
    try:
        if size < dtype.itemsize:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8).clone().view(dtype)
    finally:
        os.close(file)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
