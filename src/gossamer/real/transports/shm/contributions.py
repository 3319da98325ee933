"""What processes contribute to all-reduces, where all of them can see it.

Each process has a board of cells in its memory, one cell for each all-reduce that may still concern
somebody. It writes its own board only and reads all others. An all-reduce is known by its key,
which is the same in every member. These are the states of a contribution, with the field of its
cell that tells them:

    keys[cell] = key          posted: everything else in the cell, and the value, may be read
    working[cell] = key       its process has begun to add up its own chunk of the mean
    published[cell] = key     that chunk is there for the others
    finished[cell] = key      its process needs nobody's contribution any longer
    keys[cell] = 0            nobody needs this one any longer; the cell and the memory are free

A process may die in any of them. A dead process posts nothing any more, so once each member has
either posted or is seen to be gone, the set of contributors is the same for whoever looks.
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
"""In the place of a contribution: it lies in the GPU memory of its process, not in main memory."""
_BY_EACH_BYTES = 1 << 17
_TINY = 1e-30
_GROUP_BITS = 40
_SEQUENCE_BITS = 24
_BUSY_S = 0.02
_THOROUGH = 16
"""Every so many looks, all cells of a board are searched and not only the likely one."""

Segment = tuple[int, slice, slice]
"""A part of a tensor: its number, which of its elements, and which of all elements these are."""


class ReduceKind:
    """What all-reduces have in common whose members are the same and whose tensors are alike."""

    def __init__(
        self, members: tuple[int, ...], rank: int, tensors: Sequence[Tensor], *, is_on_gpu: bool
    ) -> None:
        """`is_on_gpu`: the tensors are on the GPU whose memory the members share."""
        self.members = members
        self.others = tuple(member for member in members if member != rank)
        self.shapes = [tensor.shape for tensor in tensors]
        self.sizes = [tensor.numel() for tensor in tensors]
        self.dtype = tensors[0].dtype if tensors else torch.float32
        self.count = sum(self.sizes)
        self.nbytes = self.count * self.dtype.itemsize
        self.is_on_gpu = is_on_gpu
        parts = len(members)
        # Halves and quarters are exact: dividing what goes in saves dividing what comes out.
        # Not in float16, where gradients are often so small that they lose their last bit.
        is_wide = self.dtype.is_floating_point and torch.finfo(self.dtype).tiny < _TINY
        is_exact = is_wide and parts & (parts - 1) == 0
        self.scale = 1.0 / parts if is_exact else 1.0
        self.factor = torch.tensor(self.scale)
        """Torch multiplies by a tensor in half the time that it needs to make one of a number."""
        # Two read as many bytes either way, and save a hand-over. A GPU reads faster than anybody
        # could be told of what another process has added up.
        self.is_by_each = is_on_gpu or parts == 2 or self.nbytes <= _BY_EACH_BYTES
        self._word = _word_of(members) << _SEQUENCE_BITS

    def key(self, number: int) -> int:
        """One word for the group and the number of its all-reduce."""
        return self._word | number % (1 << _SEQUENCE_BITS)

    @cached_property
    def needed_bytes(self) -> int:
        """For the value, and for this process's chunk of the mean."""
        chunk = 0 if self.is_by_each else self.nbytes // len(self.members) + self.dtype.itemsize
        return aligned(self.nbytes) + chunk

    @cached_property
    def chunks(self) -> dict[int, tuple[slice, list[Segment]]]:
        """By member: which elements it adds up for all, and the parts of tensors that these are."""
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
        """What the sum of the contributions is still to be divided by."""
        return contributors * self.scale


def _word_of(members: tuple[int, ...]) -> int:
    """The members' bits, or a digest of them."""
    if members[-1] < _GROUP_BITS:
        return sum(1 << member for member in members)
    digest = hashlib.blake2b(repr(members).encode(), digest_size=_GROUP_BITS // 8)
    return int.from_bytes(digest.digest(), "little") | 1


class OwnContribution:
    """This process's part in one all-reduce that may still concern somebody."""

    def __init__(self, kind: ReduceKind, number: int, tensors: Sequence[Tensor]) -> None:
        self.kind = kind
        self.number = number
        self.key = kind.key(number)
        self.tensors = tensors
        """Where the mean is to be written; nothing any more when that is done."""
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
        """By process: 1 once this one can read that one's GPU memory; its own once it has some."""
        self._searched = np.frombuffer(self.keys, dtype=np.uint64)

    def find(self, key: int, likely: int) -> int | None:
        """The cell with that key; processes in step with each other use the same one."""
        if self.keys[likely] == key:
            return likely
        cells = np.flatnonzero(self._searched == key)
        return int(cells[0]) if len(cells) else None


class Contributions:
    """Which members have posted, as one process sees it."""

    def __init__(
        self, boards: Mapping[int, Board], control: Control, bell: Bell, stop: StopToken
    ) -> None:
        self._boards = boards
        self._control = control
        self._bell = bell
        self._stop = stop

    def are_complete(self, own: OwnContribution) -> bool:
        """Whether nobody will post any more; the cells of those who have are noted."""
        return all(self._is_decided(own, member) for member in own.kind.others)

    def _is_decided(self, own: OwnContribution, member: int) -> bool:
        """Whether the member has posted, or never will."""
        # Asked before the board is searched: a member posts before it goes, so what it had posted
        # is there to be found if it is seen to be gone.
        is_gone = self._control.is_out_of_sums(member)
        cell = self._boards[member].find(own.key, own.cell)
        if cell is not None:
            own.found[member] = cell
        return cell is not None or is_gone

    def wait(self, own: OwnContribution) -> None:
        """Until they are complete.

        One member after the other is looked at: whoever waits often shares a processor with those
        it waits for, and every look takes some of their time.
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
                    looks = -1  # after a sleep the next look is a thorough one
                    self._bell.wait(seen, self._stop.patience)
