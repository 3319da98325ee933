"""Means of vectors in shared memory, in one order for everybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.real.transports.transport import Scattered

_BLOCK = 1 << 18
_NEAR = 1 << 16
"""Elements that stay in the nearest caches."""


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


def mean_at_once(values: Sequence[Tensor], result: Tensor, divisor: float) -> None:
    """The same bits, of which none is written to the result before it is the last: others may be
    reading there what somebody else has made of the same values, or be making it."""
    own = result.new_empty(min(result.numel(), _NEAR))
    for at in range(0, result.numel(), _NEAR):
        block = slice(at, min(at + _NEAR, result.numel()))
        total, *others = [value[block] for value in values]
        target = result[block]
        near = own[: len(target)]
        for number, other in enumerate(others, start=1):
            is_last = number == len(others) and divisor == 1.0
            total = torch.add(total, other, out=target if is_last else near)
        if divisor != 1.0:
            torch.div(total, divisor, out=target)
        elif not others:
            target.copy_(total)


def add_other_half(places: Sequence[Tensor], halves: Sequence[Tensor]) -> None:
    """To this process's own pieces, which are nearer than what it posted of them. Halving is exact
    (but below 1e-37) and two add up the same in either order: both get the same bits."""
    if places[0].is_cuda:
        together = cast(Any, torch)
        together._foreach_mul_(places, 0.5)
        # The other's may have gone through main memory.
        together._foreach_add_(places, [half.to(places[0].device) for half in halves])
        return
    for place, half in zip(places, halves, strict=True):
        torch.add(half, place, alpha=0.5, out=place)
