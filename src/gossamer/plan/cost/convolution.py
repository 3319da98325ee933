"""Work and depth of convolutions by four algorithms (Ben-Nun & Hoefler 2019, table 6).

N batch, Cin and Cout channels, H x W the image, H' x W' the result, Ky x Kx the kernel. Each
function gives (work, depth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Of one convolution; image, result and kernel have one number per dimension."""

    batch: int
    inputs: int
    """Channels that one output channel sees."""
    outputs: int
    image: tuple[int, ...]
    result: tuple[int, ...]
    kernel: tuple[int, ...]


def log2_up(count: int) -> int:
    """The depth of a sum of so many numbers."""
    return max(0, math.ceil(math.log2(count))) if count > 1 else 0


def direct(sizes: Sizes) -> tuple[float, float]:
    """N Cout H' W' Cin Ky Kx; sums over Cin, Ky and Kx one after the other."""
    work = sizes.batch * sizes.outputs * math.prod(sizes.result)
    work *= sizes.inputs * math.prod(sizes.kernel)
    depth = log2_up(sizes.inputs) + sum(log2_up(size) for size in sizes.kernel)
    return work, max(1, depth)


def im2col(sizes: Sizes) -> tuple[float, float]:
    """The same products as one matrix product: what it costs more is memory."""
    return direct(sizes)


def fft(sizes: Sizes, constant: float = 1.0) -> tuple[float, float]:
    """c HW log2(HW) (Cout Cin + N Cin + N Cout) + HW N Cin Cout.

    All kernels and images there, all results back, and the products of their transforms between.
    """
    places = math.prod(sizes.image)
    pairs = sizes.outputs * sizes.inputs
    transforms = pairs + sizes.batch * (sizes.inputs + sizes.outputs)
    work = constant * places * math.log2(places) * transforms if places > 1 else 0.0
    return work + places * sizes.batch * pairs, 2 * log2_up(places) + log2_up(sizes.inputs)


def winograd(sizes: Sizes, tile: int = 2) -> tuple[float, float]:
    """F(m x m, r x r) on tiles of a = m + r - 1 (the table prints m - r + 1, which is a misprint).

    The table's a (r^2 + a r + 2 a^2 + a m + m^2) is what one kernel, one tile of an image and one
    of the result cost to transform; here each is counted as often as it is done, and a^2 products
    for each pair of channels and each tile.
    """
    r, m = sizes.kernel[0], tile
    a = m + r - 1
    tiles = sizes.batch * math.prod(-(-size // m) for size in sizes.result)
    kernels = sizes.outputs * sizes.inputs * a * (r * r + a * r)
    images = sizes.inputs * tiles * 2 * a**3
    results = sizes.outputs * tiles * a * (a * m + m * m)
    products = a * a * sizes.outputs * sizes.inputs * tiles
    depth = 2 * log2_up(r) + 4 * log2_up(a) + log2_up(sizes.inputs)
    return kernels + images + results + products, depth
