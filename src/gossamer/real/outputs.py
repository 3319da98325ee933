"""The model that a method declares as its output, from what the workers and servers hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.payload import payload


@payload
@dataclass(frozen=True, slots=True)
class Output:
    """What one end contributes: its value, its push-sum weight, its BatchNorm statistics."""

    value: Tensor
    weight: float
    buffers: Tensor


def combined(output: str, workers: Sequence[Output], servers: Sequence[Output]) -> Output:
    """Everyone who combines the same contributions gets the same bits."""
    buffers = torch.stack([one.buffers for one in workers]).mean(0)
    if servers and output in ("centre", "server", "moving average"):
        return Output(torch.cat([server.value for server in servers]), 1.0, buffers)
    return Output(mean_of([w.value for w in workers], [w.weight for w in workers]), 1.0, buffers)


def mean_of(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Push-sum's mean is sum of numerators over sum of weights; every other weight is 1."""
    total = sum(weights)
    if len(values) == 1 and total == 1.0:
        return values[0].clone()
    mean = torch.stack(list(values)).mean(0)
    return mean.mul_(len(values) / total) if total != len(values) else mean
