"""In which floating-point numbers gradients are computed.

Parameters, gradients and the optimiser's state are always numbers of 32 bits. What changes is how
products of matrices and convolutions round their factors.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

PRECISIONS = {
    "fp32": "32 bits everywhere (the default on CPUs), for comparisons bit by bit",
    "tf32": "products of matrices with factors of 19 bits (the default on GPUs that have it)",
    "bf16": "forward and backward in 16 bits; losses and normalisations in 32, as autocast does",
}
_FIRST_WITH_TF32 = (8, 0)


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
    """Around all computations of a run on a GPU: whether products of 32-bit numbers may use tf32.
    Torch has one switch for the process, which is put back."""
    if device.type != "cuda":
        yield
        return
    is_allowed = precision != "fp32"
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if is_allowed else "highest")
    torch.backends.cudnn.allow_tf32 = is_allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
