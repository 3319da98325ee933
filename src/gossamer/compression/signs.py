"""One bit for each number: its sign, and scales."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.compression.bits import as_bytes, from_bytes, pack, packed_bytes, sections, unpack
from gossamer.compression.compressor import Compressor, Stream
from gossamer.replica import Layout


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
    sizes = torch.tensor(layout.sizes, device=values.device)
    return values.repeat_interleave(sizes, output_size=layout.total)
