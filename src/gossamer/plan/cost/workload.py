"""The sizes of a model that decide the cost of a step, from a task or from its bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import make_optimiser
from gossamer.quantities import size_in_bytes
from gossamer.replica import cut
from gossamer.sim.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, cut_buckets, layer_costs
from gossamer.tasks import Task
from gossamer.tasks.flat_model import FlatModel


@dataclass(frozen=True)
class Piece:
    """A part of the gradient, or several equal ones that are ready at equal distances."""

    size_bytes: float
    """Of each."""
    ready_share: float
    """The share of the backward pass after which the first is ready."""
    last_share: float
    """The same for the last."""
    count: float = 1


@dataclass(frozen=True)
class Workload:
    """The sizes that decide what a step costs."""

    model_bytes: float
    pieces: tuple[Piece, ...]
    """In the order in which the backward pass finishes them."""
    tensors: tuple[int, ...]
    """The elements of each parameter, between which servers split the model; empty: anywhere."""
    costs: tuple[float, ...] = ()
    """The part of each of them in the time of the backward pass."""
    scalar_bytes: float = 4.0
    """The bytes of a single number that is sent alone."""
    optimiser_slots: int = 1
    """The vectors of the optimiser's state, such as one for momentum."""
    batch: int = 32
    samples: int = 50_000
    """The samples of one epoch."""

    def shares(self, servers: int) -> tuple[float, ...]:
        """The part of the model that each of this many servers holds."""
        if not self.tensors:
            return (1 / servers,) * servers
        total = sum(self.tensors)
        return tuple((part.stop - part.start) / total for part in cut(self.tensors, servers))

    def scaled(self, model_bytes: float) -> Workload:
        """The same layers in a model of another size."""
        return dataclasses.replace(
            self, model_bytes=model_bytes,
            pieces=pieces_of(model_bytes, self.tensors, self.costs),
            scalar_bytes=self.scalar_bytes * model_bytes / self.model_bytes,
        )  # fmt: skip


def pieces_of(
    model_bytes: float, tensors: Sequence[int], costs: Sequence[float]
) -> tuple[Piece, ...]:
    """The pieces of a gradient of so many bytes, cut at its tensors; without any, anywhere."""
    if tensors:
        per_number = model_bytes / sum(tensors)
        return tuple(
            Piece(
                (bucket.end - bucket.start) * per_number, bucket.ready_share, bucket.ready_share
            )
            for bucket in cut_buckets(tensors, costs, per_number)
        )  # fmt: skip
    if model_bytes < 2 * FIRST_BUCKET_BYTES:
        return (Piece(model_bytes, 1.0, 1.0),)
    rest = model_bytes - FIRST_BUCKET_BYTES
    full = max(0, rest // BUCKET_BYTES - 1)
    first, second, last = (
        (FIRST_BUCKET_BYTES + count * BUCKET_BYTES) / model_bytes for count in (0, 1, full)
    )
    pieces = [Piece(FIRST_BUCKET_BYTES, first, first)]
    if full:
        pieces.append(Piece(BUCKET_BYTES, second, last, full))
    pieces.append(Piece(rest - full * BUCKET_BYTES, 1.0, 1.0))
    return tuple(pieces)


def workload_of(
    task: Task, *, model_bytes: float | None = None, batch: int | None = None,
    optimiser: str | None = None,
) -> Workload:  # fmt: skip
    """The workload of a task; `model_bytes` scales its layers to a model of that size."""
    model = FlatModel(task, torch.device("cpu"), seed=0)
    element = model.initial.element_size()
    own = float(model.layout.total * element)
    size = own if model_bytes is None else _checked(model_bytes)
    costs = tuple(layer_costs(model.module, task.train.first(1)).values())
    return Workload(
        size, pieces_of(size, model.layout.sizes, costs), model.layout.sizes, costs,
        scalar_bytes=element * size / own,
        optimiser_slots=len(make_optimiser(optimiser or task.optimiser).slots),
        batch=batch or task.batch,
        samples=len(task.train),
    )  # fmt: skip


def workload_of_bytes(model_bytes: float, *, batch: int = 32, samples: int = 50_000) -> Workload:
    """The workload of a model of which only the size is known: equal layers in DDP's buckets."""
    size = _checked(model_bytes)
    return Workload(size, pieces_of(size, (), ()), (), batch=batch, samples=samples)


def asked_workload(
    task: Task | None, model_bytes: str | float | None, batch: int | None
) -> Workload:  # fmt: skip
    """That of a task or of a size, as a user gives them."""
    if batch is not None and batch < 1:
        raise ConfigurationError(f"batch must be at least 1, got {batch}")
    size = None if model_bytes is None else size_in_bytes(model_bytes, "--model-bytes")
    if task is not None:
        return workload_of(task, model_bytes=size, batch=batch)
    if size is None:
        raise ConfigurationError("--task none leaves the size open; give it with --model-bytes")
    return workload_of_bytes(size, batch=batch or 32)


def _checked(model_bytes: float) -> float:
    if not 0 < model_bytes < float("inf"):
        raise ConfigurationError(f"model bytes must be a finite number above 0, got {model_bytes}")
    return float(model_bytes)
