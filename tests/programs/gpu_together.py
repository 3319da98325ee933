"""Transports that share a GPU, as if in processes of their own, with main memory in its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gossamer.pending import Pending
from gossamer.real.transports.conformance.tools import FrameRecorder, mean_of
from gossamer.real.transports.shm import ShmTransport, create_segments
from gossamer.real.transports.shm import transport as shm_transport
from gossamer.real.transports.transport import StopToken, Window
from main_memory import MainMemory

WIDTH = 1000


class OneStore:
    """The store of several transports in one process."""

    def __init__(self) -> None:
        self._facts: dict[str, str] = {}

    def agree(self, key: str, value: str) -> str:
        return self._facts.setdefault(key, value)

    def add(self, key: str, amount: int) -> int:
        self._facts[key] = str(int(self._facts.get(key, 0)) + amount)
        return int(self._facts[key])

    def get(self, key: str) -> str | None:
        return self._facts.get(key)


def in_all(count: int, action: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=action, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Together:
    """Transports that share a GPU, as if in processes of their own."""

    def __init__(self, size: int, gpus: Sequence[MainMemory], patch: pytest.MonkeyPatch) -> None:
        segments = create_segments(size)
        files = [[os.dup(file) for file in segments.fds] for _ in range(size)]
        segments.close()
        self.segments = segments
        store = OneStore()
        self.gpus = gpus
        self.transports = [ShmTransport(rank, size, files[rank], store) for rank in range(size)]
        windows = {rank: Window(WIDTH, torch.float32, rank) for rank in range(size)}
        mine = threading.local()
        patch.setattr(shm_transport, "_gpu_for", lambda device: gpus[mine.rank])

        def open_it(rank: int) -> None:
            mine.rank = rank
            initial = {rank: torch.zeros(WIDTH)}
            self.transports[rank].open(windows, initial, FrameRecorder(), StopToken())

        in_all(size, open_it)

    def start(self, values: list[Tensor]) -> list[Pending[Tensor]]:
        everybody = range(len(values))
        return [mean_of(self.transports[rank], values[rank], everybody) for rank in everybody]

    def reduce(self, values: list[Tensor]) -> list[Tensor]:
        return [settled(pending) for pending in self.start(values)]

    def places(self) -> list[int]:
        """Where the values posted last lie."""
        return [t._all_reduce._posted[-1].place for t in self.transports]

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


def settled(pending: Pending[Tensor]) -> Tensor:
    assert pending.settle is not None
    pending.settle()
    return pending.result()
