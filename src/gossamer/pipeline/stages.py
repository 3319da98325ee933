"""Which parts of a model stand on which machine, and what they compute, hold and send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from gossamer.errors import ConfigurationError
from gossamer.pipeline.chain import Part, chain_of
from gossamer.replica import trainable


@dataclass(frozen=True)
class PartCost:
    """What one part of the chain costs for one sample."""

    name: str
    slices: tuple[slice, ...]
    """Its parameters' places in the flat vector."""
    work: float
    """Operations of the forward pass."""
    sends: float
    """Bytes of its result."""
    holds: float
    """Bytes that the backward pass needs again, besides the parameters."""
    reductions: int

    @property
    def parameters(self) -> int:
        return sum(one.stop - one.start for one in self.slices)


@dataclass(frozen=True)
class StageCut:
    """A chain of parts in consecutive chunks, one after the other."""

    chunks: tuple[tuple[PartCost, ...], ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the whole work that each chunk has."""
        work = [sum(part.work for part in chunk) for chunk in self.chunks]
        return tuple(one / sum(work) for one in work)

    def slices(self, chunk: int) -> tuple[slice, ...]:
        """The ranges of the flat vector that a chunk holds, those that touch as one."""
        joined: list[slice] = []
        for one in sorted((s for part in self.chunks[chunk] for s in part.slices), key=_start):
            if joined and joined[-1].stop == one.start:
                joined[-1] = slice(joined[-1].start, one.stop)
            else:
                joined.append(one)
        return tuple(joined)

    @property
    def in_order(self) -> tuple[slice, ...]:
        """One range of the flat vector for each chunk, in order; empty where that is not so."""
        ranges = [self.slices(chunk) for chunk in range(len(self.chunks))]
        if any(len(own) != 1 for own in ranges):
            return ()
        found = tuple(own[0] for own in ranges)
        return found if all(a.stop == b.start for a, b in pairwise(found)) else ()

    def parameters(self, chunk: int) -> int:
        return sum(part.parameters for part in self.chunks[chunk])

    def sends(self, chunk: int) -> float:
        """Bytes for each sample that the next chunk gets, and that come back as a gradient."""
        return self.chunks[chunk][-1].sends

    def holds(self, chunk: int) -> float:
        """Bytes of activations for each sample."""
        return sum(part.holds for part in self.chunks[chunk])

    def reduced(self, chunk: int) -> tuple[float, ...]:
        """Bytes for each sample of every sum over the machines that hold a layer together."""
        return tuple(part.sends for part in self.chunks[chunk] for _ in range(part.reductions))


def _start(one: slice) -> int:
    return one.start


def cut_model(model: nn.Module, sample: Tensor, chunks: int, given: Sequence[int] = ()) -> StageCut:
    """Cut a model so that the largest chunk has as little work as possible, or at `given` parts:
    the numbers of those with which the second chunk and the later ones begin."""
    costs = part_costs(model, sample)
    bounds = [0, *given, len(costs)] if given else cut_bounds([part.work for part in costs], chunks)
    what = f"{type(model).__name__} with {len(costs)} parts"
    if given and len(given) != chunks - 1:
        raise ConfigurationError(
            f"{what} is to be cut into {chunks} chunks, which needs {chunks - 1} numbers of parts "
            f"in cut=, got {len(given)}"
        )
    if any(end <= start for start, end in pairwise(bounds)):
        raise ConfigurationError(
            f"{what} cannot be cut into {chunks} chunks"
            + (f" at {'/'.join(map(str, given))}" if given else "; ask for fewer stages")
        )
    return StageCut(tuple(tuple(costs[start:end]) for start, end in pairwise(bounds)))


def part_costs(model: nn.Module, sample: Tensor) -> list[PartCost]:
    """Measure every part of a model's chain, with a batch as it enters the model."""
    parts = chain_of(model)
    places = _places(model, parts)
    was_training = model.training
    model.train()
    count = len(sample)
    found: list[PartCost] = []
    value: Any = sample
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        for part, own in zip(parts, places, strict=True):
            saved: dict[int, int] = {}

            def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
                saved[tensor.untyped_storage().data_ptr()] = tensor.nbytes
                return tensor

            with (
                FlopCounterMode(display=False) as flops,
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            ):
                value = part.run(value)
            weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            size = sum(leaf.numel() for leaf in leaves)
            found.append(
                PartCost(
                    part.name, own, (flops.get_total_flops() + size) / count,
                    sum(leaf.nbytes for leaf in leaves) / count,
                    sum(size for place, size in saved.items() if place not in weights) / count,
                    part.reductions,
                )
            )  # fmt: skip
            value = _detached(value)
    finally:
        model.train(was_training)
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    return found


def _detached(value: Any) -> Any:
    return (
        value.detach().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )


def _places(model: nn.Module, parts: Sequence[Part]) -> list[tuple[slice, ...]]:
    """The range of each parameter in the flat vector, for the part that owns it."""
    named = trainable(model)
    ends = list(accumulate(tensor.numel() for _, tensor in named))
    ranges = {name: slice(end - p.numel(), end) for (name, p), end in zip(named, ends, strict=True)}
    owner: dict[str, str] = {}
    found: list[tuple[slice, ...]] = []
    for part in parts:
        own = [
            name for name in ranges
            if any(name == prefix or name.startswith(prefix + ".") for prefix in part.owns)
        ]  # fmt: skip
        for name in own:
            if name in owner:
                raise ConfigurationError(
                    f"{type(model).__name__} cannot be cut into stages, because {owner[name]} and "
                    f"{part.name} share the parameter {name}"
                )
            owner[name] = part.name
        found.append(tuple(ranges[name] for name in own))
    missing = [name for name in ranges if name not in owner]
    if missing:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be cut into stages, because no part of its chain owns "
            f"the parameter {missing[0]}"
        )
    return found


def cut_bounds(work: Sequence[float], chunks: int) -> list[int]:
    """Where consecutive chunks begin and end so that the largest is as small as possible, and of
    those cuts one whose chunks are about equal (a small sum of squares)."""
    if chunks > len(work):
        return [0] * (chunks + 1)
    total = [0.0, *accumulate(work)]
    best = [((one, one * one), 0) for one in total]
    """For the first so many parts: the largest chunk, the sum of squares, and the last cut."""
    cuts: list[list[int]] = []
    for used in range(1, chunks):
        row = [((float("inf"), 0.0), 0)] * len(total)
        for end in range(used + 1, len(total)):
            row[end] = min(
                ((max(best[at][0][0], last), best[at][0][1] + last * last), at)
                for at in range(used, end)
                for last in (total[end] - total[at],)
            )
        best = row
        cuts.append([at for _, at in row])
    bounds = [len(work)]
    for row in reversed(cuts):
        bounds.append(row[bounds[-1]])
    return [0, *reversed(bounds)]
