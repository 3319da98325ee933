"""The arithmetic of the methods as pure functions of tensors. No state, no clock, no messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 1 << 16
"""So many elements that several blocks of this size fit into the nearest caches."""


def pair_delta(mine: Tensor, theirs: Tensor) -> Tensor:
    """(theirs - mine) / 2: each end of a pair adds its own, so that the sum is kept."""
    return (theirs - mine).mul_(0.5)


def elastic_pull(mine: Tensor, centre: Tensor, alpha: float) -> Tensor:
    """e = alpha (x - centre): the worker subtracts it, the centre adds it."""
    return (mine - centre).mul_(alpha)


def delay_compensated(gradient: Tensor, drift: Tensor, scale: float | Tensor) -> Tensor:
    """g + lambda g g (w - w_bak): a first-order correction for the drift since g's point."""
    return gradient + scale * gradient * gradient * drift


def weighted_sum(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """sum_j W_ij x_j in the order given, so that equal inputs give equal bits."""
    first_weight, first = parts[0]
    total = first * first_weight
    for weight, value in parts[1:]:
        total.add_(value, alpha=weight)
    return total


def mean_of_models(values: Tensor, weights: Sequence[float]) -> Tensor:
    """The mean over rows. That of push-sum is the sum of numerators over the sum of weights; the
    weights of all other methods are 1."""
    mean, total = values.mean(0), sum(weights)
    if total != len(values):
        return mean.mul_(len(values) / total)
    # If all are equal the mean is exactly their value; a third of three times x need not be x.
    return torch.where((values == values[0]).all(0), values[0], mean)


def mean_in_order(values: Sequence[Tensor]) -> Tensor:
    """The mean, added first to last: everyone who adds in this order gets the same bits."""
    if len(values) == 1:
        return values[0]
    mean = torch.empty_like(values[0])
    mean_into(mean, values, len(values))
    return mean


def mean_into(target: Tensor, values: Sequence[Tensor], divisor: float) -> None:
    """Write the sum of the values, added first to last and divided by `divisor`, into `target`.

    This works block by block, so that a sum is still in the cache when it is added to and divided.
    Every number of a block is written once, at the end, so `target` may be one of the values. Sums
    of numbers with 16 bits have 32.
    """
    if target.dtype in (torch.float16, torch.bfloat16) and len(values) > 1:
        total = values[0].float()
        for value in values[1:]:
            total.add_(value)
        target.copy_(total.div_(divisor))
        return
    passes = len(values) - (divisor == 1)
    is_blocked = passes > 1 and target.numel() > _BLOCK and target.device.type == "cpu"
    if is_blocked and all(one.is_contiguous() for one in (target, *values)):
        flat = [value.view(-1) for value in values]
        for start in range(0, target.numel(), _BLOCK):
            block = slice(start, start + _BLOCK)
            mean_into(target.view(-1)[block], [value[block] for value in flat], divisor)
        return
    total = values[0]
    for number, value in enumerate(values[1:-1]):
        total = total.add_(value) if number else total + value
    if len(values) > 1:
        total = torch.add(total, values[-1], out=target) if divisor == 1 else total + values[-1]
    if divisor != 1:
        torch.div(total, divisor, out=target)
    elif total is not target:
        target.copy_(total)


def pair_growth(momentum: float, rate: float, workers: int) -> float:
    """How many times NoLoCo's disagreement without gradients grows in a round, in the mean square.

    In a random pairing x goes to its pair's mean P x, and E |x - P x|^2 = r |x|^2 for x without a
    common part, with r = p / (2 (p - 1)), or 1/2 for odd p. So the means of |x|^2, of x v and of
    |v|^2 obey a linear recursion, whose spectral radius this is.
    """
    if workers < 3:
        return momentum  # one pair agrees at once
    a, b = momentum, rate
    r = 0.5 if workers % 2 else workers / (2 * (workers - 1))
    v_from_x, v_from_xv = b * b * r, -2 * a * b * r
    rows = [
        [1 - 2 * b * r + v_from_x, 2 * a + v_from_xv, a * a],
        [v_from_x - b * r, a + v_from_xv, a * a],
        [v_from_x, v_from_xv, a * a],
    ]
    return float(torch.linalg.eigvals(torch.tensor(rows, dtype=torch.float64)).abs().max())


def radial_mean(
    ways: Sequence[Tensor], weights: Sequence[float], sizes: Sequence[int]
) -> Tensor:  # fmt: skip
    """Decoupled DiLoCo's merge: of each tensor the weighted mean of lengths, along the weighted
    mean of directions. A mean is shorter than its parts by about the root of their number; this is
    not. Where the directions cancel it is the plain weighted mean.
    """
    if ways[0].is_meta:  # a run without values, which knows no lengths
        return torch.empty_like(ways[0])
    total = sum(weights)
    merged: list[Tensor] = []
    for pieces in zip(*(way.split(list(sizes)) for way in ways), strict=True):
        lengths = [float(piece.norm()) for piece in pieces]
        radius = sum(w * length for w, length in zip(weights, lengths, strict=True)) / total
        mean = weighted_sum([(w / total, piece) for w, piece in zip(weights, pieces, strict=True)])
        turned = [
            (w / length / total, piece)
            for w, length, piece in zip(weights, lengths, pieces, strict=True)
            if length > 0
        ]
        direction = weighted_sum(turned) if turned else mean
        size = float(direction.norm())
        merged.append(direction * (radius / size) if size > 1e-6 else mean)
    return torch.cat(merged)


def join_buckets(buckets: Sequence[Tensor]) -> Tensor:
    """The flat gradient from its buckets, which backward finishes last layer first."""
    return buckets[0] if len(buckets) == 1 else torch.cat(list(reversed(buckets)))


@dataclass
class OuterOptimiser:
    """One outer step on (start - mean of the workers): local SGD, BMUF, SlowMo, DiLoCo.

    velocity <- momentum * velocity + pseudo-gradient
    start    <- start - rate * direction,  direction = velocity, or with Nesterov's look-ahead
                                           pseudo-gradient + momentum * velocity
    (rate, momentum): local SGD (1, 0); BMUF (1, 1 - 1/N); SlowMo (1, 0.5), its pseudo-gradient
    divided by the inner rate; DiLoCo (0.7, 0.9) with Nesterov.
    """

    rate: float
    momentum: float
    nesterov: bool = False
    velocity: Tensor | None = None

    def step(self, start: Tensor, mean: Tensor, inner_rate: float | None = None) -> Tensor:
        """The new start of all workers. `inner_rate` is for SlowMo's division by the rate."""
        if self.rate == 1.0 and self.momentum == 0.0:
            return mean
        pseudo = start - mean
        if inner_rate is not None:
            pseudo.div_(inner_rate)
        if self.velocity is None:
            self.velocity = torch.zeros_like(pseudo)
        self.velocity.mul_(self.momentum).add_(pseudo)
        direction = self.velocity
        if self.nesterov:
            direction = pseudo.add_(self.velocity, alpha=self.momentum)
        scale = self.rate if inner_rate is None else self.rate * inner_rate
        return start.sub(direction, alpha=scale)


@dataclass
class DelayedNesterov:
    """Outer steps on displacements that arrive one by one (Liu et al. 2024), D / N of each at once.

    The N-th arrival of a round also renews the momentum, m <- beta m + (the sum of the N) / N. Of
    beta m each of the others applies the part `early`, and the N-th the rest, so a round applies it
    once. With N = 1 this is Nesterov's step.
    """

    memory: dict[str, Tensor]
    """Keeps `velocity`, and the `sum` and number of those that `arrived` in this round."""
    rate: float
    momentum: float
    early: float = 0.0

    def step(self, way: Tensor, workers: int) -> Tensor:
        """How far to go along this displacement, with so many workers."""
        memory = self.memory
        velocity = memory.setdefault("velocity", torch.zeros_like(way))
        total = memory.setdefault("sum", torch.zeros_like(way)).add_(way)
        arrived = memory.setdefault("arrived", torch.tensor(0)).add_(1)
        share, early = 1 / workers, min(self.early, 1 / workers)
        if int(arrived) >= workers:
            velocity.mul_(self.momentum).add_(total, alpha=share)
            total.zero_()
            arrived.zero_()
            early = 1 - workers * early + early
        return (way * share).add_(velocity, alpha=early * self.momentum).mul_(self.rate)
