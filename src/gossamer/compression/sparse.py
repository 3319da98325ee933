"""Few of the numbers: the largest, those above a threshold, or some at random."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.compression.bits import pack, packed_bytes, sections, unpack
from gossamer.compression.compressor import Compressor, Stream
from gossamer.compression.values import decode_values, encode_values, value_bytes
from gossamer.errors import ConfigurationError
from gossamer.replica import Layout


def check_share(name: str, share: float) -> None:
    """Refuse a share that sends nothing, or more than there is."""
    if not 0.0 < share <= 1.0:
        raise ConfigurationError(
            f"{name}: share must be above 0 and at most 1, got {share:g}; 0.01 sends one number in "
            "a hundred"
        )


@dataclass(frozen=True)
class Rows:
    """So many rows of so many numbers, from a place of the flat vector on; of each row the largest
    few are kept. The last row may be filled up with zeros."""

    start: int
    end: int
    width: int
    kept: int

    @property
    def count(self) -> int:
        return -(-(self.end - self.start) // self.width)

    @property
    def bits(self) -> int:
        """Of a place in its row."""
        return max(1, (self.width - 1).bit_length())


@dataclass(frozen=True)
class TopK(Compressor):
    """The largest magnitudes and their places.

    `scope` says among how many numbers the largest are looked for: all, those of one tensor, or
    those of one chunk, which is fastest and whose places take the fewest bits. `bits` are those of
    a value; with 2 there are four bins around the mean, and the means of the bins are sent along.
    """

    name = "topk"
    feedback: bool = field(default=True, kw_only=True)
    share: float = field(default=0.01, kw_only=True)
    scope: Literal["global", "tensor", "chunk"] = field(default="chunk", kw_only=True)
    chunk: int = field(default=4096, kw_only=True)
    bits: Literal[2, 4, 8, 16, 32] = field(default=32, kw_only=True)

    def check(self) -> None:
        check_share(self.name, self.share)
        if self.chunk < 2:
            raise ConfigurationError(f"{self.name}: chunk must be at least 2, got {self.chunk}")

    def share_now(self, stream: Stream) -> float:
        """The share of the next vector."""
        return self.share

    def rows(self, layout: Layout, share: float) -> Iterator[Rows]:
        """Where the largest are looked for."""
        total = layout.total
        if self.scope == "chunk":
            width = min(self.chunk, total)
            yield Rows(0, total, width, _kept(width, share))
            return
        end = 0
        for size in (total,) if self.scope == "global" else layout.sizes:
            start, end = end, end + size
            if size:
                yield Rows(start, end, size, _kept(size, share))

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        places: list[Tensor] = []
        values: list[Tensor] = []
        for rows in self.rows(stream.layout, self.share_now(stream)):
            own = vector[rows.start : rows.end]
            filled = pad(own, (0, -own.numel() % rows.width)).view(-1, rows.width)
            found = filled.abs().topk(rows.kept, 1, sorted=False).indices
            values.append(filled.gather(1, found).view(-1))
            places.append(pack(found.view(-1), rows.bits))
        return torch.cat([*places, encode_values(torch.cat(values), self.bits)])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        every = list(self.rows(stream.layout, self.share_now(stream)))
        sizes = [packed_bytes(rows.count * rows.kept, rows.bits) for rows in every]
        counts = [rows.count * rows.kept for rows in every]
        *places, packed = sections(data, (*sizes, value_bytes(sum(counts), self.bits)))
        values = decode_values(packed, self.bits, sum(counts)).split(counts)
        parts: list[Tensor] = []
        for rows, place, value in zip(every, places, values, strict=True):
            found = unpack(place, rows.bits, rows.count * rows.kept).long()
            empty = value.new_zeros(rows.count, rows.width)
            filled = empty.scatter_(
                1, found.view(rows.count, rows.kept), value.view(rows.count, rows.kept)
            )
            parts.append(filled.view(-1)[: rows.end - rows.start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def size(self, layout: Layout) -> int:
        every = list(self.rows(layout, self.share))
        places = sum(packed_bytes(rows.count * rows.kept, rows.bits) for rows in every)
        return places + value_bytes(sum(rows.count * rows.kept for rows in every), self.bits)

    def contraction(self, layout: Layout) -> float:
        """With exact values, k of n numbers have at least k / n of the square."""
        if self.bits != 32:
            return 0.0
        return min(rows.kept / rows.width for rows in self.rows(layout, self.share))


def _kept(width: int, share: float) -> int:
    return max(1, math.ceil(share * width - 1e-9))
