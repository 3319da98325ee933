"""The pieces in which a gradient becomes available during the backward pass, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.replica import trainable
from gossamer.tasks.data import Data, call, device_of
from gossamer.tasks.flat_model import drawing_from


@dataclass(frozen=True)
class Bucket:
    """A slice of the flat gradient, ready after this share of the backward time."""

    start: int
    end: int
    ready_share: float


def layer_costs(model: nn.Module, sample: Tensor | Data) -> dict[str, float]:
    """Multiplications per sample of each parameter: its size times the number of its uses."""
    costs = {name: float(tensor.numel()) for name, tensor in trainable(model)}
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def measure(prefix: str, module: nn.Module) -> None:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            own = [name for name in costs if name.rpartition(".")[0] == prefix]
            if isinstance(output, Tensor) and own and output.dim() > 2:
                channels = max(
                    module.get_parameter(name.rpartition(".")[2]).shape[0] for name in own
                )
                places = output[0].numel() / max(1, channels)
                for name in own:
                    costs[name] *= max(1.0, places)

        handles.append(module.register_forward_hook(hook))

    for prefix, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            measure(prefix, module)
    was_training = model.training
    model.eval()
    with torch.no_grad(), drawing_from(0, device_of(sample)):
        call(model, sample)
    model.train(was_training)
    for handle in handles:
        handle.remove()
    return costs


FIRST_BUCKET_BYTES = 1_000_000
BUCKET_BYTES = 25_000_000
"""PyTorch's defaults. Small models travel in one piece, because every piece pays the latency."""


def make_buckets(
    model: nn.Module, sample: Tensor | Data, byte_scale: float = 1.0
) -> tuple[Bucket, ...]:
    """Pieces cut at parameter boundaries, last layer first as in the backward pass."""
    named = trainable(model)
    costs = layer_costs(model, sample)
    sizes = [tensor.numel() for _, tensor in named]
    element_size = named[0][1].element_size() if named else 1
    return cut_buckets(sizes, [costs[name] for name, _ in named], element_size * byte_scale)


def cut_buckets(
    sizes: Sequence[int], costs: Sequence[float], bytes_per_number: float
) -> tuple[Bucket, ...]:
    """For parameters of these sizes, each of which has that part in the cost of backward."""
    total_cost = sum(costs)
    buckets: list[Bucket] = []
    end = at = sum(sizes)
    done = 0.0
    for size, cost in zip(reversed(sizes), reversed(costs), strict=True):
        at -= size
        done += cost
        full = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
        if (end - at) * bytes_per_number >= full or at == 0:
            buckets.append(Bucket(at, end, done / total_cost))
            end = at
    return tuple(buckets)
