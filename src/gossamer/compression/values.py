"""The values of sparse messages in fewer bits: 16-bit floats, scaled whole numbers, bins."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.compression.bits import as_bytes, from_bytes, pack, packed_bytes, unpack

_BINS = 4
_SPREAD = 1.5
"""A bin of two bits is so many standard deviations wide."""


def encode_values(values: Tensor, bits: int) -> Tensor:
    """The bytes of these values; `value_bytes` says how many."""
    if bits == 32:
        return as_bytes(values)
    if bits == 16:
        return as_bytes(values.bfloat16())
    if bits == 2:
        return _into_bins(values)
    most = 2 ** (bits - 1) - 1
    scale = values.abs().amax().div(most).reshape(1)
    steps = values / torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.cat([as_bytes(scale), pack(steps.round_().add_(most).to(torch.uint8), bits)])


def decode_values(data: Tensor, bits: int, count: int) -> Tensor:
    if bits == 32:
        return from_bytes(data, torch.float32)
    if bits == 16:
        return from_bytes(data, torch.bfloat16).float()
    if bits == 2:
        means = from_bytes(data[: 4 * _BINS], torch.float32)
        return means.index_select(0, unpack(data[4 * _BINS :], 2, count).to(torch.int32))
    codes = unpack(data[4:], bits, count).float().sub_(2 ** (bits - 1) - 1)
    return codes.mul_(from_bytes(data[:4], torch.float32))


def value_bytes(count: int, bits: int) -> int:
    tables = {2: 4 * _BINS, 4: 4, 8: 4}
    return packed_bytes(count, bits) + tables.get(bits, 0)


def _into_bins(values: Tensor) -> Tensor:
    """Four bins around the mean, 1.5 standard deviations wide; the means of the bins are sent."""
    mean = values.mean()
    width = (values - mean).square().mean().sqrt().mul(_SPREAD)
    above = [values >= mean + width * edge for edge in (-1, 0, 1)]
    codes = above[0].to(torch.uint8).add_(above[1]).add_(above[2])
    # Of what is above each edge, and of all: the bins are the differences.
    one = torch.ones((), dtype=values.dtype, device=values.device)
    counts = [one * values.numel(), *[edge.sum() for edge in above], one * 0]
    sums = [values.sum(), *[values.mul(edge).sum() for edge in above], one * 0]
    means = [
        (sums[at] - sums[at + 1]) / (counts[at] - counts[at + 1]).clamp(min=1)
        for at in range(_BINS)
    ]
    return torch.cat([as_bytes(torch.stack(means)), pack(codes, 2)])
