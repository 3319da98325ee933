"""Published ways to combine copies, stages and shares, priced for a model and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gossamer.plan.parallel.layer import Block
from gossamer.plan.parallel.placement import Holding, Placement, Talk, placement_of, with_servers
from gossamer.plan.parallel.plan import Division, ParallelCase
from gossamer.plan.parallel.replicated_stages import plan_stages

_MOST_STAGES = 4


@dataclass(frozen=True)
class Hybrid:
    """One published arrangement."""

    name: str
    paper: str
    how: str
    step_s: float
    """For all samples of a step."""
    sent_bytes: float
    """That the busiest machine puts on its card in a step."""
    memory_bytes: float
    """Of the machine that needs most."""
    placement: Placement


def hybrids(case: ParallelCase) -> list[Hybrid]:
    """Those that the model and the number of workers allow."""
    n = case.cluster.workers
    found = [_copies(case)] if case.batch % n == 0 else []
    first = _first_linear(case.blocks)
    if n > 1 and first:
        found.append(one_weird_trick(case, first))
    if n % 2 == 0 and _towers(case.blocks):
        found.append(_two_towers(case))
    stages = max(
        (s for s in range(2, _MOST_STAGES + 1) if n % s == 0 and s <= len(case.blocks)), default=0
    )
    if stages and case.batch % (n // stages) == 0:
        found += [_with_servers(case, stages, is_adam=is_adam) for is_adam in (False, True)]
    if 1 < case.cluster.workers_per_machine < n and case.batch % n == 0:
        found.append(_hsdp(case))
    if n > 1:
        found.append(_pipedream(case))
    return found


def _parameters(blocks: Sequence[Block]) -> int:
    return sum(block.parameters for block in blocks)


def _copies(case: ParallelCase) -> Hybrid:
    division = Division(case.cluster.workers)
    cost = case.cost(division)
    n = division.data
    return Hybrid(
        "copies alone", "", "every machine holds the whole model", cost.step_s,
        2 * (n - 1) / n * _parameters(case.blocks) * case.number_bytes, cost.memory.total,
        placement_of(division, (0, len(case.blocks))),
    )  # fmt: skip


# ---------------------------------------------------------------------- fully connected parts


def _first_linear(blocks: Sequence[Block]) -> int:
    """Where the fully connected part begins, behind convolutions; 0 if there is none."""
    kinds = [{layer.kind for layer in block.layers} for block in blocks]
    at = next((at for at, own in enumerate(kinds) if "linear" in own), 0)
    has_images = any("convolution" in own for own in kinds[:at])
    return at if has_images and all("convolution" not in own for own in kinds[at:]) else 0


def one_weird_trick(case: ParallelCase, first: int) -> Hybrid:
    """Krizhevsky 2014: the convolutions have most of the work and few parameters, so every machine
    has a copy; the fully connected layers have the parameters, so every machine has a share.

    The machines take turns in sending the activations of their samples to all others, while the
    samples of the one before are computed (the paper's scheme b): all but the first turn is hidden
    where computing is longer.
    """
    n, links, size = case.cluster.workers, case.links, case.number_bytes
    own, passes = case.batch / n, case.pace.passes(case.batch / n, 1)
    ahead = sum(a for a, _ in passes[:first])
    now = done = 0.0
    for at in reversed(range(first)):
        now += passes[at][1]
        sent = case.blocks[at].parameters * size
        done = max(done, now) + links.all_reduce_s(n, 1, sent)
    shares = case.pace.passes(own, n)[first:]
    turn_s = sum(a + b for a, b in shares)
    crossing = [case.blocks[first - 1].outputs, *(b.outputs for b in case.blocks[first:-1])]
    sent_turn = sum(crossing) * own * size
    # In a turn one machine's samples go to all, through all layers, and their gradients come back.
    told_s = 2 * sum(links.all_gather_s(n, 1, one * own * size) for one in crossing)
    connected_s = max(turn_s, told_s) * n + min(turn_s, told_s)
    small, large = _parameters(case.blocks[:first]), _parameters(case.blocks[first:])
    held = case.state_bytes * (small + large / n)
    kept = own * size * sum(b.kept() for b in case.blocks[:first])
    kept += case.batch * size * sum(b.kept(n) for b in case.blocks[first:])
    update_s = case.pace.update_s(small + large / n, case.slots)
    blocks = len(case.blocks)
    shown = min(n, 8)
    holdings = [Holding(m, 0, first) for m in range(shown)]
    holdings += [Holding(m, first, blocks, m, shown) for m in range(shown)]
    everyone = tuple(range(shown))
    talks = (Talk("gradients", everyone, 0, first), Talk("activations", everyone, first, first))
    ring = 2 * (n - 1) / n
    return Hybrid(
        "one weird trick", "Krizhevsky 2014",
        "convolutions: copies; fully connected layers: shares",
        ahead + max(now, done) + connected_s + update_s,
        ring * (small * size + n * sent_turn), held + kept,
        Placement(shown, n - shown, 1, tuple(holdings), talks),
    )  # fmt: skip


def _towers(blocks: Sequence[Block]) -> bool:
    return any(layer.groups == 2 for block in blocks for layer in block.layers)


def _two_towers(case: ParallelCase) -> Hybrid:
    """Krizhevsky et al. 2012: half of the kernels on either device; a layer of two groups needs its
    own half only, all others gather both halves, and copies of such pairs sum their gradients."""
    n, size = case.cluster.workers, case.number_bytes
    division = Division(n // 2, 1, 2)
    own = case.batch / division.data
    gathered = 0.0
    talks: list[Talk] = []
    for at, block in enumerate(case.blocks):
        if at and any(layer.groups == 1 and layer.is_product for layer in block.layers):
            gathered += block.layers[0].inputs * own * size
            talks.append(Talk("activations", (0, 1), at, at))
    told_s = 2 * case.links.all_gather_s(2, 1, gathered)
    passes = case.pace.passes(own, 2)
    work_s = sum(a + b for a, b in passes)
    held = sum(block.held(2) for block in case.blocks)
    exchange_s = case.links.all_reduce_s(division.data, 2, held * size)
    plain = placement_of(division, (0, len(case.blocks)))
    kept = [*talks, *(talk for talk in plain.talks if talk.kind == "gradients")]
    ring = 2 * (division.data - 1) / division.data
    return Hybrid(
        "AlexNet's towers", "Krizhevsky, Sutskever & Hinton 2012",
        "half of the kernels on either device; they meet at few layers",
        work_s + told_s + exchange_s + case.pace.update_s(held, case.slots),
        gathered + ring * held * size,
        held * case.state_bytes + own * size * sum(b.kept(2) for b in case.blocks),
        Placement(plain.machines, plain.left_out, 2, plain.holdings, tuple(kept)),
    )  # fmt: skip


# ---------------------------------------------------------------------- servers


def _with_servers(case: ParallelCase, stages: int, *, is_adam: bool) -> Hybrid:
    """Dean et al. 2012: copies of several machines, none of which waits for another copy, and a
    server for each stage, on a machine of its own. Chilimbi et al. 2014 send a fully connected
    layer's activations and errors instead of its gradient where these are fewer; the server
    multiplies them."""
    n, size = case.cluster.workers, case.number_bytes
    own = case.batch * stages // n
    many = max((m for m in range(1, 2 * stages + 1) if own % m == 0), default=1)
    division = Division(n // stages, stages, 1, "1f1b", many)
    cost = case.cost(division)
    wires = case.cluster.network
    server = wires.server_bandwidth or wires.bandwidth
    pushed, fetched = [0.0] * stages, [0.0] * stages
    bounds = case.bounds(stages)
    for stage, (start, end) in enumerate(pairwise(bounds)):
        for layer in (layer for block in case.blocks[start:end] for layer in block.layers):
            told = float(layer.parameters)
            if is_adam and layer.kind == "linear":
                told = min(told, own * (layer.inputs + layer.outputs))
            pushed[stage] += told * size
            fetched[stage] += layer.parameters * size
    # Cards are full duplex: what all copies push goes in while what they fetch goes out.
    served_s = division.data * max(map(max, pushed, fetched)) / server
    alone_s = 2 * wires.latency + max(
        (up + down) / wires.bandwidth for up, down in zip(pushed, fetched, strict=True)
    )
    name = "Project Adam" if is_adam else "DistBelief"
    return Hybrid(
        name, "Chilimbi et al. 2014" if is_adam else "Dean et al. 2012",
        "as DistBelief; fully connected layers send activations and errors instead of gradients"
        if is_adam else
        f"copies of {stages} machines that do not wait for each other; a server for each stage",
        max(cost.pipeline_s + alone_s, served_s), max(pushed), cost.memory.total,
        with_servers(division, bounds),
    )  # fmt: skip


# ---------------------------------------------------------------------- shared parameters, stages


def _hsdp(case: ParallelCase) -> Hybrid:
    """Zhao et al. 2023: inside a machine the copies share parameters, gradients and optimiser."""
    division = Division(case.cluster.workers, sharding="hsdp")
    cost = case.cost(division)
    inside = min(division.data, case.cluster.workers_per_machine)
    between = division.data // inside
    size = _parameters(case.blocks) * case.number_bytes
    sent = 3 * (inside - 1) / inside * size + 2 * (between - 1) / between * size / inside
    return Hybrid(
        "HSDP", "Zhao et al. 2023",
        "parameters are shared inside a machine, and summed between machines", cost.step_s, sent,
        cost.memory.total, placement_of(division, (0, len(case.blocks))),
    )  # fmt: skip


def _pipedream(case: ParallelCase) -> Hybrid:
    """Narayanan et al. 2019: consecutive stages, each with as many copies as it needs."""
    plan = plan_stages(case)
    shown = min(case.cluster.workers, 8)
    holdings: list[Holding] = []
    talks: list[Talk] = []
    first, scale = 0, case.cluster.workers / shown
    starts: list[int] = []
    for number, stage in enumerate(plan.stages):
        left = len(plan.stages) - number - 1
        many = max(1, min(round(stage.copies / scale), shown - first - left))
        starts.append(first)
        holdings += [Holding(first + at, stage.start, stage.end) for at in range(many)]
        if many > 1:
            everyone = tuple(range(first, first + many))
            talks.append(Talk("gradients", everyone, stage.start, stage.end))
        first += many
    for number, (here, there) in enumerate(pairwise(starts)):
        end = plan.stages[number].end
        talks.append(Talk("activations", (here, there), end, end))
    return Hybrid(
        f"PipeDream {plan}", "Narayanan et al. 2019",
        "stages with copies of their own; never emptied, so layers have ages",
        plan.step_s, plan.sent_bytes, plan.memory_bytes,
        Placement(first, case.cluster.workers - first, 1, tuple(holdings), tuple(talks)),
    )  # fmt: skip
