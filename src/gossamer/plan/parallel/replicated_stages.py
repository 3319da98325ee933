"""PipeDream's planner: consecutive stages, each with copies of its own (Narayanan et al. 2019).

    A(j, m) = min over i < j and m' < m of max(A(i, m - m'), send(i), T(i -> j, m'))
    T(i -> j, m) = max(compute(i -> j), exchange(i -> j, m)) / m

A(j, m) is the time between two batches of the best pipeline of the first j blocks on m machines. A
stage of m copies takes m batches in turn and then sums its gradients, while it computes. The sum
is that of the cluster (a ring has 2 (m - 1) / m |w| / B), where the paper has 2 (m - 1) |w| / B.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from gossamer.plan.parallel.plan import ParallelCase


@dataclass(frozen=True)
class ReplicatedStage:
    """Consecutive blocks, and the machines that hold them all."""

    start: int
    end: int
    copies: int


@dataclass(frozen=True)
class ReplicatedStages:
    """The best pipeline. It is never emptied and keeps old weights, as PipeDream does."""

    stages: tuple[ReplicatedStage, ...]
    batch_s: float
    """Between two batches of one machine's samples."""
    workers: int
    sent_bytes: float
    memory_bytes: float

    @property
    def step_s(self) -> float:
        """For as many samples as all machines together have in a step."""
        return self.batch_s * self.workers

    def __str__(self) -> str:
        """As the paper writes it: 15-1 is fifteen copies of the first stage and one of the last."""
        return "-".join(str(stage.copies) for stage in self.stages)


def plan_stages(case: ParallelCase) -> ReplicatedStages:
    """The stages and copies with the shortest time between two batches."""
    workers, blocks = case.cluster.workers, len(case.blocks)
    own = case.batch / workers
    size = case.number_bytes
    compute = [0.0, *accumulate(a + b for a, b in case.pace.passes(own, 1))]
    held = [0.0, *accumulate(block.parameters for block in case.blocks)]
    send = [2 * case.links.send_s(1, workers, b.outputs * own * size) for b in case.blocks]
    links = case.links

    def stage_s(start: int, end: int, copies: int) -> float:
        exchange_s = links.all_reduce_s(copies, 1, (held[end] - held[start]) * size)
        return max(compute[end] - compute[start], exchange_s) / copies

    # The best time of the first blocks on so many machines, and the last stage of that pipeline.
    best: dict[tuple[int, int], tuple[float, ReplicatedStage]] = {}
    for end in range(1, blocks + 1):
        for machines in range(1, workers + 1):
            found = stage_s(0, end, machines), ReplicatedStage(0, end, machines)
            for start in range(1, end):
                for copies in range(1, machines):
                    before = best[start, machines - copies][0]
                    if before >= found[0] or send[start - 1] / copies >= found[0]:
                        continue
                    took = max(before, send[start - 1] / copies, stage_s(start, end, copies))
                    if took < found[0]:
                        found = took, ReplicatedStage(start, end, copies)
            best[end, machines] = found
    stages: list[ReplicatedStage] = []
    end, left = blocks, workers
    while end:
        stage = best[end, left][1]
        stages.insert(0, stage)
        end, left = stage.start, left - stage.copies
    return ReplicatedStages(
        tuple(stages), best[blocks, workers][0], workers, *_needs(case, stages, own)
    )


def _needs(case: ParallelCase, stages: list[ReplicatedStage], own: float) -> tuple[float, float]:
    """Bytes that a machine sends for each of its batches and holds, at the most. The first stage
    keeps as many batches and versions as fill the pipeline for each of its copies."""
    size, sent, memory = case.number_bytes, 0.0, 0.0
    for number, stage in enumerate(stages):
        blocks = case.blocks[stage.start : stage.end]
        parameters = sum(block.parameters for block in blocks)
        behind = sum(one.copies for one in stages[number:])
        versions = -(-behind // stage.copies)
        ring = 2 * (stage.copies - 1) / stage.copies * parameters * size
        crossing = own * size * (blocks[-1].outputs if number + 1 < len(stages) else 0.0)
        sent = max(sent, ring + crossing)
        held = parameters * (case.state_bytes + (versions - 1) * size)
        memory = max(memory, held + versions * own * size * sum(b.kept() for b in blocks))
    return sent, memory
