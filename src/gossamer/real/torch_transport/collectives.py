"""How workers on the torch transport take means: by messages, by Gloo or by NCCL.

NCCL wants a GPU for each of its processes and hangs or fails where two share one, so everybody
tells everybody which GPU it computes on, and all draw the same conclusion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import distributed

from gossamer.errors import ConfigurationError, Late
from gossamer.real.transport import Store

REDUCTIONS = ("auto", "fixed", "engine", "nccl")
"""The best that works; by messages; by Gloo's exchanges; by NCCL."""
_NO_GPU = "no GPU"
_NO_NCCL = "no NCCL"
_PATIENCE_S = 300.0


def own_gpu(device: torch.device) -> str:
    """The same text for the same GPU, in whatever process and under whatever number."""
    if device.type != "cuda":
        return _NO_GPU
    if not distributed.is_nccl_available():
        return _NO_NCCL
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_collectives(wanted: str, gpus: Sequence[str]) -> tuple[str, str]:
    """One of `REDUCTIONS` other than auto, and why; `gpus` are those of the workers, by rank."""
    if wanted in ("fixed", "engine"):
        return wanted, "it was asked for"
    why_not = _why_not_nccl(gpus)
    if why_not is None:
        return "nccl", "every worker has a GPU of its own"
    if wanted == "nccl":
        raise ConfigurationError(
            f"GOSSAMER_REDUCTION=nccl needs a GPU of its own for every worker, but {why_not}; leave"
            " the variable out, or give each worker another GPU, by its LOCAL_RANK"
        )
    return "engine", why_not


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


def agree_on_collectives(
    wanted: str, device: torch.device, rank: int, size: int, store: Store, check: Callable[[], None]
) -> str:
    """Collective: every process tells where it computes, and all choose alike.

    `check` is called while others are waited for, and raises what makes that useless.
    """
    store.agree(f"gpu/{rank}", own_gpu(device))
    until = time.monotonic() + _PATIENCE_S
    gpus: list[str] = []
    while len(gpus) < size:
        gpu = store.get(f"gpu/{len(gpus)}")
        if gpu is not None:
            gpus.append(gpu)
            continue
        check()
        if time.monotonic() > until:
            raise Late(f"worker {len(gpus)} did not come within {_PATIENCE_S:.0f} s")
        time.sleep(0.005)
    return choose_collectives(wanted, gpus)[0]
