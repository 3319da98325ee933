"""Fewer bits for each number: 16-bit floats, and whole numbers of 8, 4 and 2 bits with a scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.compression.bits import as_bytes, from_bytes, pack, packed_bytes, sections, unpack
from gossamer.compression.compressor import Compressor, MeanRound, Rounds, Stream
from gossamer.compression.values import decode_values, encode_values, value_bytes
from gossamer.errors import ConfigurationError
from gossamer.replica import Layout

_STRETCH = 1 << 18
"""So many numbers are encoded at a time: more than calls cost, and fewer than leave the cache."""


@dataclass(frozen=True)
class Half(Compressor):
    """Numbers of 16 bits. They are summed on the way, and the sums have 32 bits."""

    rounds_models = True
    dtype: ClassVar[torch.dtype]

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        return as_bytes(self._rounded(vector))

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        return from_bytes(data, self.dtype).float()

    def rounds(self, vector: Tensor, stream: Stream) -> Rounds:
        own = self._rounded(vector)
        (mean,) = yield MeanRound(own)
        return mean.float(), own.float()

    def _rounded(self, vector: Tensor) -> Tensor:
        """Beyond the range of 16 bits the largest number stands, because infinity would spread."""
        most = torch.finfo(self.dtype).max
        return (vector.clamp(-most, most) if self.dtype is torch.float16 else vector).to(self.dtype)

    def size(self, layout: Layout) -> int:
        return 2 * layout.total


@dataclass(frozen=True)
class Fp16(Half):
    """IEEE's half precision: 11 bits of precision, numbers up to 65504."""

    name = "fp16"
    dtype = torch.float16


@dataclass(frozen=True)
class Bf16(Half):
    """Brain floats: 8 bits of precision and the range of 32-bit numbers."""

    name = "bf16"
    dtype = torch.bfloat16

    def contraction(self, layout: Layout) -> float:
        return 1 - 2.0**-16


@dataclass(frozen=True)
class Blockwise(Compressor):
    """Whole numbers in blocks, each with its largest magnitude as scale."""

    width: ClassVar[int]
    block: int = field(default=128, kw_only=True)
    """So many numbers share a scale."""

    def check(self) -> None:
        if self.block < 1:
            raise ConfigurationError(f"{self.name}: block must be at least 1, got {self.block}")

    @property
    def _levels(self) -> int:
        """Above zero, and as many below."""
        return 2 ** (self.width - 1) - 1

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        count, block = vector.numel(), self.block
        blocks = -(-count // block)
        data = torch.empty(self.size(stream.layout), dtype=torch.uint8, device=vector.device)
        scales = data[: 4 * blocks].view(torch.float32)
        # On a CPU one stretch after the other, while it is in the cache.
        step = max(1, blocks)
        if vector.device.type == "cpu":
            step = min(step, 8 * max(1, _STRETCH // (8 * block)))
        scratch = torch.empty(step, block, dtype=vector.dtype, device=vector.device)
        for first in range(0, blocks, step):
            start, end = first * block, min((first + step) * block, count)
            rows = pad(vector[start:end], (0, -(end - start) % block)).view(-1, block)
            scales[first : first + step], codes = quantised(
                rows, self._levels, scratch[: len(rows)]
            )
            at = 4 * blocks + start * self.width // 8
            self._pack(codes.view(-1)[: end - start], data[at:])
        scales.div_(self._levels)
        return data

    def _pack(self, codes: Tensor, data: Tensor) -> None:
        """Eight bits hold a number with its sign; fewer hold what it is above the least one."""
        if self.width == 8:
            data[: codes.numel()].view(torch.int8).copy_(codes)
            return
        packed = pack(codes.add_(self._levels).to(torch.uint8), self.width)
        data[: packed.numel()] = packed

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        count = stream.layout.total
        blocks = -(-count // self.block)
        scales, packed = sections(data, (4 * blocks, packed_bytes(count, self.width)))
        if self.width == 8:
            codes = packed.view(torch.int8).float()
        else:
            codes = unpack(packed, self.width, count).float().sub_(self._levels)
        rows = pad(codes, (0, -count % self.block)).view(-1, self.block)
        return rows.mul_(from_bytes(scales, torch.float32).unsqueeze(1)).view(-1)[:count]

    def size(self, layout: Layout) -> int:
        return 4 * -(-layout.total // self.block) + packed_bytes(layout.total, self.width)


def quantised(rows: Tensor, levels: int, scratch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each row, and its numbers as multiples of a part of that, still in
    32 bits. A row of zeros has no scale, and stays one of zeros. The scratch is overwritten."""
    largest = torch.abs(rows, out=scratch).amax(1)
    finest = torch.where(largest > 0, levels / largest, 0.0).unsqueeze(1)
    return largest, torch.mul(rows, finest, out=scratch).round_()


@dataclass(frozen=True)
class Int8(Blockwise):
    """Whole numbers of 8 bits; blocks of 128 with their largest magnitude as scale."""

    name = "int8"
    rounds_models = True
    width = 8


@dataclass(frozen=True)
class Int4(Blockwise):
    """Whole numbers of 4 bits; blocks of 128 with their largest magnitude as scale."""

    name = "int4"
    width = 4


@dataclass(frozen=True)
class Int2(Blockwise):
    """Two bits: four bins of 1.5 standard deviations around the mean of each tensor.

    The mean of each bin is sent along. With `block` there are whole numbers instead, -1, 0 and 1
    times the largest magnitude of each block. So coarse a code needs feedback.
    """

    name = "int2"
    width = 2
    feedback: bool = field(default=True, kw_only=True)
    block: int = field(default=0, kw_only=True)
    """So many numbers share a scale; 0: bins."""

    def check(self) -> None:
        if self.block < 0:
            raise ConfigurationError(f"{self.name}: block must not be negative, got {self.block}")

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        if self.block:
            return super().encode(vector, stream)
        pieces = vector.split(list(stream.layout.sizes))
        return torch.cat([encode_values(piece, 2) for piece in pieces])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        if self.block:
            return super().decode(data, stream)
        sizes = stream.layout.sizes
        pieces = sections(data, [value_bytes(size, 2) for size in sizes])
        parts = [decode_values(own, 2, size) for own, size in zip(pieces, sizes, strict=True)]
        return torch.cat(parts)

    def size(self, layout: Layout) -> int:
        if self.block:
            return super().size(layout)
        return sum(value_bytes(size, 2) for size in layout.sizes)
