"""Few of the numbers: the largest, those above a threshold, or some at random."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.compression.bits import as_bytes, from_bytes, pack, packed_bytes, sections, unpack
from gossamer.compression.compressor import Compressor, MeanRound, Rounds, Stream
from gossamer.compression.values import decode_values, encode_values, value_bytes
from gossamer.errors import ConfigurationError
from gossamer.replica import Layout
from gossamer.specs import check_range


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
        return self.chosen(vector, stream.layout, self.share)[0]

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        return self.decoded(data, stream.layout, self.share)

    def chosen(self, vector: Tensor, layout: Layout, share: float) -> tuple[Tensor, Tensor]:
        """The bytes of the largest numbers, and their places in the flat vector."""
        found: list[Tensor] = []
        values: list[Tensor] = []
        places: list[Tensor] = []
        for rows in self.rows(layout, share):
            own = vector[rows.start : rows.end]
            filled = pad(own, (0, -own.numel() % rows.width)).view(-1, rows.width)
            at = filled.abs().topk(rows.kept, 1, sorted=False).indices
            values.append(filled.gather(1, at).view(-1))
            found.append(pack(at.view(-1), _bits(rows.width)))
            first = torch.arange(rows.count, device=vector.device).unsqueeze(1) * rows.width
            # What a last row is filled up with lies beyond the end.
            places.append((at + first).view(-1).add_(rows.start).clamp_(max=rows.end - 1))
        data = torch.cat([*found, encode_values(torch.cat(values), self.bits)])
        return data, torch.cat(places)

    def decoded(self, data: Tensor, layout: Layout, share: float) -> Tensor:
        every = list(self.rows(layout, share))
        counts = [rows.count * rows.kept for rows in every]
        sizes = [
            packed_bytes(count, _bits(rows.width))
            for count, rows in zip(counts, every, strict=True)
        ]
        *found, packed = sections(data, (*sizes, value_bytes(sum(counts), self.bits)))
        values = decode_values(packed, self.bits, sum(counts)).split(counts)
        parts: list[Tensor] = []
        for rows, place, value in zip(every, found, values, strict=True):
            at = unpack(place, _bits(rows.width), rows.count * rows.kept).long()
            shape = (rows.count, rows.kept)
            filled = value.new_zeros(rows.count, rows.width)
            filled.scatter_(1, at.view(shape), value.view(shape))
            parts.append(filled.view(-1)[: rows.end - rows.start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def size(self, layout: Layout) -> int:
        every = list(self.rows(layout, self.share))
        places = sum(packed_bytes(rows.count * rows.kept, _bits(rows.width)) for rows in every)
        return places + value_bytes(sum(rows.count * rows.kept for rows in every), self.bits)

    def contraction(self, layout: Layout) -> float:
        """With exact values, k of n numbers have at least k / n of the square."""
        if self.bits != 32:
            return 0.0
        return min(rows.kept / rows.width for rows in self.rows(layout, self.share))


def _kept(width: int, share: float) -> int:
    return max(1, math.ceil(share * width - 1e-9))


@dataclass(frozen=True)
class RandomK(Compressor):
    """Some numbers at random, the same ones on all workers, so that places need not travel.

    The places are drawn from a seed that all share, so the values can be summed on the way. The
    expectation is the share of the vector, as if the rate were smaller by it. Feedback keeps the
    rate, but a number then comes 1 / share steps late, which SGD's momentum does not stand.
    """

    name = "randk"
    share: float = field(default=0.25, kw_only=True)

    def check(self) -> None:
        check_share(self.name, self.share)

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        number = torch.tensor([stream.count], device=vector.device)
        return torch.cat([as_bytes(number), as_bytes(vector[self._places(vector, stream)])])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        number = 0 if data.is_meta else int(from_bytes(data[:8], torch.int64))
        values = from_bytes(data[8:], torch.float32)
        empty = values.new_zeros(stream.layout.total)
        return empty.index_copy_(0, self._places(empty, stream, number), values)

    def rounds(self, vector: Tensor, stream: Stream) -> Rounds:
        places = self._places(vector, stream)
        own = vector[places]
        (mean,) = yield MeanRound(own)
        empty = torch.zeros_like(vector)
        return empty.index_copy(0, places, mean), empty.index_copy(0, places, own)

    def _places(self, like: Tensor, stream: Stream, number: int | None = None) -> Tensor:
        key = f"{stream.common}/{stream.count if number is None else number}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        drawn = torch.randperm(like.numel(), generator=generator)
        return drawn[: _kept(like.numel(), self.share)].to(like.device)

    def size(self, layout: Layout) -> int:
        return 4 * _kept(layout.total, self.share)

    def contraction(self, layout: Layout) -> float:
        """In expectation over the places."""
        return _kept(layout.total, self.share) / layout.total


@dataclass(frozen=True)
class Threshold(Compressor):
    """The numbers above a threshold, which is `factor` root mean squares of the vector.

    How many these are differs from vector to vector, so the bytes are known only afterwards.
    """

    name = "threshold"
    feedback: bool = field(default=True, kw_only=True)
    factor: float = field(default=2.0, kw_only=True)

    def check(self) -> None:
        check_range(f"{self.name}: factor", self.factor, 0.0)

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        if vector.is_meta:
            raise ConfigurationError(
                "threshold sends as much as the values say, so without values nothing can be "
                "timed; use topk"
            )
        bound = vector.square().mean().sqrt() * self.factor
        places = ((vector.abs() > bound) & (vector != 0)).nonzero().view(-1)
        width = _bits(vector.numel())
        return torch.cat([pack(places, width), as_bytes(vector[places])])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        total = stream.layout.total
        width = _bits(total)
        # So many numbers fit into exactly these bytes.
        count = 8 * data.numel() // (width + 32)
        places, values = sections(data, (packed_bytes(count, width), 4 * count))
        empty = torch.zeros(total, device=data.device)
        return empty.index_copy_(
            0, unpack(places, width, count).long(), from_bytes(values, torch.float32)
        )

    def size(self, layout: Layout) -> int:
        """An estimate: as many bytes as normally distributed numbers would need."""
        count = math.erfc(self.factor / math.sqrt(2)) * layout.total
        return math.ceil(count * (_bits(layout.total) + 32) / 8)


@dataclass(frozen=True)
class Dgc(TopK):
    """Lin et al. 2018, Deep Gradient Compression: the largest of what momentum has gathered.

    u <- m u + g;  v <- v + u;  send the largest of v, and set both to zero there. The share begins
    at a quarter and falls by a factor of four at a time during the first part of the run,
    `warm_up`. SGD's momentum is left out, because this is it.
    """

    name = "dgc"
    own_momentum = "momentum"
    feedback: bool = field(default=False, kw_only=True)
    """What is not sent stays in v, so there is no other feedback."""
    share: float = field(default=0.01, kw_only=True)
    momentum: float = field(default=0.9, kw_only=True)
    warm_up: float = field(default=0.1, kw_only=True)

    def check(self) -> None:
        super().check()
        check_range(f"{self.name}: momentum", self.momentum, 0.0, 1.0)
        check_range(f"{self.name}: warm_up", self.warm_up, 0.0, 1.0)
        if self.feedback:
            raise ConfigurationError(
                f"{self.name} keeps what it does not send itself; leave out feedback="
            )

    def shares(self) -> list[float]:
        """The shares of the warm-up, and the last one."""
        found = [0.25]
        while found[-1] / 4 > self.share:
            found.append(found[-1] / 4)
        return [own for own in found if own > self.share] + [self.share]

    def stage(self, stream: Stream) -> int:
        """Which of the shares is the next vector's."""
        stages = len(self.shares()) - 1
        last = self.warm_up * stream.steps
        return min(stages, int(stream.count / last * stages)) if last else stages

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        state = stream.state
        none = torch.zeros_like(vector)
        velocity = state["velocity"] = state.get("velocity", none) * self.momentum + vector
        gathered = state["gathered"] = state.get("gathered", none) + velocity
        stage = self.stage(stream)
        sent, places = self.chosen(gathered, stream.layout, self.shares()[stage])
        for kept in (velocity, gathered):
            kept.index_fill_(0, places, 0.0)
        head = torch.full((1,), stage, dtype=torch.uint8, device=vector.device)
        return torch.cat([head, sent])

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        share = self.share if data.is_meta else self.shares()[int(data[0])]
        return self.decoded(data[1:], stream.layout, share)

    def size(self, layout: Layout) -> int:
        """After the warm-up."""
        return 1 + super().size(layout)

    def contraction(self, layout: Layout) -> float:
        return 0.0

    def answering(self) -> Compressor:
        return TopK(
            feedback=False, share=self.share, scope=self.scope, chunk=self.chunk, bits=self.bits
        )


def _bits(count: int) -> int:
    """The bits that the number of a place takes, among so many."""
    return max(1, (count - 1).bit_length())
