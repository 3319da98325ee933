"""How workers on the torch transport compute means: by NCCL, in shared memory, or by messages.

NCCL needs a GPU for each process, and hangs or fails where two processes share one. Only processes
of one host can share memory. So every process says on which GPU it computes and how many workers
are on its host, and all processes draw the same conclusion.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import distributed

from gossamer.errors import ConfigurationError, Late, unknown_name
from gossamer.real.transports.checked_values import number_from
from gossamer.real.transports.transport import Store

REDUCTIONS = ("auto", "messages", "nccl")
_GONE = ("engine", "fixed", "shared")
"""Former values; `auto` and `messages` do the same now."""
_NO_GPU = "no GPU"
_NO_NCCL = "no NCCL"
_PATIENCE_S = 300.0

Check = Callable[[], None]
"""A wait calls this again and again; it raises the error that makes the wait useless."""


class ReductionPlace(NamedTuple):
    """Where a worker computes."""

    gpu: str
    neighbours: int
    """How many workers its host has, including itself, as its launcher says."""


def check_reduction(name: str) -> None:
    if name in _GONE:
        raise ConfigurationError(
            f"GOSSAMER_REDUCTION={name} is no choice any more, as there is one reduction by "
            "messages; leave the variable out, or set it to messages or nccl"
        )
    if name not in REDUCTIONS:
        raise unknown_name("reduction", name, REDUCTIONS)


def own_gpu(device: torch.device) -> str:
    """Return a name of the GPU that is the same in every process."""
    if device.type != "cuda":
        return _NO_GPU
    if not distributed.is_nccl_available():
        return _NO_NCCL
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_reduction(wanted: str, places: Sequence[ReductionPlace]) -> tuple[str, str]:
    """Return `nccl`, `shared` or `messages`, and the reason; `places` are in order of rank."""
    if wanted == "messages":
        return wanted, "it was asked for"
    not_nccl = _why_not_nccl([place.gpu for place in places])
    if not_nccl is None:
        return "nccl", "every worker has a GPU of its own"
    if wanted == "nccl":
        raise ConfigurationError(
            f"GOSSAMER_REDUCTION=nccl needs a GPU of its own for every worker, but {not_nccl};"
            " leave the variable out, or give each worker another GPU, by its LOCAL_RANK"
        )
    not_shared = _why_not_shared(places)
    if not_shared is None:
        return "shared", "all workers compute on the CPU of one host"
    return "messages", f"{not_nccl}, and {not_shared}"


def _why_not_nccl(gpus: Sequence[str]) -> str | None:
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu == _NO_GPU:
            return f"worker {rank} computes on the CPU"
        if gpu == _NO_NCCL:
            return f"the torch of worker {rank} has no NCCL"
        if gpu in first:
            return f"workers {first[gpu]} and {rank} share one"
        first[gpu] = rank
    return None


def _why_not_shared(places: Sequence[ReductionPlace]) -> str | None:
    if sys.platform != "linux":
        return f"that needs Linux, and this is {sys.platform}"
    for rank, place in enumerate(places):
        if place.gpu != _NO_GPU:
            return f"worker {rank} computes on a GPU"
        if place.neighbours != len(places):
            return f"worker {rank} has {place.neighbours} of {len(places)} workers on its host"
    return None


def agree_on_reduction(
    wanted: str, own: ReductionPlace, rank: int, size: int, store: Store, check: Check
) -> str:
    """All processes call this: each says where it computes, and all choose alike."""
    told = tell_all("place", f"{own.neighbours} {own.gpu}", rank, size, store, check)
    parts = [text.partition(" ") for text in told]
    places = [
        ReductionPlace(gpu, number_from(f"place/{other}", count))
        for other, (count, _, gpu) in enumerate(parts)
    ]
    return choose_reduction(wanted, places)[0]


def tell_all(what: str, own: str, rank: int, size: int, store: Store, check: Check) -> list[str]:
    """All processes call this: return what each of them says, in order of rank."""
    store.agree(f"{what}/{rank}", own)
    return [wait_for(f"{what}/{other}", other, store, check) for other in range(size)]


def wait_for(key: str, rank: int, store: Store, check: Check) -> str:
    """Return what that process has put into the store under that key, once it has."""
    until = time.monotonic() + _PATIENCE_S
    while (text := store.get(key)) is None:
        check()
        if time.monotonic() > until:
            raise Late(f"worker {rank} did not come within {_PATIENCE_S:.0f} s")
        time.sleep(0.005)
    return text
