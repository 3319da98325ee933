"""The time of a step on a device: each operator under its roof, with the efficiency of its size.

An operator that multiplies takes its operations over the peak, times the share that its kind and
its smallest side get, or its bytes over the bandwidth, whichever is longer (Williams, Waterman &
Patterson 2009); every other operator takes its bytes over the bandwidth. Each takes at least what
the device needs to start. In eager mode the host starts operators one after the other, and a GPU
that computes faster than that waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gossamer.plan.hardware.device import Device
from gossamer.plan.hardware.operators import MATRIX_KINDS, Operator, StepWork

LOSS, HOST, OPTIMISER = (
    "(in no layer, such as the loss)",
    "(host, starting operators)",
    "(optimiser)",
)
"""What of a step belongs to no layer."""


@dataclass(frozen=True)
class LayerTime:
    """One layer of a step, or what belongs to none."""

    name: str
    flops: float
    moved_bytes: float
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class StepTime:
    """The parts of one step."""

    gradient_s: float
    """Forward and backward."""
    forward_s: float
    update_s: float
    """The optimiser."""
    host_share: float
    """The time that the host takes to start the operators, over the time of the step."""

    @property
    def total_s(self) -> float:
        return self.gradient_s + self.update_s


def operator_seconds(one: Operator, device: Device, precision: str) -> float:
    """The time that the device computes for one operator."""
    if one.kind == "view":
        return 0.0
    curves = device.curves
    share = bandwidth_share(curves.ladder, one.moved_bytes)
    moving = one.moved_bytes / (device.bandwidth * share)
    if one.kind not in MATRIX_KINDS:
        use = curves.kinds.get(one.kind)
        reached = math.inf if use is None else use.reached(max(1, one.smallest))
        return curves.start_s + moving + one.moved_bytes / (device.bandwidth * reached)
    exact = "bf16" if one.is_half else "tf32" if precision == "tf32" else "fp32"
    use = curves.kinds.get(f"{one.kind} {exact}") or curves.kinds[f"{one.kind} fp32"]
    multiplied = one.flops / (device.peak(exact) * use.reached(one.smallest, one.flops))
    return curves.start_s + max(moving, multiplied)


def bandwidth_share(ladder: Sequence[tuple[float, float]], moved: float) -> float:
    """The share of the bandwidth that an operator of so many bytes gets."""
    if moved <= ladder[0][0]:
        return ladder[0][1]
    for (low, before), (high, after) in pairwise(ladder):
        if moved <= high:
            way = math.log(moved / low) / math.log(high / low)
            return math.exp(math.log(before) + way * math.log(after / before))
    return ladder[-1][1]


def host_seconds(operators: Sequence[Operator], device: Device) -> float:
    """The time that the host takes to start these operators."""
    views = sum(one.kind == "view" for one in operators)
    return views * device.host.view_s + (len(operators) - views) * device.host.operator_s


def step_seconds(work: StepWork, device: Device, precision: str) -> StepTime:
    """The time of forward, backward and optimiser."""

    def whole(operators: Sequence[Operator], host_s: float) -> float:
        own_s = sum(operator_seconds(one, device, precision) for one in operators)
        return max(own_s, host_s) if device.is_gpu else own_s + host_s

    gradient_host_s = device.host.step_s + host_seconds(work.gradient, device)
    gradient_s = whole(work.gradient, gradient_host_s)
    update_host_s = (
        device.host.update_s + len(work.tensors) * (1 + work.size.slots) * device.host.tensor_s
    )
    update_s = whole(_passes(work, device), update_host_s)
    forward = [one for one in work.gradient if not one.is_backward]
    return StepTime(
        gradient_s=gradient_s,
        forward_s=min(gradient_s, whole(forward, host_seconds(forward, device))),
        update_s=update_s,
        host_share=(gradient_host_s + update_host_s) / (gradient_s + update_s),
    )


def _passes(work: StepWork, device: Device) -> list[Operator]:
    """The operators of the optimiser as it runs: torch's goes over all tensors at once on a GPU,
    and over one after the other on a CPU, where those that fit into a cache stay there."""
    if device.is_gpu:
        return list(work.update)
    numbers = sum(work.tensors)
    return [
        replace(one, moved_bytes=one.moved_bytes * own / numbers)
        for own in work.tensors
        for one in work.update
    ]


def layer_seconds(work: StepWork, device: Device, precision: str) -> list[LayerTime]:
    """The step layer by layer, in the order in which they compute; their times add up to it.

    What a GPU waits for a host that cannot start operators fast enough belongs to no layer.
    """
    in_layer: dict[str, list[Operator]] = {}
    for one in work.gradient:
        in_layer.setdefault(one.layer or LOSS, []).append(one)
    if LOSS in in_layer:
        in_layer[LOSS] = in_layer.pop(LOSS)  # to the end

    def took(operators: Sequence[Operator]) -> float:
        own_s = sum(operator_seconds(one, device, precision) for one in operators)
        return own_s if device.is_gpu else own_s + host_seconds(operators, device)

    def layer(name: str, operators: Sequence[Operator]) -> LayerTime:
        flops, moved = sum(o.flops for o in operators), sum(o.moved_bytes for o in operators)
        ways = [[o for o in operators if o.is_backward == is_back] for is_back in (False, True)]
        return LayerTime(name, flops, moved, *map(took, ways))

    whole = step_seconds(work, device, precision)
    found = [layer(name, operators) for name, operators in in_layer.items()]
    waits = whole.gradient_s - sum(one.total_s for one in found)
    if waits > 1e-9 * whole.gradient_s:
        found.append(LayerTime(HOST, 0.0, 0.0, waits, 0.0))
    update = layer(OPTIMISER, work.update)
    return [*found, replace(update, forward_s=whole.update_s, backward_s=0.0)]
