"""Gradients as products of thin matrices: PowerSGD."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.compression.bits import as_bytes, from_bytes
from gossamer.compression.compressor import Compressor, MeanRound, Rounds, Stream
from gossamer.errors import ConfigurationError
from gossamer.replica import Layout


@dataclass(frozen=True)
class _Matrix:
    """One matrix of the model: its place in the flat vector and its sides."""

    start: int
    rows: int
    columns: int
    rank: int

    def of(self, vector: Tensor) -> Tensor:
        end = self.start + self.rows * self.columns
        return vector[self.start : end].view(self.rows, self.columns)


@dataclass(frozen=True)
class PowerSgd(Compressor):
    """Vogels et al. 2019: M ~ P Q^T with `rank` columns, by one step of power iteration.

    P = M Q is averaged and made orthonormal, then Q = M^T P is averaged, and Q is where the next
    step begins. A vector, and a matrix that would not become `least_rate` times smaller, travels as
    it is. For the first `start` vectors everything does.
    """

    name = "powersgd"
    feedback: bool = field(default=True, kw_only=True)
    rank: int = field(default=2, kw_only=True)
    start: int = field(default=0, kw_only=True)
    least_rate: float = field(default=2.0, kw_only=True)

    def check(self) -> None:
        if self.rank < 1:
            raise ConfigurationError(f"{self.name}: rank must be at least 1, got {self.rank}")
        if self.start < 0:
            raise ConfigurationError(f"{self.name}: start must not be negative, got {self.start}")
        if not self.least_rate >= 0:
            raise ConfigurationError(
                f"{self.name}: least_rate must not be negative, got {self.least_rate:g}"
            )

    def matrices(self, layout: Layout) -> list[_Matrix]:
        """The matrices that become small enough. All dimensions of a tensor but the first are
        joined."""
        found: list[_Matrix] = []
        start = 0
        for shape, size in zip(layout.shapes, layout.sizes, strict=True):
            if len(shape) > 1 and size:
                rows, columns = shape[0], size // shape[0]
                rank = min(self.rank, rows, columns)
                if size >= self.least_rate * rank * (rows + columns):
                    found.append(_Matrix(start, rows, columns, rank))
            start += size
        return found

    def _rest(self, layout: Layout) -> list[slice]:
        """The ranges that travel as they are."""
        ends = [0]
        for own in self.matrices(layout):
            ends += [own.start, own.start + own.rows * own.columns]
        ends.append(layout.total)
        pairs = zip(ends[::2], ends[1::2], strict=True)
        return [slice(first, last) for first, last in pairs if last > first]

    def _factors(self, layout: Layout, side: str, flat: Tensor) -> list[Tensor]:
        shapes = [(getattr(own, side), own.rank) for own in self.matrices(layout)]
        pieces = flat.split([rows * rank for rows, rank in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _right(self, like: Tensor, stream: Stream) -> list[Tensor]:
        """Q of the vector before; at first random numbers, the same at all ends."""
        known = stream.state.get("right")
        if known is None:
            count = sum(own.columns * own.rank for own in self.matrices(stream.layout))
            generator = torch.Generator().manual_seed(zlib.crc32(stream.common.encode()))
            known = torch.randn(count, generator=generator).to(like.device, like.dtype)
        return self._factors(stream.layout, "columns", known)

    def _left(self, vector: Tensor, stream: Stream) -> Tensor:
        """P = M Q, one matrix after the other, and then all that travels as it is."""
        pairs = zip(self.matrices(stream.layout), self._right(vector, stream), strict=True)
        left = [(own.of(vector) @ right).view(-1) for own, right in pairs]
        return torch.cat([*left, *[vector[part] for part in self._rest(stream.layout)]])

    def _made(self, left: list[Tensor], right: Tensor, rest: Tensor, layout: Layout) -> Tensor:
        """P Q^T, and the rest in between."""
        whole = torch.empty(layout.total, dtype=rest.dtype, device=rest.device)
        rights = self._factors(layout, "columns", right)
        for own, p, q in zip(self.matrices(layout), left, rights, strict=True):
            torch.mm(p, q.T, out=own.of(whole))
        parts = self._rest(layout)
        for part, piece in zip(parts, rest.split([p.stop - p.start for p in parts]), strict=True):
            whole[part] = piece
        return whole

    def _split(self, flat: Tensor, layout: Layout) -> tuple[list[Tensor], Tensor]:
        count = sum(own.rows * own.rank for own in self.matrices(layout))
        return self._factors(layout, "rows", flat[:count]), flat[count:]

    def rounds(self, vector: Tensor, stream: Stream) -> Rounds:
        layout = stream.layout
        every = self.matrices(layout)
        if stream.count < self.start or not every:
            (mean,) = yield MeanRound(vector)
            return mean, vector
        sent = self._left(vector, stream)
        _, own_rest = self._split(sent, layout)
        (mean_left,) = yield MeanRound(sent)
        raw, rest = self._split(mean_left, layout)
        left = [_orthonormal(p) for p in raw]
        right = torch.cat([
            (own.of(vector).T @ p).view(-1) for own, p in zip(every, left, strict=True)
        ])  # fmt: skip
        (mean_right,) = yield MeanRound(right)
        stream.state["right"] = mean_right.clone()
        # This worker's part of the mean is the projection of its own matrix, so its residual is
        # what the projection leaves out, and does not hold how the workers differ.
        return self._made(left, mean_right, rest, layout), self._made(left, right, own_rest, layout)

    def encode(self, vector: Tensor, stream: Stream) -> Tensor:
        layout = stream.layout
        every = self.matrices(layout)
        if stream.count < self.start or not every:
            return as_bytes(vector)
        raw, rest = self._split(self._left(vector, stream), layout)
        left = [_orthonormal(p) for p in raw]
        right = [own.of(vector).T @ p for own, p in zip(every, left, strict=True)]
        stream.state["right"] = torch.cat([q.reshape(-1) for q in right])
        return as_bytes(torch.cat([*[own.reshape(-1) for own in (*left, *right)], rest]))

    def decode(self, data: Tensor, stream: Stream) -> Tensor:
        layout = stream.layout
        flat = from_bytes(data, torch.float32)
        if flat.numel() == layout.total:
            return flat.clone()
        left, others = self._split(flat, layout)
        count = sum(own.columns * own.rank for own in self.matrices(layout))
        return self._made(left, others[:count], others[count:], layout)

    def size(self, layout: Layout) -> int:
        """After `start`."""
        thin = sum((own.rows + own.columns) * own.rank for own in self.matrices(layout))
        return 4 * (thin + sum(part.stop - part.start for part in self._rest(layout)))


def _orthonormal(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix).Q
