"""Ways to divide one layer over P machines, side by side (Ben-Nun & Hoefler 2019, section 6).

Each is priced for one step of N samples: what a machine computes, what it puts on its card, in how
many messages, how long both take, and what it holds. The machines begin and end with what the
neighbouring layers have under the same division. What a pair of layers saves together (the first by
its outputs, the second by its inputs) is a way of its own. Cannon's algorithm and redundant
computing are priced here and run nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from gossamer.plan.cost.alpha_beta import AlphaBeta
from gossamer.plan.parallel.layer import Layer


@dataclass(frozen=True)
class LayerWay:
    """One way to divide a layer."""

    name: str
    compute: float
    """Of the whole layer's work, the share that a machine does."""
    messages: float
    """Messages of a machine in a step, one after the other."""
    sent: float
    """Numbers that it puts on its card."""
    parameters: float
    activations: float
    """Numbers that it keeps for the backward pass."""

    def seconds(self, whole_s: float, link: AlphaBeta, number_bytes: int) -> tuple[float, float]:
        """Computing and messages, one after the other."""
        sent_s = self.sent * number_bytes * link.seconds_per_byte
        return self.compute * whole_s, self.messages * link.latency_s + sent_s


def ways(layer: Layer, machines: int, samples: float) -> list[LayerWay]:
    """Every way that this kind of layer can be divided over so many machines."""
    if machines == 1:
        return [LayerWay("one machine", 1.0, 0, 0.0, layer.parameters, samples * layer.inputs)]
    return [_by_samples(layer, machines, samples), *_inside(layer, machines, samples)]


def _by_samples(layer: Layer, p: int, n: float) -> LayerWay:
    """Data parallelism: a ring sums the gradients of the parameters."""
    ring = 2 * (p - 1)
    return LayerWay(
        "samples", 1 / p, ring, ring / p * layer.parameters, layer.parameters, n * layer.inputs / p
    )


def _inside(layer: Layer, p: int, n: float) -> Iterator[LayerWay]:
    own, inputs, outputs = layer.parameters / p, n * layer.inputs, n * layer.outputs
    ring, half = 2 * (p - 1), p - 1
    if layer.kind == "attention":
        if layer.heads % p == 0:
            yield LayerWay("heads", 1 / p, 0, 0.0, own, inputs / p)
        # Each machine has its positions' queries and needs the keys and values of all.
        keys = 2 * inputs / 3
        yield LayerWay(
            "positions", 1 / p, 2 * half, 2 * half / p * keys, own, (inputs + 2 * keys) / p
        )
        return
    if not layer.is_divisible:
        return
    # Every machine needs all inputs, and the gradients by them are added up: all to all.
    yield LayerWay("outputs (columns)", 1 / p, 2 * half, 2 * half / p * inputs, own, inputs)
    yield LayerWay("inputs (rows)", 1 / p, 2 * half, 2 * half / p * outputs, own, inputs / p)
    yield LayerWay(
        "a pair: outputs, then inputs", 1 / p, ring, ring / p * (outputs + inputs) / 2, own,
        (inputs + inputs / p) / 2,
    )  # fmt: skip
    if layer.kind == "linear" and p % 2 == 0 and p > 2:
        # Pairs of machines hold the same neurons, so that each gathers from half as many.
        few = p // 2 - 1
        yield LayerWay(
            "outputs, each computed twice", 2 / p, 2 * few, 2 * few / (p // 2) * inputs, 2 * own,
            inputs,
        )  # fmt: skip
    if layer.kind == "linear":
        yield from _cannon(layer, p, n)
    if layer.kind == "convolution" and layer.image[0] >= 2 * p:
        yield from _by_space(layer, p, n)


def _cannon(layer: Layer, p: int, n: float) -> Iterator[LayerWay]:
    """On a square of q x q machines the blocks of both factors move on q times, the first move
    bringing them to their place; so do those of the two products of the backward pass."""
    q = isqrt(p)
    if q * q != p:
        return
    rows, inside, outside = n * layer.rows, layer.inside, layer.outside
    pairs = (rows * inside + inside * outside, rows * outside + inside * outside,
             rows * inside + rows * outside)  # fmt: skip
    yield LayerWay(
        "Cannon's algorithm", 1 / p, 2 * 3 * q, q * sum(pairs) / p, layer.parameters / p,
        n * layer.inputs / p,
    )  # fmt: skip


def _by_space(layer: Layer, p: int, n: float) -> Iterator[LayerWay]:
    """Strips of the image: a strip needs the edge rows of its neighbours, and all machines hold
    all parameters and add up their gradients."""
    height, width = layer.image
    channels = layer.inputs / (height * width)
    edge = layer.kernel // 2
    halo = 2 * edge * width * channels * n
    ring = 2 * (p - 1)
    exchange = ring / p * layer.parameters
    kept = n * layer.inputs / p
    yield LayerWay(
        "space (strips)", 1 / p, ring + 4, exchange + 2 * halo, layer.parameters, kept + halo
    )
    # Twice the edge at every second layer: half the messages, and the rows between computed twice.
    more = edge / (height / p)
    yield LayerWay(
        "space, edges computed twice", (1 + more) / p, ring + 2, exchange + 2 * halo,
        layer.parameters, kept + 2 * halo,
    )  # fmt: skip
