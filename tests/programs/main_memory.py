"""Main memory in the place of a GPU's, for processes that share it.

Nothing is ever done late here, so a mark is always reached once it is recorded; but those of
`mark` say so only after a `finish`, as on a GPU with much to do.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from gossamer.real.transports.shm.one_pass import Mean
from gossamer.rules import mean_in_order


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

    def signals(self, memory: mmap, start: int, length: int) -> MainSignals | None:
        return None


class MainSignals:
    """The signals of a GPU that does at once what it is asked for; a wait is the caller's."""

    def __init__(self) -> None:
        self.stream = 1
        self.is_silent = False
        """Whether its GPU never comes to setting a word."""
        self.has_mean = True
        self.words = memoryview(bytearray()).cast("Q")

    def present(self) -> int:
        return self.stream

    def set(self, word: int, value: int) -> None:
        if not self.is_silent:
            self.words[word] = value

    def wait(self, word: int, value: int) -> None:
        until = time.monotonic() + 20.0
        while self.words[word] < value:
            assert time.monotonic() < until
            time.sleep(1e-3)

    def address(self, word: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.words)) + 8 * word

    def copy(self, words: int, target: Tensor) -> None:
        target.copy_(torch.tensor(self.words[words : words + len(target)].tolist()))

    def mean(self) -> Mean | None:
        return _mean if self.has_mean else None


def _mean(table: Tensor, left: int, number: int, result: Tensor) -> None:
    length = 4 * result.numel()
    left_at = (ctypes.c_uint64 * (1 + int(table[:, 1].max()))).from_address(left)
    values = [
        torch.frombuffer((ctypes.c_char * length).from_address(address), dtype=torch.float32)
        for address, whose in table.tolist()
        if not 0 < left_at[whose] <= number
    ]
    result.copy_(mean_in_order(values))


class Signalling(MainMemory):
    """A GPU whose streams can wait for each other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.own = MainSignals()

    def signals(self, memory: mmap, start: int, length: int) -> MainSignals:
        self.own.words = memoryview(memory)[start : start + length].cast("Q")
        return self.own
