"""Small whole numbers packed into bytes, and values of several kinds in one row of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack(codes: Tensor, width: int) -> Tensor:
    """Numbers below 2^width, one after the other, first bit first; the last byte is filled up."""
    if 8 % width == 0:
        each = 8 // width
        rows = pad(codes.to(torch.uint8), (0, -codes.numel() % each)).view(-1, each)
        packed = rows[:, 0].clone()
        for place in range(1, each):
            packed.bitwise_or_(rows[:, place] << (width * place))
        return packed
    if width == 12:
        # The usual width of a place in a chunk: two numbers in three bytes.
        pairs = pad(codes.to(torch.int32), (0, codes.numel() % 2)).view(-1, 2)
        both = pairs[:, 0] | (pairs[:, 1] << 12)
        parts = [both & 255, (both >> 8) & 255, both >> 16]
        return torch.stack(parts, 1).to(torch.uint8).view(-1)[: packed_bytes(codes.numel(), 12)]
    each = torch.arange(width, device=codes.device)
    flat = ((codes.to(torch.int64).unsqueeze(1) >> each) & 1).to(torch.uint8).view(-1)
    return pack(flat, 1)


def unpack(data: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack`, as int64 if the numbers do not fit into a byte."""
    if 8 % width == 0:
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
        return ((data.unsqueeze(1) >> shifts) & (2**width - 1)).view(-1)[:count]
    if width == 12:
        wide = pad(data, (0, -data.numel() % 3)).view(-1, 3).to(torch.int32)
        both = wide[:, 0] | (wide[:, 1] << 8) | (wide[:, 2] << 16)
        return torch.stack([both & 4095, both >> 12], 1).view(-1)[:count].to(torch.int64)
    each = torch.arange(width, device=data.device)
    flat = unpack(data, 1, width * count).view(count, width).to(torch.int64)
    return (flat << each).sum(1)


def packed_bytes(count: int, width: int) -> int:
    return -(-count * width // 8)


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of values, flat."""
    return values.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `as_bytes`; bytes that do not lie on a whole number are copied."""
    size = torch.empty((), dtype=dtype, device="meta").element_size()
    if data.storage_offset() % size or data.stride() != (1,):
        data = data.clone()
    return data.view(dtype)


def sections(data: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The bytes cut into ranges of these sizes."""
    return data.split(list(sizes))
