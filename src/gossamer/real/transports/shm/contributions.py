"""The contributions of processes to all-reduces, in memory that all of them can read.

Each process has a board of cells in its memory, one cell for each all-reduce that some process may
still need. A process writes only its own board, and reads all others. An all-reduce has a key,
which is the same in every member. A contribution has these states, which fields of its cell tell:

    keys[cell] = key          It is posted: the others may read the rest of the cell and the value.
    working[cell] = key       Its process has begun to add up its own chunk of the mean.
    published[cell] = key     The others may read that chunk.
    finished[cell] = key      Its process needs no contribution of the others any longer.
    keys[cell] = 0            No process needs it any longer; the cell and the memory are free.

A process may die in each of these states. A dead process posts nothing more. So once each member
has either posted or is known to be gone, all processes see the same set of contributors.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gossamer.real.transports.backoff import Backoff
from gossamer.real.transports.shm.memory import CELLS, Control, MemoryLayout, SharedMemory, aligned
from gossamer.real.transports.shm.system import Bell
from gossamer.real.transports.transport import StopToken

ON_GPU = 1 << 62
"""A bit in the place of a contribution: it is in GPU memory and not in main memory."""
_BY_EACH_BYTES = 1 << 17
_TINY = 1e-30
_GROUP_BITS = 40
_SEQUENCE_BITS = 24
_BUSY_S = 0.02
_THOROUGH = 16
"""Every so many looks, a process searches all cells of a board and not only the likely one."""

Segment = tuple[int, slice, slice]
"""A part of a tensor: the number of the tensor, its elements, and their places in the vector."""


class ReduceKind:
    """What all-reduces with the same members and tensors of the same shapes have in common."""

    def __init__(
        self, members: tuple[int, ...], rank: int, tensors: Sequence[Tensor], *, is_on_gpu: bool
    ) -> None:
        """`is_on_gpu` says that the tensors are on a GPU whose memory the members share."""
        self.members = members
        self.others = tuple(member for member in members if member != rank)
        self.shapes = [tensor.shape for tensor in tensors]
        self.sizes = [tensor.numel() for tensor in tensors]
        self.dtype = tensors[0].dtype if tensors else torch.float32
        self.count = sum(self.sizes)
        self.nbytes = self.count * self.dtype.itemsize
        self.is_on_gpu = is_on_gpu
        parts = len(members)
        # A division by 2 or 4 is exact, so each member divides its contribution and nobody the sum.
        # This is not so in float16, where small gradients would lose their last bit.
        is_wide = self.dtype.is_floating_point and torch.finfo(self.dtype).tiny < _TINY
        is_exact = is_wide and parts & (parts - 1) == 0
        self.scale = 1.0 / parts if is_exact else 1.0
        self.factor = torch.tensor(self.scale)
        """The scale as a tensor, by which torch multiplies twice as fast as by a number."""
        # Two members read as many bytes either way, and need not wait for chunks. A GPU reads all
        # values in less time than processes need to exchange chunks.
        self.is_by_each = is_on_gpu or parts == 2 or self.nbytes <= _BY_EACH_BYTES
        self._word = _word_of(members) << _SEQUENCE_BITS

    def key(self, number: int) -> int:
        """Return the key of an all-reduce: one word for the group and the number."""
        return self._word | number % (1 << _SEQUENCE_BITS)

    @cached_property
    def needed_bytes(self) -> int:
        """The bytes of the value and of this process's chunk of the mean."""
        chunk = 0 if self.is_by_each else self.nbytes // len(self.members) + self.dtype.itemsize
        return aligned(self.nbytes) + chunk

    @cached_property
    def chunks(self) -> dict[int, tuple[slice, list[Segment]]]:
        """By member: the elements that it adds up for all, and their parts of tensors."""
        parts = len(self.members)
        bounds = pairwise(self.count * part // parts for part in range(parts + 1))
        return {
            member: (slice(start, end), list(self._segments(start, end)))
            for member, (start, end) in zip(self.members, bounds, strict=True)
        }

    def _segments(self, start: int, end: int) -> list[Segment]:
        found: list[Segment] = []
        at = 0
        for number, size in enumerate(self.sizes):
            first, last = max(start, at), min(end, at + size)
            if first < last:
                found.append((number, slice(first - at, last - at), slice(first, last)))
            at += size
        return found

    def divisor(self, contributors: int) -> float:
        """Return the number by which the sum of the contributions is still to be divided."""
        return contributors * self.scale


def _word_of(members: tuple[int, ...]) -> int:
    """Return one bit for each member, or a digest of the members."""
    if members[-1] < _GROUP_BITS:
        return sum(1 << member for member in members)
    digest = hashlib.blake2b(repr(members).encode(), digest_size=_GROUP_BITS // 8)
    return int.from_bytes(digest.digest(), "little") | 1


class OwnContribution:
    """This process's part in one all-reduce that some process may still need."""

    def __init__(self, kind: ReduceKind, number: int, tensors: Sequence[Tensor]) -> None:
        self.kind = kind
        self.number = number
        self.key = kind.key(number)
        self.tensors = tensors
        """The tensors for the mean; none once the mean is written."""
        self.cell = -1
        self.place = -1
        self.found: dict[int, int] = {}
        """The cells of the members that have posted."""
        self.finishing = threading.Lock()
        self.is_abandoned = False


class Board:
    """The cells of one process."""

    def __init__(self, memory: SharedMemory, layout: MemoryLayout) -> None:
        def field(number: int) -> memoryview:
            return memory.words(layout.cells + 8 * CELLS * number, CELLS)

        self.memory = memory
        self.keys, self.places, self.lengths = field(0), field(1), field(2)
        self.working, self.published, self.finished = field(3), field(4), field(5)
        self.opened = field(6)
        """By process: 1 once this process can read the GPU memory of that one, or has its own."""
        self._searched = np.frombuffer(self.keys, dtype=np.uint64)

    def find(self, key: int, likely: int) -> int | None:
        """Return the cell with that key. Processes in step with each other use the same cell."""
        if self.keys[likely] == key:
            return likely
        cells = np.flatnonzero(self._searched == key)
        return int(cells[0]) if len(cells) else None


class Contributions:
    """Which members have posted, as this process sees it."""

    def __init__(
        self, boards: Mapping[int, Board], control: Control, bell: Bell, stop: StopToken
    ) -> None:
        self._boards = boards
        self._control = control
        self._bell = bell
        self._stop = stop

    def are_complete(self, own: OwnContribution) -> bool:
        """Whether each member has posted or never will; this notes the cells of those that have."""
        return all(self._is_decided(own, member) for member in own.kind.others)

    def _is_decided(self, own: OwnContribution, member: int) -> bool:
        """Whether the member has posted, or never will."""
        # This comes before the search: a member posts before it goes, so if it is gone by now, the
        # search finds what it has posted.
        is_gone = self._control.is_out_of_sums(member)
        cell = self._boards[member].find(own.key, own.cell)
        if cell is not None:
            own.found[member] = cell
        return cell is not None or is_gone

    def wait(self, own: OwnContribution) -> None:
        """Wait until the contributions are complete.

        This looks at one member after the other: a waiting process often shares a processor with
        those that it waits for, and every look takes some of their time.
        """
        key, likely, found = own.key, own.cell, own.found
        backoff: Backoff | None = None
        looks = 0
        for member in own.kind.others:
            keys = self._boards[member].keys
            while member not in found:
                seen = self._bell.value
                there = keys[likely]
                if there == key:
                    found[member] = likely
                    break
                if backoff is None:
                    backoff = Backoff(self._stop, _BUSY_S)
                looks += 1
                is_due = there or looks % _THOROUGH == 0
                if is_due and self._is_decided(own, member):
                    break
                if not backoff.yields():
                    looks = -1  # after a sleep the next look searches all cells
                    self._bell.wait(seen, self._stop.patience)
