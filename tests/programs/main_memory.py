"""Main memory in the place of a GPU's, for processes that share it.

Nothing is ever done late here, so a mark is always reached once it is recorded; but those of
`mark` say so only after a `finish`, as on a GPU with much to do.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import torch
from torch import Tensor


class Finishes:
    """Reached when its GPU was waited for since."""

    def __init__(self, gpu: MainMemory) -> None:
        self._gpu = gpu
        self._seen = gpu.finished

    def query(self) -> bool:
        return self._gpu.finished > self._seen


class FileMark:
    """One that other processes know by the name of a file."""

    def __init__(self, handle: str) -> None:
        self.handle = handle

    def record(self) -> None:
        Path(self.handle).write_text("reached")

    def precede(self) -> None:
        assert self.query()

    def query(self) -> bool:
        return Path(self.handle).exists()


class MainMemory:
    """A `Gpu` whose memory is files."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cpu")
        self.finished = 0
        self.opened = 0
        self._folder = folder
        self._names: dict[int, str] = {}
        self._numbers = itertools.count()

    def _name(self) -> str:
        return str(self._folder / f"{os.getpid()}-{id(self)}-{next(self._numbers)}")

    def at(self, device: torch.device) -> MainMemory:
        return self

    def allocate(self, length: int) -> Tensor:
        name = self._name()
        memory = torch.from_file(name, shared=True, size=length, dtype=torch.uint8)
        self._names[memory.data_ptr()] = name
        return memory

    def handle(self, memory: Tensor) -> str:
        return self._names[memory.data_ptr()]

    def open(self, handle: str) -> Tensor:
        self.opened += 1
        length = Path(handle).stat().st_size
        return torch.from_file(handle, shared=True, size=length, dtype=torch.uint8)

    def finish(self) -> None:
        self.finished += 1

    def mark(self) -> Finishes:
        return Finishes(self)

    def shared_mark(self) -> FileMark:
        return FileMark(self._name())

    def open_mark(self, handle: str) -> FileMark:
        return FileMark(handle)
