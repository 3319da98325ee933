"""The sign of each number and scales: one bit, or three values at random."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.compression.bits import as_bytes, from_bytes, pack, packed_bytes, sections, unpack
from gossamer.compression.compressor import Compressor, GatherRound, Rounds, Stream, mean_of
from gossamer.replica import Layout
from gossamer.specs import check_range


@dataclass(frozen=True)
class Sign(Compressor):
    """The sign of each number, times the mean magnitude of its tensor.

    A bit cannot say zero: a tensor of zeros is kept by its scale, a zero among others is not.
    """

    name = "sign"
    feedback: bool = field(default=True, kw_only=True)

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        pieces = vector.split(list(stream.layout.sizes))
        scales = torch.stack([piece.abs().mean() for piece in pieces])
        return torch.cat([as_bytes(scales), pack(vector >= 0, 1)])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        layout = stream.layout
        sizes = (4 * len(layout.sizes), packed_bytes(layout.total, 1))
        scales, packed = sections(data, sizes)
        signs = unpack(packed, 1, layout.total).float().mul_(2).sub_(1)
        by_number = spread(from_bytes(scales, torch.float32), layout)
        return signs.mul_(by_number)

    def size(self, layout: Layout) -> int:
        return 4 * len(layout.sizes) + packed_bytes(layout.total, 1)

    def contraction(self, layout: Layout) -> float:
        """|u|_1^2 / (n |u|_2^2) is at least 1 / n, where one number has all the mass."""
        return 1 / max(layout.sizes)


def spread(values: Tensor, layout: Layout) -> Tensor:
    """One value for each tensor, repeated for each of its numbers."""
    pairs = zip(values.unbind(), layout.sizes, strict=True)
    return torch.cat([value.expand(size) for value, size in pairs])


@dataclass(frozen=True)
class OneBit(Compressor):
    """Seide's 1-bit SGD: the sign, and for each output the means of what is above and below zero.

    A column of the paper is what one output of a layer holds: a row of torch's weights. What is a
    vector there has one pair of means.
    """

    name = "onebit"
    feedback: bool = field(default=True, kw_only=True)

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        tables: list[Tensor] = []
        for piece, columns in zip(
            vector.split(list(stream.layout.sizes)), _columns(stream.layout), strict=True
        ):
            rows = piece.view(columns, -1)
            above = rows > 0
            count = above.sum(1)
            high = torch.where(above, rows, 0.0).sum(1) / count.clamp(min=1)
            low = torch.where(above, 0.0, rows).sum(1) / (rows.shape[1] - count).clamp(min=1)
            tables += [high, low]
        return torch.cat([as_bytes(torch.cat(tables)), pack(vector > 0, 1)])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        layout = stream.layout
        columns = _columns(layout)
        tables, packed = sections(data, (8 * sum(columns), packed_bytes(layout.total, 1)))
        above = unpack(packed, 1, layout.total).bool().split(list(layout.sizes))
        means = from_bytes(tables, torch.float32).split([2 * count for count in columns])
        parts: list[Tensor] = []
        for own, table, count in zip(above, means, columns, strict=True):
            high, low = table.view(2, count, 1)
            parts.append(torch.where(own.view(count, -1), high, low).view(-1))
        return torch.cat(parts)

    def size(self, layout: Layout) -> int:
        return 8 * sum(_columns(layout)) + packed_bytes(layout.total, 1)


def _columns(layout: Layout) -> list[int]:
    """How many outputs each tensor has; a vector counts as one."""
    return [shape[0] if len(shape) > 1 else 1 for shape in layout.shapes]


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Wen et al. 2017: -1, 0 or 1 times a scale, at random so that the expectation is right.

    The workers agree first on the largest scale of each tensor. Numbers beyond `clip` standard
    deviations are cut off, without which one large number makes all others noise; that is the only
    bias, and clip=0 does without it. Five numbers are packed into a byte.
    """

    name = "terngrad"
    down: bool = field(default=False, kw_only=True)
    clip: float = field(default=2.5, kw_only=True)

    def check(self) -> None:
        check_range(f"{self.name}: clip", self.clip, 0.0)

    @property
    def overshoots(self) -> bool:
        return True

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        clipped, scales = self._clipped(vector, stream.layout)
        return torch.cat([as_bytes(scales), self._drawn(clipped, scales, stream)])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        layout = stream.layout
        scales, packed = sections(data, (4 * len(layout.sizes), -(-layout.total // _TRITS)))
        return self._values(packed, from_bytes(scales, torch.float32), layout)

    def rounds(self, vector: Tensor, stream: Stream) -> Rounds:
        clipped, own = self._clipped(vector, stream.layout)
        everybody = yield GatherRound(own)
        scales = torch.stack(everybody).amax(0)
        packed = self._drawn(clipped, scales, stream)
        drawn = yield GatherRound(packed)
        parts = [self._values(data, scales, stream.layout) for data in drawn]
        return mean_of(parts), self._values(packed, scales, stream.layout)

    def _clipped(self, vector: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """The vector without what is too far out, and the largest magnitude of each tensor."""
        pieces = list(vector.split(list(layout.sizes)))
        if self.clip:
            bounds = [piece.std(correction=0) * self.clip for piece in pieces]
            # Numbers that are all alike have no deviation, and are none too far out.
            bounds = [torch.where(b > 0, b, torch.inf) for b in bounds]
            pieces = [p.clamp(-b, b) for p, b in zip(pieces, bounds, strict=True)]
        return torch.cat(pieces), torch.stack([piece.abs().amax() for piece in pieces])

    def _drawn(self, clipped: Tensor, scales: Tensor, stream: Stream) -> Tensor:
        by_number = spread(scales, stream.layout)
        is_kept = stream.uniform(clipped) * by_number < clipped.abs()
        trits = (clipped.sign() * is_kept + 1).to(torch.uint8)
        rows = pad(trits, (0, -trits.numel() % _TRITS)).view(-1, _TRITS)
        packed = rows[:, 0].clone()
        for place in range(1, _TRITS):
            packed += rows[:, place] * 3**place
        return packed

    def _values(self, packed: Tensor, scales: Tensor, layout: Layout) -> Tensor:
        places = [packed // 3**place % 3 for place in range(_TRITS)]
        trits = torch.stack(places, 1).view(-1)[: layout.total].float().sub_(1)
        return trits.mul_(spread(scales, layout))

    def size(self, layout: Layout) -> int:
        return 4 * len(layout.sizes) + -(-layout.total // _TRITS)


_TRITS = 5
"""3^5 = 243 is below 256."""
