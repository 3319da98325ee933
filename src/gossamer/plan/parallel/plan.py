"""A model divided over a cluster: the time of a step and the memory of a machine, in closed form.

Copies of the model work on samples of their own (`data`), consecutive stages on consecutive layers
(`stages`), and machines that hold each layer of a stage together have a share of it (`tensor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from gossamer.config.cluster import Cluster
from gossamer.errors import ConfigurationError
from gossamer.pipeline.bubbles import FORMS, ChunkPasses, step_seconds
from gossamer.pipeline.schedule import places_of
from gossamer.pipeline.shape import ASYNCHRONOUS, ReplicaShape
from gossamer.pipeline.stages import cut_bounds
from gossamer.plan.parallel.layer import Block
from gossamer.plan.parallel.links import ClusterLinks
from gossamer.plan.parallel.pace import PassTimes
from gossamer.quantities import counted, show_bytes
from gossamer.specs import print_spec

SHARDINGS = {
    "": "every copy holds all of its parameters",
    "fsdp": "the copies hold a share of parameters, gradients and optimiser each, and gather them",
    "hsdp": "the same inside a machine; between machines the shares are summed",
}
RECOMPUTING = {
    "": "activations are kept",
    "attention": "those between the positions of attention are computed again",
    "full": "only what enters a block is kept",
}


@dataclass(frozen=True)
class Division:
    """How many copies, stages and shares there are, and the order of work."""

    data: int = 1
    stages: int = 1
    tensor: int = 1
    pipeline: str = "1f1b"
    microbatches: int = 1
    chunks: int = 1
    sharding: str = ""
    recompute: str = ""
    is_sequence_split: bool = False
    """Whether machines that hold a layer together divide its positions where they have no share of
    its parameters; as many bytes are sent."""

    @property
    def machines(self) -> int:
        """Of one copy."""
        return self.stages * self.tensor

    @property
    def is_asynchronous(self) -> bool:
        return self.pipeline in ASYNCHRONOUS and self.stages > 1

    @property
    def shape(self) -> ReplicaShape:
        """As the methods know it."""
        if self.machines == 1:
            return ReplicaShape()
        is_usual = self.chunks == ReplicaShape(pipeline=self.pipeline).per_machine
        return ReplicaShape(
            self.stages, self.tensor, self.pipeline,
            0 if self.is_asynchronous and self.pipeline != "2bw" else self.microbatches,
            0 if is_usual else self.chunks,
        )  # fmt: skip

    def spec(self, method: str = "all_reduce") -> str:
        """What `gossamer simulate --method` plays, if the parameters are not sharded."""
        return print_spec(method, self.shape.options())

    def __str__(self) -> str:
        parts = [counted(self.data, "copy", "copies")]
        if self.stages > 1:
            parts.append(f"{self.stages} stages ({self.pipeline})")
        if self.tensor > 1:
            parts.append(f"{self.tensor} shares")
        said = " x ".join(parts)
        if self.microbatches > 1:
            said += f", {self.microbatches} micro-batches"
        if self.sharding:
            said += f", {self.sharding}"
        if self.recompute:
            said += f", recomputing {'all' if self.recompute == 'full' else self.recompute}"
        return said


@dataclass(frozen=True)
class MachineMemory:
    """The bytes of the machine that needs most, by what needs them."""

    states: float
    """Parameters, gradient and optimiser."""
    versions: float
    """Older weights that an asynchronous pipeline keeps."""
    activations: float
    gathered: float
    """Parameters of the others, while a block is computed."""

    @property
    def total(self) -> float:
        return self.states + self.versions + self.activations + self.gathered

    def __str__(self) -> str:
        parts = {
            "parameters, gradients and optimiser": self.states, "older weights": self.versions,
            "activations": self.activations, "gathered parameters": self.gathered,
        }  # fmt: skip
        return ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)


@dataclass(frozen=True)
class DivisionCost:
    """What a division costs: a step of all samples, and the memory of a machine."""

    division: Division
    samples: int
    work_s: float
    """The passes of the busiest machine."""
    sums_s: float
    """Of that machine, the sums over those that hold its layers together."""
    bubble_s: float
    """What it waits for in its pipeline."""
    exchange_s: float
    """Between copies, as far as computing does not hide it."""
    update_s: float
    memory: MachineMemory
    chunk_passes: ChunkPasses
    closed_s: float | None = None
    """Of the pipeline, by its closed form, where the schedule was played instead."""

    @property
    def pipeline_s(self) -> float:
        return self.work_s + self.sums_s + self.bubble_s

    @property
    def step_s(self) -> float:
        return self.pipeline_s + self.exchange_s + self.update_s

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step_s if self.step_s else float("inf")


@dataclass(frozen=True)
class ParallelCase:
    """The model, the cluster and the samples of a step, which all divisions share."""

    blocks: tuple[Block, ...]
    cluster: Cluster
    pace: PassTimes
    batch: int
    """Samples of a step, of all copies together."""
    slots: int = 1
    """The vectors of the optimiser's state."""
    number_bytes: int = 4
    """Of a number of activations, and of a parameter as it is computed with and sent."""
    workspace: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigurationError(f"the samples of a step must be at least 1, got {self.batch}")

    @property
    def state_bytes(self) -> float:
        """Of a parameter: 4 + 4 in 32 bits, or 2 + 2 and a copy of 4 in 16; and the optimiser."""
        return 8.0 + 4.0 * self.slots

    @cached_property
    def links(self) -> ClusterLinks:
        return ClusterLinks(self.cluster)

    @cached_property
    def _cuts(self) -> dict[int, list[int]]:
        return {}

    @cached_property
    def _known_sums(self) -> dict[tuple[float, int], list[float]]:
        return {}

    def bounds(self, chunks: int) -> list[int]:
        """The blocks with which the chunks begin, and the end."""
        if chunks not in self._cuts:
            work = [2 * block.macs + block.outputs for block in self.blocks]
            self._cuts[chunks] = cut_bounds(work, chunks)
        return self._cuts[chunks]

    # ------------------------------------------------------------------ time

    def cost(self, division: Division) -> DivisionCost:
        """Price one division."""
        own = self.batch / division.data / division.microbatches
        passes, sums = self.chunk_passes(division, own)
        m, busy_s = division.microbatches, passes.busiest_s()
        if division.is_asynchronous:
            pipeline_s = m * max(busy_s, 2 * passes.link_s)
        else:
            pipeline_s = step_seconds(division.pipeline, m, passes)
        exchange_s = self._exchange_s(division, passes, own)
        update_s = self.pace.update_s(
            max(self._held(division)) / self._sharers(division), self.slots
        )
        return DivisionCost(
            division, self.batch, m * (busy_s - sums), m * sums, pipeline_s - m * busy_s,
            exchange_s, update_s, self.memory(division), passes,
        )  # fmt: skip

    def chunk_passes(self, division: Division, samples: float) -> tuple[ChunkPasses, float]:
        """The passes of each chunk for a micro-batch, and what the busiest machine sums in it."""
        tensor, chunks = division.tensor, division.stages * division.chunks
        blocks = list(self.pace.passes(samples, tensor))
        sums = self._sums(samples, tensor)
        again = [0.0] * len(blocks)
        if division.recompute == "full":
            again = [ahead + sums[at] for at, (ahead, _) in enumerate(blocks)]
        elif division.recompute == "attention":
            again = list(self.pace.attention_s(samples, tensor))
        forward = [ahead + sums[at] for at, (ahead, _) in enumerate(blocks)]
        backward = [back + sums[at] + again[at] for at, (_, back) in enumerate(blocks)]
        bounds = self.bounds(chunks)
        sent = max((self.blocks[at - 1].outputs for at in bounds[1:-1]), default=0.0)
        places = places_of(division.pipeline, division.stages, division.chunks)
        link_s = self.links.send_s(tensor, division.machines, sent * samples * self.number_bytes)
        passes = ChunkPasses(
            _by_chunk(forward, bounds), _by_chunk(backward, bounds), places,
            link_s if division.stages > 1 else 0.0,
        )  # fmt: skip
        summed = [0.0] * division.stages
        for place, own in zip(places, _by_chunk(sums, bounds), strict=True):
            summed[place] += own * (3 if division.recompute == "full" else 2)
        return passes, max(summed)

    def _sums(self, samples: float, tensor: int) -> list[float]:
        """Of each block in one direction, between the machines that hold it together."""
        if (samples, tensor) not in self._known_sums:
            size = samples * self.number_bytes
            self._known_sums[samples, tensor] = [
                sum(self.links.all_reduce_s(tensor, 1, one * size) for one in block.reductions)
                for block in self.blocks
            ]
        return self._known_sums[samples, tensor]

    def _exchange_s(self, division: Division, passes: ChunkPasses, samples: float) -> float:
        """The gradients of the copies. With one stage they go while the backward pass of the last
        micro-batch goes on, block by block; with several, when the pipeline is empty."""
        stride, size = division.machines, float(self.number_bytes)
        if self._sharers(division) > 1:
            return self._sharded_s(division, samples)
        if division.data == 1:
            return 0.0
        if division.stages > 1:
            most = max(self._held(division)) * size
            return self.links.all_reduce_s(division.data, stride, most)
        now = done = 0.0
        blocks = self.pace.passes(samples, division.tensor)
        sums = self._sums(samples, division.tensor)
        for at, block in reversed(list(enumerate(self.blocks))):
            now += blocks[at][1] + sums[at]
            bytes_ = block.held(division.tensor) * size
            done = max(done, now) + self.links.all_reduce_s(division.data, stride, bytes_)
        return max(0.0, done - now)

    def _sharded_s(self, division: Division, samples: float) -> float:
        """Each block's parameters are gathered before either pass, its gradient is scattered
        after the backward pass, and what computing of the same micro-batch hides is not counted."""
        links, m = self.links, division.microbatches
        members, between = self._shard_group(division)
        stride, size = division.machines, float(self.number_bytes)
        whole = sum(block.held(division.tensor) for block in self.blocks) * size
        gather_s = links.all_gather_s(members, stride, whole)
        passes = self.pace.passes(samples, division.tensor)
        ahead, back = sum(a for a, _ in passes), sum(b for _, b in passes)
        # The first gather and the last scatter have nothing to hide behind.
        largest = max(block.held(division.tensor) for block in self.blocks) * size
        edge_s = links.all_gather_s(members, stride, largest)
        hidden_s = max(0.0, gather_s - ahead) + max(0.0, 2 * gather_s - back)
        last_s = links.all_reduce_s(between, stride * members, whole / members)
        return m * hidden_s + 2 * edge_s + last_s

    def _shard_group(self, division: Division) -> tuple[int, int]:
        """Copies that share the parameters, and such groups."""
        if division.sharding == "hsdp":
            inside = max(1, self.cluster.workers_per_machine // division.machines)
            members = min(division.data, inside)
            return members, division.data // members
        return (division.data if division.sharding else 1), 1

    def _sharers(self, division: Division) -> int:
        return self._shard_group(division)[0]

    # ------------------------------------------------------------------ memory

    def _held(self, division: Division) -> list[float]:
        """Parameters on a machine of each stage."""
        bounds = self.bounds(division.stages * division.chunks)
        places = places_of(division.pipeline, division.stages, division.chunks)
        held = [0.0] * division.stages
        for place, (start, end) in zip(places, pairwise(bounds), strict=True):
            held[place] += sum(block.held(division.tensor) for block in self.blocks[start:end])
            for block in self.blocks[start:end]:
                tied = sum(layer.tied for layer in block.layers)
                # What another machine has, this one holds again.
                held[place] += tied / division.tensor if place != places[0] else 0.0
        return held

    def memory(self, division: Division) -> MachineMemory:
        """Of the machine that needs most."""
        return max(self.memories(division), key=lambda one: one.total)

    def memories(self, division: Division) -> list[MachineMemory]:
        """Of a machine of each stage."""
        sharers, size = self._sharers(division), self.number_bytes
        gathered = 0.0
        if sharers > 1:
            gathered = 2 * size * max(block.held(division.tensor) for block in self.blocks)
        versions = division.shape.versions if division.is_asynchronous else (1,) * division.stages
        return [
            MachineMemory(
                held * self.state_bytes / sharers, (kept - 1) * size * held / sharers,
                activations + self.workspace, gathered,
            )
            for held, kept, activations in zip(
                self._held(division), versions, self._activations(division), strict=True
            )
        ]  # fmt: skip

    def _activations(self, division: Division) -> list[float]:
        """Bytes on a machine of each stage: those of all micro-batches that it has begun."""
        p, m, v = division.stages, division.microbatches, division.chunks
        own = self.batch / division.data / m * self.number_bytes
        tensor, is_full = division.tensor, division.recompute == "full"
        shares = tensor if division.is_sequence_split else 1
        kept, most = [0.0] * p, [0.0] * p
        bounds = self.bounds(p * v)
        places = places_of(division.pipeline, p, v)
        for place, (start, end) in zip(places, pairwise(bounds), strict=True):
            for at in range(start, end):
                whole = self._kept(self.blocks[at], division, shares)
                enters = self.blocks[at - 1].outputs if at else self.blocks[0].layers[0].inputs
                kept[place] += enters if is_full else whole
                most[place] = max(most[place], whole if is_full else 0.0)
        if division.is_asynchronous:
            begun = [p - stage for stage in range(p)]
        else:
            begun = [FORMS[division.pipeline].held_at(p, m, v, stage) for stage in range(p)]
        return [
            own * (many / v * held + peak)
            for many, held, peak in zip(begun, kept, most, strict=True)
        ]

    def _kept(self, block: Block, division: Division, shares: int) -> float:
        is_selective = division.recompute == "attention"
        if shares > 1:
            return block.kept(1, is_selective=is_selective) / shares
        return block.kept(division.tensor, is_selective=is_selective)


def _by_chunk(values: Sequence[float], bounds: Sequence[int]) -> list[float]:
    total = [0.0, *accumulate(values)]
    return [total[end] - total[start] for start, end in pairwise(bounds)]
