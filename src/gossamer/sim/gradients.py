"""Started gradients, computed lazily and together.

A gradient that was started is fixed: it depends only on the point and the batch taken at its
start. So nothing is computed until the first result is needed; then everything outstanding is
evaluated in one call. Asynchronous runs batch nearly as well as synchronous ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.pending import Pending
from gossamer.sim.engine import Engine
from gossamer.sim.replica_matrix import Point, ReplicaStore

Batch = NDArray[np.int64]


class Request:
    """One started gradient."""

    __slots__ = (
        "batch", "delivery", "gradient", "key", "loss", "paused_ns", "point", "read", "statistics",
        "worker",
    )  # fmt: skip

    def __init__(self, worker: int, point: Point, batch: Batch, key: int) -> None:
        self.worker = worker
        self.point = point
        self.batch = batch
        self.key = key
        self.delivery: Pending[Tensor] = Pending("gradient")
        """What the worker awaits; set by the worker."""
        self.paused_ns = 0
        """How much later than planned it will be there, because its worker was paused."""
        self.read: tuple[int, int] = (0, 0)
        """When its point was read; see `Updates`."""
        self.gradient: Tensor | None = None
        self.loss: Tensor | None = None
        self.statistics: Tensor | None = None


class GradientDesk:
    """Takes requests, evaluates all outstanding ones when the first is needed."""

    def __init__(self, engine: Engine, store: ReplicaStore, buffers: Tensor) -> None:
        self.buffers = buffers
        """BatchNorm statistics, one row per worker."""
        self.evaluations = 0
        self.rows_evaluated = 0
        self._engine = engine
        self._store = store
        self._outstanding: dict[Request, None] = {}

    @property
    def mean_width(self) -> float:
        return self.rows_evaluated / self.evaluations if self.evaluations else 0.0

    def start(self, request: Request) -> None:
        self._outstanding[request] = None

    def abort(self, request: Request) -> None:
        """Its worker died: discarded without trace."""
        self._outstanding.pop(request, None)
        self._store.forget(request.point)

    def deliver(self, request: Request) -> Tensor:
        """The gradient; statistics of its batch take effect now, not when it was evaluated."""
        if request.gradient is None:
            self._evaluate()
        assert request.gradient is not None
        if request.statistics is not None and self.buffers.shape[1]:
            self.buffers[request.worker] = request.statistics
        return request.gradient

    def _evaluate(self) -> None:
        requests = list(self._outstanding)
        self._outstanding.clear()
        sizes = sorted({len(request.batch) for request in requests})
        for size in sizes:
            self._evaluate_group([r for r in requests if len(r.batch) == size])

    def _evaluate_group(self, requests: Sequence[Request]) -> None:
        self.evaluations += 1
        self.rows_evaluated += len(requests)
        # In order of rank, so that the rows of equal workers can be used where they lie.
        ordered = sorted(requests, key=lambda request: request.worker)
        points = self._store.stacked([request.point for request in ordered])
        device = points.device
        batches = torch.from_numpy(np.stack([request.batch for request in ordered])).to(device)
        keys = torch.tensor([request.key for request in ordered], device=device)
        workers = torch.tensor([request.worker for request in ordered], device=device)
        result = self._engine.evaluate(points, self.buffers[workers], batches, keys)
        for row, request in enumerate(ordered):
            request.gradient = result.gradients[row]
            request.loss = result.losses[row]
            request.statistics = result.buffers[row]
            self._store.forget(request.point)
