"""Means of vectors in shared memory, in one order for everybody."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.real.transport import Scattered

_BLOCK = 1 << 18


def whole(value: Tensor | Scattered) -> Tensor:
    if not isinstance(value, Scattered):
        return value.detach().clone()
    whole = torch.empty(value.count, dtype=value.kind, device=value.home)
    value.write_into(value.cut(whole), 1.0)
    return whole


def mean_of_range(
    values: Sequence[Tensor], result: Tensor, start: int, end: int, divisor: float
) -> None:
    mean([value[start:end] for value in values], result[start:end], divisor)


def mean(values: Sequence[Tensor], result: Tensor, divisor: float) -> None:
    """`rules.mean_in_order`, block by block: the sum is still in the cache to divide."""
    if result.numel() > _BLOCK:
        flat = [value.view(-1) for value in values]
        for at in range(0, result.numel(), _BLOCK):
            block = slice(at, at + _BLOCK)
            mean([value[block] for value in flat], result.view(-1)[block], divisor)
        return
    if len(values) == 1:
        result.copy_(values[0])
    else:
        torch.add(values[0], values[1], out=result)
    for value in values[2:]:
        result.add_(value)
    if divisor != 1.0:
        result.div_(divisor)
