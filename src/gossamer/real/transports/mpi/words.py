"""Tensors as MPI sees them: whole words without a meaning.

Counted in words, not bytes, because MPI counts with 31 bits; and MPI knows no half precision.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(value: Tensor) -> NDArray[Any]:
    """The memory of a contiguous tensor, not a copy."""
    return value.detach().view(_WORDS[value.element_size()]).numpy()
