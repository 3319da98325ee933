"""What kernels of our own do in one pass over GPU memory and torch's operations in several."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Average = Callable[[Tensor, Tensor], None]
Mean = Callable[[Tensor, int, int, Tensor], None]


@cache
def average_in_one_pass(device: torch.device) -> Average | None:
    """Makes two vectors of 32 bits there their mean; None where there is no way to. Torch would
    read and write five vectors for it, this does four."""
    return _compiled("compiled_average", device)


@cache
def mean_in_one_pass(device: torch.device) -> Mean | None:
    """Adds up vectors of 32 bits in order and divides; None where there is no way to.

    It is given a table with a row for each vector (its address, and whose it is), the address of
    words that say, by process, from which number on its vectors are left out (0: none), this
    number, and where to put the mean of the others."""
    return _compiled("compiled_mean", device)


def _compiled(kernel: str, device: torch.device) -> Any:
    try:
        import triton  # pyright: ignore[reportMissingImports]

        from gossamer.real.transports.shm import kernels

        # Triton would keep what it compiles in the home folder, where nobody asked for it.
        with triton.knobs.cache.scope(), tempfile.TemporaryDirectory() as folder:
            triton.knobs.cache.dir = folder
            return getattr(kernels, kernel)(device)
    except Exception:
        # No Triton, another one, no compiler, a GPU unknown to it: all the same to who asks.
        return None
