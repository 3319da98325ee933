"""The model that a method declares as its output, from what the workers and servers hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer.payload import payload
from gossamer.real.replicas import PublishedReplica
from gossamer.rules import mean_of_models
from gossamer.tasks.evaluator import best_of, output_parameters


@payload
@dataclass(frozen=True, slots=True)
class Contribution:
    """What a worker or a server contributes: value, push-sum weight, BatchNorm statistics."""

    value: Tensor
    weight: float
    buffers: Tensor
    counters: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """Buffers that no mean can be made of, as bytes."""
    score: float = math.inf
    """What the model is worth, less being better, where the output is the best worker's."""

    @staticmethod
    def of_server(replica: PublishedReplica) -> Contribution:
        value = replica.snapshot() if replica.output is None else replica.output
        return Contribution(value, 1.0, torch.empty(0))


def combined(
    output: str, workers: Sequence[Contribution], servers: Sequence[Contribution]
) -> Contribution:
    """The output model and its buffers, from what all workers and servers contribute."""
    if output == "best":
        best = workers[best_of([w.score for w in workers])]
        return Contribution(best.value.cpu(), 1.0, best.buffers.cpu(), best.counters)
    value = output_parameters(
        output, _stacked([w.value for w in workers]), [w.weight for w in workers],
        [server.value.cpu() for server in servers],
    )  # fmt: skip
    buffers = mean_of_models(_stacked([w.buffers for w in workers]), [1.0] * len(workers))
    counters = workers[0].counters  # those of one worker for all, as DDP has it
    return Contribution(value, 1.0, buffers, counters)


def _stacked(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([value.cpu() for value in values])


# ---------------------------------------------------------------------- what is not trained


@dataclass(frozen=True, slots=True)
class Untrained:
    """A copy of a model's buffers."""

    statistics: Tensor
    """The buffers whose mean makes sense, such as BatchNorm's statistics, as one vector."""
    counters: Tensor
    """The other buffers, as bytes."""

    @staticmethod
    def of(model: nn.Module) -> Untrained:
        flat = [b.detach().reshape(-1).to("cpu", copy=True) for b in _statistics(model)]
        return Untrained(torch.cat(flat) if flat else torch.empty(0), pack_bytes(_counters(model)))

    def load(self, model: nn.Module) -> None:
        at = 0
        for buffer in _statistics(model):
            buffer.detach().copy_(self.statistics[at : at + buffer.numel()].view_as(buffer))
            at += buffer.numel()
        unpack_bytes_(_counters(model), self.counters)


def _statistics(model: nn.Module) -> list[Tensor]:
    return [b for b in model.buffers() if b.is_floating_point() and not _is_expanded(b)]


def _counters(model: nn.Module) -> list[Tensor]:
    others = [b.detach() for b in model.buffers() if not b.is_floating_point()]
    return [buffer for buffer in others if not _is_expanded(buffer)]


def untrained(model: nn.Module) -> list[Tensor]:
    """Frozen parameters and buffers. No method moves them, so they must agree from the start."""
    frozen = [p.detach() for p in model.parameters() if not p.requires_grad]
    tensors = [*frozen, *(buffer.detach() for buffer in model.buffers())]
    return [tensor for tensor in tensors if not _is_expanded(tensor)]


def _is_expanded(tensor: Tensor) -> bool:
    """Whether one number stands for several, so that nothing can be written there."""
    return any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def pack_bytes(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors of any types as one vector of bytes."""
    flat = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def unpack_bytes_(tensors: Iterable[Tensor], packed: Tensor) -> None:
    """The inverse, into tensors of the same shapes and types."""
    at = 0
    for tensor in tensors:
        length = tensor.numel() * tensor.element_size()
        # A copy begins at an address that is aligned for every type.
        value = packed[at : at + length].clone().view(tensor.dtype)
        tensor.copy_(value.view(tensor.shape))
        at += length
