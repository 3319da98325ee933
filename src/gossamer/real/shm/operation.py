"""One all-reduce as a process of it sees it: what it is known by, and how it is to be added up."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.real.transport import Scattered

_BY_EACH_BYTES = 1 << 17
_GROUP_BITS = 40
_SEQUENCE_BITS = 24
PROCESSORS = os.cpu_count() or 1


class Operation:
    """One all-reduce of this process that may still be in somebody's way."""

    def __init__(
        self, key: int, value: Tensor | Scattered, members: tuple[int, ...],
        shared_gpu: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.key = key
        self.members = members
        device = value.home if isinstance(value, Scattered) else value.device
        self.is_on_gpu = device == shared_gpu
        """On that which the members share."""
        self.scattered: Scattered | None = None
        if isinstance(value, Scattered):
            self.shape = torch.Size((value.count,))
            self.count, self.dtype = value.count, value.kind
            self.scattered, self.edition = value, value.edition
        else:
            self.shape = value.shape
            self.count, self.dtype = value.numel(), value.dtype
        self.nbytes = self.count * self.dtype.itemsize
        parts = len(members)
        # Halves and quarters are exact: dividing what goes in saves dividing what comes out.
        is_exact = self.dtype.is_floating_point and parts & (parts - 1) == 0
        self.scale = 1.0 / parts if is_exact else 1.0
        self.cell = -1
        self.offset = -1
        self.found: dict[int, int] = {}
        """The cells of the members that have posted."""
        self.settling = threading.Lock()
        self.is_abandoned = False

    def abandon(self) -> None:
        """Cancelled: nobody here wants the result, yet others still read the contribution."""
        self.is_abandoned = True

    def divisor(self, values: Sequence[Tensor]) -> float:
        """What the sum of the contributions is still to be divided by."""
        return len(values) * self.scale

    @property
    def bounds(self) -> list[int]:
        """Where the members' chunks begin and end, in elements."""
        parts = len(self.members)
        return [self.count * part // parts for part in range(parts + 1)]

    @property
    def is_by_each(self) -> bool:
        """Two read as many bytes either way, and save a handing-over; a GPU reads faster than
        anybody could be told of what another has made."""
        return self.is_on_gpu or len(self.members) == 2 or self.nbytes <= _BY_EACH_BYTES

    @property
    def is_crowded(self) -> bool:
        """More members than processors: who looks again and again keeps another from working."""
        return len(self.members) > PROCESSORS

    @property
    def is_by_one(self) -> bool:
        """All of this machine count alike."""
        return not self.is_by_each and self.is_crowded


def key_of(members: tuple[int, ...], number: int) -> int:
    """One word for the group and its operation's number: the members' bits, or a digest of them."""
    if members[-1] < _GROUP_BITS:
        group = sum(1 << member for member in members)
    else:
        digest = hashlib.blake2b(repr(members).encode(), digest_size=_GROUP_BITS // 8)
        group = int.from_bytes(digest.digest(), "little") | 1
    return group << _SEQUENCE_BITS | number % (1 << _SEQUENCE_BITS)
