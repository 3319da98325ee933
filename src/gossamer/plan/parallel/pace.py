"""How long machines take for blocks of layers: by the cluster's own figures, or by a data sheet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gossamer.config.cluster import Compute
from gossamer.plan.hardware.device import Device
from gossamer.plan.hardware.operators import Operator
from gossamer.plan.hardware.roofline import operator_seconds
from gossamer.plan.parallel.layer import Block, Layer


class PassTimes(Protocol):
    """The time of passes, without what machines tell each other."""

    title: str
    notes: Sequence[str]
    """What a reader of the times must know."""

    def passes(self, samples: float, tensor: int) -> Sequence[tuple[float, float]]:
        """For each block the seconds of the forward and of the backward pass of so many samples on
        each of the machines that hold it together."""
        ...

    def attention_s(self, samples: float, tensor: int) -> Sequence[float]:
        """For each block the seconds in which the products between positions are made again."""
        ...

    def update_s(self, parameters: float, slots: int) -> float:
        """The optimiser's step on so many parameters."""
        ...


class ClusterPassTimes:
    """The time of a gradient as the cluster tells it, dealt to the blocks by their work: what the
    simulator does."""

    def __init__(self, blocks: Sequence[Block], compute: Compute) -> None:
        self.title = "as the cluster says"
        self.notes: Sequence[str] = (
            []
            if compute.per_sample
            else [
                "a gradient takes as long on this cluster whatever its batch is, so few replicas "
                "and few micro-batches look cheap; [compute] per_sample or --hardware says more"
            ]
        )
        work = [2 * block.macs + block.outputs for block in blocks]
        self._shares = [one / sum(work) for one in work]
        self._compute = compute

    def passes(self, samples: float, tensor: int) -> Sequence[tuple[float, float]]:
        compute = self._compute
        whole = (compute.seconds + compute.per_sample * samples) / tensor
        ahead = compute.forward_share
        return [(share * whole * ahead, share * whole * (1 - ahead)) for share in self._shares]

    def attention_s(self, samples: float, tensor: int) -> Sequence[float]:
        return [0.0] * len(self._shares)

    def update_s(self, parameters: float, slots: int) -> float:
        return self._compute.unoverlapped_seconds


class DevicePassTimes:
    """Operators under the roof of a data sheet, each with the efficiency of its size: layers that
    are cut into thin slices are slower than their share."""

    def __init__(self, blocks: Sequence[Block], device: Device, precision: str) -> None:
        self.title = f"estimated for {device.title} in {precision}"
        self.notes: Sequence[str] = [
            "not counted: the host that starts the operators, and loading the samples"
        ]
        self._blocks, self._device, self._precision = tuple(blocks), device, precision
        self._known: dict[tuple[float, int], Sequence[tuple[float, float]]] = {}

    def passes(self, samples: float, tensor: int) -> Sequence[tuple[float, float]]:
        if (samples, tensor) not in self._known:
            self._known[samples, tensor] = self._passes(samples, tensor)
        return self._known[samples, tensor]

    def _passes(self, samples: float, tensor: int) -> Sequence[tuple[float, float]]:
        # Blocks that are alike, as those of a transformer, are looked at once.
        seen: dict[tuple[Layer, ...], tuple[float, float]] = {}
        for block in self._blocks:
            if block.layers not in seen:
                own = [self.layer_s(layer, samples, tensor) for layer in block.layers]
                seen[block.layers] = (sum(a for a, _ in own), sum(b for _, b in own))
        return [seen[block.layers] for block in self._blocks]

    def attention_s(self, samples: float, tensor: int) -> Sequence[float]:
        return [
            sum(
                self.layer_s(layer, samples, tensor)[0]
                for layer in block.layers
                if layer.kind == "attention"
            )
            for block in self._blocks
        ]

    def layer_s(self, layer: Layer, samples: float, tensor: int = 1) -> tuple[float, float]:
        """Forward and backward. Each product of the forward pass has two in the backward pass."""
        seconds = [
            operator_seconds(one, self._device, self._precision)
            for one in self._operators(layer, samples, tensor)
        ]
        return sum(seconds), 2 * sum(seconds)

    def _operators(self, layer: Layer, samples: float, tensor: int) -> list[Operator]:
        is_half = self._precision == "bf16"
        size = 2 if is_half else 4
        share = tensor if layer.is_divisible else 1
        numbers = samples * (layer.inputs + layer.outputs / share) + layer.parameters / share
        smallest = max(1, round(min(
            samples * layer.rows, layer.inside, layer.outside / layer.groups / share,
        )))  # fmt: skip
        if layer.kind == "attention":
            # Heads are divided; the products stay as thin as a head, and the softmax and its mask
            # move the numbers between all pairs of positions.
            pairs = Operator(
                "softmax", "softmax", False, 0.0, layer.outside,
                2 * size * samples * layer.kept_split / tensor, is_half,
            )  # fmt: skip
            product = Operator(
                "bmm", "matmul", False, 2 * samples * layer.macs / tensor,
                layer.inside, size * samples * (layer.inputs + layer.outputs) / tensor, is_half,
            )  # fmt: skip
            return [product, pairs]
        kind = {"linear": "matmul"}.get(layer.kind, layer.kind)
        if layer.is_product:
            flops = 2 * samples * layer.macs / share
            return [Operator(layer.name, kind, False, flops, smallest, size * numbers,
                             is_half)]  # fmt: skip
        return [Operator(layer.name, kind, False, 0.0, layer.outside, size * numbers,
                         is_half)]  # fmt: skip

    def update_s(self, parameters: float, slots: int) -> float:
        """It reads the gradient and reads and writes parameters and slots, in 32 bits."""
        return 4.0 * parameters * (3 + 2 * slots) / self._device.bandwidth
