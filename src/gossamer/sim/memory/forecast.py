"""What a run will need of memory, said before it starts, and how many gradients at once fit.

The number follows from the settings and from the total memory of the device, never from what is
free at the moment, so that the same run on the same device has the same bits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.tasks.data import leaves
from gossamer.tasks.flat_model import FlatModel, drawing_from

MOST_ROWS = 128
"""More gradients in one call are no faster, even on large devices."""
_USABLE = 0.85
"""The share of the device that a run may plan with; the rest is for torch itself and others."""
_COPIES = 3
"""How often each worker's gradient is held: as points of a batch, as its parts, as one matrix."""
_UNDER_WAY = 2
"""Models per worker that are on their way or in a variable of the method."""


@dataclass(frozen=True)
class Forecast:
    """The bytes of a run, on one device."""

    device: str
    total_bytes: int
    """What the device has."""
    replicas_bytes: int
    """Parameters, optimiser states and statistics of all workers and servers."""
    exchange_bytes: int
    """Gradients and messages."""
    data_bytes: int
    row_bytes: int
    """For each gradient that is computed at the same time: activations, and its parts."""
    width: int
    """How many gradients are computed at the same time at most."""
    most: int
    """How many there can be."""

    @property
    def rows(self) -> int:
        return min(self.width, self.most)

    @property
    def bytes(self) -> int:
        return (
            self.replicas_bytes + self.exchange_bytes + self.data_bytes + self.rows * self.row_bytes
        )

    def __str__(self) -> str:
        parts = [
            (self.replicas_bytes, "replicas and optimiser"),
            (self.exchange_bytes, "gradients and messages"),
            (self.rows * self.row_bytes, f"{self.rows} gradients at once"),
            (self.data_bytes, "data"),
        ]
        told = ", ".join(f"{what} {_shown(size)}" for size, what in parts if size)
        return f"about {_shown(self.bytes)} of {_shown(self.total_bytes)} on {self.device}: {told}"

    def notices(self) -> list[str]:
        if self.width >= min(MOST_ROWS, self.most):
            return []
        return [f"gradients are computed {self.rows} at a time, because more need more memory"]


def forecast(settings: Settings, model: FlatModel) -> Forecast:
    """The forecast of a run; a run that cannot fit is refused."""
    replica, statistics = model.initial.nbytes, model.initial_buffers.nbytes
    workers, slots = settings.replicas, len(settings.rule.slots)
    holders = workers + settings.method.method.has_server
    data = sum(
        leaf.nbytes for part in (model.task.train, model.task.test) for leaf in leaves(part.inputs)
    )
    each = (_COPIES + (_UNDER_WAY if workers > 1 else 0)) * workers * replica
    batch = (settings.batch or 1) * settings.made_schedule.largest_multiple
    row = 2 * replica + 2 * batch * activation_bytes(model)
    total = memory_of(model.device)
    fixed = holders * (1 + slots) * replica + workers * statistics + each + data
    width = settings.width or MOST_ROWS
    most = 1 if settings.engine == "loop" else workers
    while settings.width is None and width > 1 and fixed + min(width, most) * row > _USABLE * total:
        width //= 2
    found = Forecast(
        str(model.device), total, fixed - each - data, each, data, row, width, most
    )  # fmt: skip
    if found.bytes > total:
        fewer = int(workers * max(0, total - data - row) / max(1, fixed - data))
        raise ConfigurationError(
            f"the run cannot fit into memory: {workers} workers need {found}; choose "
            + (f"at most {fewer} workers" if fewer else "a smaller model or batch")
            + ", an optimiser with less state, or --engine none for time only"
        )
    return found


@lru_cache(maxsize=8)
def activation_bytes(model: FlatModel) -> int:
    """The bytes per sample that the backward pass of a model needs of its forward pass."""
    few = min(2, len(model.task.train))  # normalisation cannot use a batch of one
    many = min(2 * few, len(model.task.train))
    try:
        # What is kept once for a whole batch, such as the parameters, is in both.
        return max(0, _saved_bytes(model, many) - _saved_bytes(model, few)) // max(1, many - few)
    except Exception:
        return 0  # what is wrong with the model will be said where it is trained


def _saved_bytes(model: FlatModel, samples: int) -> int:
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = torch.arange(samples, device=model.device)
    with drawing_from(0, model.device), torch.autograd.graph.saved_tensors_hooks(keep, _same):
        model.gradient(model.initial, model.initial_buffers, batch, 0)
    return sum(saved.values())


def _same(tensor: Tensor) -> Tensor:
    return tensor


def memory_of(device: torch.device) -> int:
    """The bytes that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shown(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
