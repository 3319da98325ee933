"""Which processor a worker keeps to, where workers who wait for each other are too many for them.

Of four workers on two processors a scheduler may put three on one for a tenth of a second; the
fourth, which waits, is busy looking whether they have come, so its processor never seems idle. All
four then make their steps at the pace of the three. And where who waits does sleep, one of four is
often late, and computes alone while the other processor has nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from gossamer.real.launch.environment import discover
from gossamer.real.transports.transport import Transport


def usable_cores() -> int:
    """Of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_of(rank: int, size: int, cores: Sequence[int]) -> int | None:
    """The one of that worker; None where all have room, or they cannot be shared out evenly."""
    if size <= len(cores) or size % len(cores):
        return None
    return cores[rank % len(cores)]


def _is_on_one_host(transport: Transport) -> bool:
    """All workers, and nobody has given this one cores of its own, as far as can be told; mpirun
    has its own way to bind processes."""
    if transport.name == "torch":
        is_free = os.sched_getaffinity(0) == set(range(os.cpu_count() or 0))
        return is_free and discover().local_size == transport.size
    return transport.name == "shm"


class OwnCore:
    """Keeps the thread that made it to one core until it is let go. What the thread starts
    meanwhile keeps to that core, too, and is not let go."""

    def __init__(self, transport: Transport, *, is_synchronous: bool) -> None:
        self._before: set[int] = set()
        # A worker of several threads needs several cores.
        if not is_synchronous or torch.get_num_threads() > 1 or not _is_on_one_host(transport):
            return
        allowed = os.sched_getaffinity(0)
        core = core_of(transport.rank, transport.size, sorted(allowed))
        if core is not None:
            os.sched_setaffinity(0, {core})
            self._before = allowed

    def let_go(self) -> None:
        if self._before:
            os.sched_setaffinity(0, self._before)
            self._before = set()
