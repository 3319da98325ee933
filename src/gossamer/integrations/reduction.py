"""What a framework asks of all its processes together, over coupled workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.real.join.joined_worker import JoinedWorker

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.mean(0),
    "avg": lambda values: values.mean(0),
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


def opened(worker: JoinedWorker | None) -> JoinedWorker | None:
    """The worker, while it is coupled."""
    return worker if worker is not None and worker.is_open else None


def reduced(worker: JoinedWorker, value: Any, reduction: object, name: str) -> Any:
    """A number or a tensor of all workers, by the name that torch and the frameworks give to the
    reduction; with an asynchronous method, of what the living last gave under this name."""
    wanted = str(reduction).rpartition(".")[2].lower()  # also ReduceOp.SUM
    if wanted not in _REDUCTIONS:
        raise ConfigurationError(
            f"coupled workers cannot reduce a value by {reduction!r}; use one of "
            f"{', '.join(_REDUCTIONS)}"
        )
    given = [torch.as_tensor(one) for one in worker.gather(value, name=name)]
    values = torch.stack(given)
    if wanted in ("mean", "avg") and not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    return _REDUCTIONS[wanted](values)
