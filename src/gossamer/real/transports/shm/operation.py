"""One all-reduce as a process of it sees it: what it is known by, and how it is to be added up."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gossamer.real.transports.shm.layout import aligned
from gossamer.real.transports.transport import Scattered

_BY_EACH_BYTES = 1 << 17
_TINY = 1e-30
_GROUP_BITS = 40
_SEQUENCE_BITS = 24
PROCESSORS = os.cpu_count() or 1


class Kind:
    """What all-reduces of one group have in common, if their values are alike."""

    def __init__(
        self, members: tuple[int, ...], rank: int, count: int, dtype: torch.dtype, *,
        is_on_gpu: bool = False,
    ) -> None:  # fmt: skip
        self.members = members
        self.others = tuple(member for member in members if member != rank)
        self.count, self.dtype = count, dtype
        self.is_on_gpu = is_on_gpu
        """On that which the members share."""
        self.nbytes = count * dtype.itemsize
        parts = len(members)
        # Halves and quarters are exact: dividing what goes in saves dividing what comes out.
        is_exact = dtype.is_floating_point and parts & (parts - 1) == 0
        self.scale = 1.0 / parts if is_exact else 1.0
        # Tiny gradients are common in 16 bits of float16, and halving those is not exact.
        is_wide = is_exact and torch.finfo(dtype).tiny < _TINY
        self.is_of_pair = parts == 2 and is_wide
        """Then the mean is made of a process's own value, where it is, and the other's half."""
        # Two read as many bytes either way, and save a handing-over; a GPU reads faster than
        # anybody could be told of what another has made.
        self.is_by_each = is_on_gpu or parts == 2 or self.nbytes <= _BY_EACH_BYTES
        # With more members than processors, who adds up for itself keeps another from working.
        # All of this machine count alike.
        self.is_by_one = not self.is_by_each and parts > PROCESSORS
        self._word = _word_of(members) << _SEQUENCE_BITS

    def key(self, number: int) -> int:
        """One word for the group and its operation's number."""
        return self._word | number % (1 << _SEQUENCE_BITS)

    @cached_property
    def needed_bytes(self) -> int:
        """For the value, and for what this process makes of everybody's."""
        made = 0
        if self.is_by_one:
            made = self.nbytes
        elif not self.is_by_each:
            made = self.nbytes // len(self.members) + self.dtype.itemsize
        return aligned(self.nbytes) + made

    @cached_property
    def bounds(self) -> list[int]:
        """Where the members' chunks begin and end, in elements."""
        parts = len(self.members)
        return [self.count * part // parts for part in range(parts + 1)]

    def divisor(self, values: Sequence[object]) -> float:
        """What the sum of the contributions is still to be divided by."""
        return len(values) * self.scale


class Operation:
    """One all-reduce of this process that may still be in somebody's way."""

    def __init__(self, kind: Kind, number: int, value: Tensor | Scattered) -> None:
        self.kind = kind
        self.number = number
        self.key = kind.key(number)
        self.scattered: Scattered | None = None
        self.shape: Sequence[int] = (kind.count,)
        if isinstance(value, Scattered):
            self.scattered, self.edition = value, value.edition
        else:
            self.shape = value.shape
        self.cell = -1
        self.offset = -1
        self.found: dict[int, int] = {}
        """The cells of the members that have posted."""
        self.settling = threading.Lock()
        self.thread = threading.get_ident()
        """That has started it."""
        self.is_abandoned = False

    def abandon(self) -> None:
        """Cancelled: nobody here wants the result, yet others still read the contribution."""
        self.is_abandoned = True


def _word_of(members: tuple[int, ...]) -> int:
    """The members' bits, or a digest of them."""
    if members[-1] < _GROUP_BITS:
        return sum(1 << member for member in members)
    digest = hashlib.blake2b(repr(members).encode(), digest_size=_GROUP_BITS // 8)
    return int.from_bytes(digest.digest(), "little") | 1
