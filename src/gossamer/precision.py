"""In which floating-point numbers gradients are computed, and by how many threads: both decide the
last bits of a result.

Parameters, gradients and the optimiser's state are always numbers of 32 bits. What changes is how
products of matrices and convolutions round their factors.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

PRECISIONS = {
    "fp32": "32 bits everywhere (the default on CPUs), for comparisons bit by bit",
    "tf32": "products of matrices with factors of 19 bits (the default on GPUs that have it)",
    "bf16": "forward and backward in 16 bits; losses and normalisations in 32, as autocast does",
}
_FIRST_WITH_TF32 = (8, 0)


@contextmanager
def threads_of(count: int) -> Generator[None]:
    """Compute with so many threads; another number sums in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def default_precision(device: torch.device) -> str:
    """The fast one that trains like 32 bits: tf32 on GPUs that have it."""
    return "tf32" if device.type == "cuda" and has_tf32(device) else "fp32"


def has_tf32(device: torch.device) -> bool:
    """Whether a device computes products in tf32; no CPU does."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_WITH_TF32


def autocasting(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Around a forward pass with its loss. Weights are cast at each use: the parameters of a
    vectorised model are views, of which autocast could keep no copies."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


@contextmanager
def rounding_as(precision: str, device: torch.device) -> Generator[None]:
    """Around all computations of a run on a GPU: whether products of 32-bit numbers may use tf32,
    and, with fp32, that convolutions add up in the same order in every run. Torch has one switch
    of each kind for the process, which is put back."""
    if device.type != "cuda":
        yield
        return
    is_allowed = precision != "fp32"
    cudnn: Any = torch.backends.cudnn
    products = torch.get_float32_matmul_precision()
    convolutions, in_order = cudnn.allow_tf32, cudnn.deterministic
    torch.set_float32_matmul_precision("high" if is_allowed else "highest")
    cudnn.allow_tf32 = is_allowed
    cudnn.deterministic = in_order or not is_allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        cudnn.allow_tf32, cudnn.deterministic = convolutions, in_order
