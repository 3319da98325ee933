"""Rounding at random, so that the expectation of what is decoded is the vector itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.compression.bits import as_bytes, from_bytes, pack, packed_bytes, sections, unpack
from gossamer.compression.compressor import Compressor, Stream
from gossamer.errors import ConfigurationError
from gossamer.replica import Layout


@dataclass(frozen=True)
class Qsgd(Compressor):
    """Alistarh et al. 2017: in buckets, |v| sign(v_k) times a level of `levels`, drawn up or down.

    The variance is at most min(n / s^2, sqrt(n) / s) |v|^2 for buckets of n and s levels. A level
    takes as many whole bits as 2 s + 1 values need.
    """

    name = "qsgd"
    down: bool = field(default=False, kw_only=True)
    levels: int = field(default=7, kw_only=True)
    bucket: int = field(default=512, kw_only=True)

    def check(self) -> None:
        if not 1 <= self.levels <= 32767:
            raise ConfigurationError(
                f"{self.name}: levels must be between 1 and 32767, got {self.levels}"
            )
        if self.bucket < 1:
            raise ConfigurationError(f"{self.name}: bucket must be at least 1, got {self.bucket}")

    @property
    def overshoots(self) -> bool:
        return min(self.bucket / self.levels**2, self.bucket**0.5 / self.levels) >= 1

    @property
    def width(self) -> int:
        """Bits of a number."""
        return (2 * self.levels).bit_length()

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        rows = pad(vector, (0, -vector.numel() % self.bucket)).view(-1, self.bucket)
        norms = rows.square().sum(1).sqrt()
        scales = torch.where(norms > 0, norms, torch.ones_like(norms)).unsqueeze(1)
        steps = rows.abs() / scales * self.levels
        low = steps.floor()
        drawn = low + (stream.uniform(rows) < steps - low)
        codes = (drawn.clamp_(max=self.levels) * rows.sign() + self.levels).to(torch.int32)
        return torch.cat([as_bytes(norms), pack(codes.view(-1)[: vector.numel()], self.width)])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        count = stream.layout.total
        buckets = -(-count // self.bucket)
        norms, packed = sections(data, (4 * buckets, packed_bytes(count, self.width)))
        codes = unpack(packed, self.width, count).float().sub_(self.levels).div_(self.levels)
        rows = pad(codes, (0, -count % self.bucket)).view(-1, self.bucket)
        return rows.mul_(from_bytes(norms, torch.float32).unsqueeze(1)).view(-1)[:count]

    def size(self, layout: Layout) -> int:
        return 4 * -(-layout.total // self.bucket) + packed_bytes(layout.total, self.width)


@dataclass(frozen=True)
class Natural(Compressor):
    """Horváth et al. 2019: to one of the two nearest powers of two, at random.

    A sign and an exponent of 8 bits; the variance is at most |v|^2 / 8. What is below the smallest
    normal number becomes zero.
    """

    name = "natural"

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        # The bits of a 32-bit number: a sign, 8 of the exponent, 23 of the fraction, which is the
        # probability of going up.
        bits = vector.contiguous().view(torch.int32)
        exponent = (bits >> 23) & 255
        fraction = (bits & 0x7FFFFF).float() / (1 << 23)
        up = (stream.uniform(vector) < fraction) & (exponent > 0)
        raised = (exponent + up).clamp(max=254)
        return torch.cat([raised.to(torch.uint8), pack(bits < 0, 1)])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        count = stream.layout.total
        exponents, packed = sections(data, (count, packed_bytes(count, 1)))
        values = (exponents.to(torch.int32) << 23).view(torch.float32)
        return torch.where(unpack(packed, 1, count).bool(), -values, values)

    def size(self, layout: Layout) -> int:
        return layout.total + packed_bytes(layout.total, 1)
