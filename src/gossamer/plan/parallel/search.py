"""The best way to divide a model over a cluster: all splits and schedules, priced in closed form.

The samples of a step are the same for all of them. What does not fit is out. Asynchronous pipelines
are priced and never called best, because their layers have ages, and closed forms know no
learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gossamer.config.cluster import Cluster
from gossamer.errors import ConfigurationError
from gossamer.pipeline.bubbles import FORMS
from gossamer.pipeline.schedule import chunks_per_machine, make_schedule_of
from gossamer.plan.parallel.layer import Block
from gossamer.plan.parallel.plan import SHARDINGS, Division, DivisionCost, ParallelCase
from gossamer.quantities import counted, show_bytes, show_percent
from gossamer.sim.pipelines.makespan import makespan

_MOST_MICROBATCHES = 128
_GO_ON = ("pipedream", "2bw")
_NANO = 1e9
_PLAYS = 4
"""Of each kind, how many schedules are played."""
_CLEAR = 1.02
"""How many times as fast something must be to be called faster."""


@dataclass(frozen=True)
class Found:
    """What was priced."""

    case: ParallelCase
    priced: int
    """How many divisions there are."""
    fitting: tuple[DivisionCost, ...]
    """What fits, the fastest first."""
    too_large: tuple[DivisionCost, ...]
    """What does not fit, by what it needs."""

    @property
    def best(self) -> DivisionCost:
        """The fastest that trains as one machine would."""
        return next(one for one in self.fitting if not one.division.is_asynchronous)

    def fastest(self, allows: Callable[[Division], bool]) -> DivisionCost | None:
        """The fastest of a kind that fits."""
        return next((one for one in self.fitting if allows(one.division)), None)

    def leanest(self, allows: Callable[[Division], bool]) -> DivisionCost | None:
        """Of a kind of which nothing fits, what needs least."""
        return next((one for one in self.too_large if allows(one.division)), None)

    def kinds(self) -> dict[str, DivisionCost]:
        """The fastest of each kind that fits."""
        shown = {name: self.fastest(allows) for name, allows in KINDS.items()}
        return {name: one for name, one in shown.items() if one is not None}

    def reasons(self) -> list[str]:
        """Why the best is the best: what keeps the simpler kinds from it."""
        best, said = self.best, list[str]()
        seen = set[Division]()
        for name, allows in KINDS.items():
            if name in _ASYNCHRONOUS_KINDS or allows(best.division):
                continue
            other = self.fastest(allows)
            if other is None:
                least = self.leanest(allows)
                if least is not None:
                    said.append(f"{name}: {self._too_large(least)}")
            elif other.division not in seen:
                seen.add(other.division)
                said.append(f"{name}: {_slower(other, best)}")
        return said

    def _too_large(self, least: DivisionCost) -> str:
        has, need = self.case.cluster.compute.memory, least.memory
        return (
            f"does not fit; a machine has {show_bytes(has)} and needs at least "
            f"{show_bytes(need.total)} ({need})"
        )


def _slower(other: DivisionCost, best: DivisionCost) -> str:
    times = other.step_s / best.step_s
    parts = {
        "the exchange between copies": other.exchange_s, "bubbles": other.bubble_s,
        "sums inside layers": other.sums_s, "computing": other.work_s,
        "the optimiser": other.update_s,
    }  # fmt: skip
    own = {
        "the exchange between copies": best.exchange_s, "bubbles": best.bubble_s,
        "sums inside layers": best.sums_s, "computing": best.work_s, "the optimiser": best.update_s,
    }  # fmt: skip
    if times < _CLEAR:
        return f"as fast within {show_percent(_CLEAR - 1)} ({other.division})"
    more = max(parts, key=lambda name: parts[name] - own[name])
    share = show_percent(parts[more] / other.step_s)
    return f"{times:.3g} times the time, of which {share} is {more} ({other.division})"


KINDS: dict[str, Callable[[Division], bool]] = {
    "copies alone": lambda d: d.machines == 1 and not d.sharding,
    "copies that share their parameters": lambda d: d.machines == 1 and bool(d.sharding),
    "stages and copies": lambda d: d.stages > 1 and d.tensor == 1 and not d.is_asynchronous,
    "shares of layers and copies": lambda d: d.tensor > 1 and d.stages == 1,
    "all three": lambda d: d.stages > 1 and d.tensor > 1 and not d.is_asynchronous,
    "a pipeline that is never emptied": lambda d: d.is_asynchronous,
}
_ASYNCHRONOUS_KINDS = ("a pipeline that is never emptied",)


def search(case: ParallelCase) -> Found:
    """Price every division of the cluster; refuse a model for which none fits."""
    has = case.cluster.compute.memory
    costs = [case.cost(one) for one in divisions(case)]
    fitting = [one for one in costs if not has or one.memory.total <= has]
    large = [one for one in costs if has and one.memory.total > has]
    fitting.sort(key=_rank)
    fitting = sorted(_played_first(fitting), key=_rank)
    large.sort(key=lambda one: one.memory.total)
    found = Found(case, len(costs), tuple(fitting), tuple(large))
    if not any(not one.division.is_asynchronous for one in fitting):
        least = large[0]
        raise ConfigurationError(
            f"the model fits into no division of {counted(case.cluster.workers, 'worker')}: with "
            f"{least.division}, which needs least, a machine needs "
            f"{show_bytes(least.memory.total)} ({least.memory}) and has {show_bytes(has)}; take "
            "more workers, more memory or a smaller batch"
        )
    return found


def _rank(one: DivisionCost) -> tuple[float, int, bool, bool, int]:
    """By time to three digits, and of those that are alike the simplest first."""
    division = one.division
    return (
        float(f"{one.step_s:.3g}"), division.machines, bool(division.sharding),
        bool(division.recompute), division.microbatches,
    )  # fmt: skip


def _played_first(ranked: Sequence[DivisionCost]) -> list[DivisionCost]:
    """Play the leading schedules of each kind, because on thin links the closed forms of some are
    too short; those that were not played stay behind these."""
    kept = list[DivisionCost]()
    for allows in KINDS.values():
        own = [one for one in ranked if allows(one.division)]
        if own and own[0].division.stages > 1 and not own[0].division.is_asynchronous:
            own = [with_play(one) for one in own[:_PLAYS]]
        kept += own
    return kept


def with_play(cost: DivisionCost) -> DivisionCost:
    """The cost with the time of its pipeline as the simulator plays the schedule; unchanged where
    PyTorch does not make that table."""
    division, passes = cost.division, cost.chunk_passes
    try:
        schedule = make_schedule_of(
            division.pipeline, division.stages, division.microbatches, division.chunks
        )
    except ConfigurationError:
        return cost
    ahead, back = ([round(_NANO * one) for one in row] for row in (passes.forward, passes.backward))
    took = makespan(schedule, ahead, round(_NANO * passes.link_s), back).units / _NANO
    closed_s = cost.work_s + cost.sums_s + cost.bubble_s
    bubble_s = max(0.0, cost.bubble_s + took - closed_s)
    return replace(cost, bubble_s=bubble_s, closed_s=closed_s)


def over_microbatches(case: ParallelCase, chosen: Division) -> list[DivisionCost]:
    """The same split and schedule with other numbers of micro-batches: memory against time."""
    found: list[DivisionCost] = []
    for many in _divisors(case.batch // chosen.data):
        is_loop = chosen.chunks > 1
        if many <= _MOST_MICROBATCHES and not (
            is_loop and (many % chosen.stages or many < 2 * chosen.stages)
        ):
            found.append(case.cost(replace(chosen, microbatches=many)))
    return found


def divisions(case: ParallelCase) -> Iterator[Division]:
    """Everything that divides the workers and the samples without rest."""
    workers, has_attention = case.cluster.workers, _has(case.blocks, "attention")
    widest = max((_widest(block) for block in case.blocks), default=1)
    for tensor in _divisors(workers):
        if tensor > widest:
            continue
        for stages in _divisors(workers // tensor):
            data = workers // tensor // stages
            if stages > len(case.blocks) or case.batch % data:
                continue
            base = Division(data, stages, tensor, is_sequence_split=has_attention and tensor > 1)
            for one in _orders(base, case.batch // data, len(case.blocks)):
                if one.sharding == "hsdp" and not _has_islands(case.cluster):
                    continue
                yield one
                yield replace(one, recompute="full")
                if has_attention:
                    yield replace(one, recompute="attention")


def _orders(base: Division, batch: int, blocks: int) -> Iterator[Division]:
    """Schedules and micro-batches of a split; without stages, ways to share parameters."""
    parts = [m for m in _divisors(batch) if m <= _MOST_MICROBATCHES]
    if base.stages == 1:
        for sharding in SHARDINGS if base.data > 1 and base.tensor == 1 else [""]:
            for many in parts:
                yield replace(base, microbatches=many, sharding=sharding)
        return
    for name in FORMS:
        chunks = chunks_per_machine(name)
        if base.stages * chunks > blocks:
            continue
        for many in parts:
            if chunks == 1 or (many % base.stages == 0 and many >= 2 * base.stages):
                yield replace(base, pipeline=name, microbatches=many, chunks=chunks)
    for name in _GO_ON:
        for many in parts:
            if many == 1 if name == "pipedream" else many >= base.stages:
                yield replace(base, pipeline=name, microbatches=many)


def _divisors(count: int) -> list[int]:
    return [one for one in range(1, count + 1) if count % one == 0]


def _has(blocks: tuple[Block, ...], kind: str) -> bool:
    return any(layer.kind == kind for block in blocks for layer in block.layers)


def _has_islands(cluster: Cluster) -> bool:
    """Whether there are several machines of several workers each."""
    return 1 < cluster.workers_per_machine < cluster.workers


def _widest(block: Block) -> int:
    """Over how many machines the layers of a block can be divided: by heads or by outputs."""
    return max((layer.heads or layer.outside // layer.groups for layer in block.layers), default=1)
