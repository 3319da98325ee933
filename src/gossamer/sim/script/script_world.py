"""The simulated world where each worker is a process that runs a user's script.

The method's arithmetic, the network, faults and metrics are the simulator's. The loops decide how
long the run is, take their batches, descend with their own optimisers and say what they measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.config.settings import Settings
from gossamer.observe.callbacks import Callback
from gossamer.observe.observer import Observer
from gossamer.replica import cut
from gossamer.rules import mean_of_models
from gossamer.script.memory import ModelMemory
from gossamer.sim.buckets import Bucket, cut_buckets
from gossamer.sim.engine import Engine, NullEngine
from gossamer.sim.faults.mortal_servers import MortalServers
from gossamer.sim.gradients import Updates
from gossamer.sim.script.consensus import Consensus, HeldByWorker
from gossamer.sim.script.crew import Crew, ScriptModel
from gossamer.sim.script.script_gradients import ScriptGradients
from gossamer.sim.script.script_replicas import ScriptReplica, ScriptStore
from gossamer.sim.script.script_settings import ScriptSettings
from gossamer.sim.script.shared_calls import SharedCalls
from gossamer.sim.world import World
from gossamer.tasks.evaluator import output_parameters
from gossamer.tasks.flat_model import FlatModel


class ScriptBudget:
    """The loops decide when they are over; here their samples are counted."""

    promises = False
    is_spent = False
    samples = 1
    batch = 1

    def __init__(self, steps: int, *, is_synchronous: bool) -> None:
        """`steps` are about those of all workers."""
        self._steps = steps
        self.is_synchronous = is_synchronous
        self.processed = 0
        self.rounds = 0
        """How many steps some worker has begun."""
        self.samples_of_pass = 0
        """Of one pass over the loader, where the loop shares one out."""

    @property
    def epochs(self) -> float:
        return self.epochs_of(self.processed)

    def epochs_of(self, samples: int) -> float:
        """Passes over the loader; where none is shared out, the share of the run, which has a
        sample a step."""
        return samples / (self.samples_of_pass or self._steps)

    def expected_steps(self, workers: int) -> int:
        return max(1, round(self._steps / workers))

    def ordinary(self, batch: Any) -> list[Any]:
        """A loop's batches have the size that its loader gives them."""
        return [batch]

    def open_step(self, step: int) -> float:
        self.rounds = max(self.rounds, step + 1)
        return self.epochs

    def deliver(self, rank: int, samples: int, step: int, seconds: float) -> None:
        self.processed += samples

    def give_back(self, rank: int, steps: int) -> None:
        """What a worker that died has left is in the hands of the others' loops."""

    def reopen(self) -> bool:
        return False


class ScriptWorld(World):
    """Everything that the workers of one run share."""

    def __init__(
        self, settings: ScriptSettings, options: Mapping[str, Any], crew: Crew, model: ScriptModel,
        observers: Sequence[Observer] = (), callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        assert crew.memory is not None
        self.crew = crew
        self.memory: ModelMemory = crew.memory
        self.steps = settings.steps
        self.on_report: Callable[[int, Mapping[str, float]], None] = lambda rank, values: None
        self._period = int(options.get("period", 1))
        as_known = cast(FlatModel, model)
        super().__init__(settings, options, as_known, NullEngine(), observers, callbacks)
        self.consensus = Consensus(self)
        self.calls = SharedCalls(self)
        crew.is_interrupted = lambda: self.kernel.is_interrupted

    @property
    def source(self) -> ScriptGradients:
        return cast(ScriptGradients, self.batcher)

    @property
    def script_budget(self) -> ScriptBudget:
        return cast(ScriptBudget, self.budget)

    @property
    def main(self) -> int:
        """The worker that does what is done once."""
        return min(self.alive, default=0)

    # ------------------------------------------------------------------ what is the script's

    def _plan_samples(self, settings: Settings, *, is_synchronous: bool) -> None:
        steps = self.steps * self.size
        self.budget = cast(Any, ScriptBudget(steps, is_synchronous=is_synchronous))
        self.sampler = cast(Any, _NoSampler())

    def _make_replicas(
        self, settings: Settings, options: Mapping[str, Any], model: FlatModel
    ) -> None:
        crew, memory = self.crew, self.memory
        servers = settings.method.servers if self.method.has_server else 0
        self.slices = cut(model.layout.sizes, servers) if servers else ()
        self.workers = ScriptStore(crew, memory.value, crew.members, self.kernel)
        hosts = [] if crew.host is None else [crew.host]
        self.servers = tuple(
            ScriptStore(crew, memory.served[part].unsqueeze(0), hosts, self.kernel)
            for part in self.slices
        )
        self.ends = self.size + len(self.servers)
        self.mortal = MortalServers(self, standby="")
        self.epochs = [0.0] * self.size
        self.updates = Updates(self)
        self.replicas = [
            ScriptReplica(
                self.workers, rank, partial(self._rate_of, rank), self.updates.descended,
                memory.descent[rank], memory.point[rank], partial(self._own_of, rank),
            )
            for rank in range(self.size)
        ]  # fmt: skip
        self.replicas += [
            ScriptReplica(
                store, 0, partial(self._rate_of, number % self.size), self.updates.descended,
                memory.pushed[part], told=partial(self._told_server, number),
            )
            for number, (store, part) in enumerate(zip(self.servers, self.slices, strict=True))
        ]  # fmt: skip

    def _make_source(self, engine: Engine, model: FlatModel) -> ScriptGradients:
        return ScriptGradients(self, self.crew, model.initial_buffers.repeat(self.size, 1))

    def _make_buckets(
        self, settings: Settings, model: FlatModel, byte_scale: float
    ) -> tuple[Bucket, ...]:
        """What a parameter costs in backward is taken to be its size."""
        sizes = model.layout.sizes
        per_number = model.initial.element_size() * byte_scale
        return cut_buckets(sizes, [float(size) for size in sizes], per_number)

    def _rate_of(self, rank: int, pace: float) -> float:
        return self.source.loops[rank].learning_rate

    def _own_of(self, rank: int) -> Tensor | None:
        return self.source.delivered.get(rank)

    def _told_server(self, number: int) -> dict[str, Any]:
        """A server follows the schedule of one worker, as on real workers; if that one has died,
        that of another."""
        rank = number % self.size
        rank = rank if rank in self.alive else self.main
        options = self.source.loops[rank].options
        return {"server": number, **({} if options is None else {"options": options})}

    # ------------------------------------------------------------------ who leaves

    def end_worker(self, rank: int) -> None:
        super().end_worker(rank)
        self.consensus.gone(rank)
        if not self.budget.is_synchronous:
            return  # it goes on answering, and counts as before
        others = sorted(self.working)
        missing = set(others)

        def told(other: int) -> None:
            missing.discard(other)
            if not missing and self.members.died(rank):
                self.members.fail_lost()
                self.collectives.reconsider()

        for other in others:
            # Like the end of a connection: it arrives behind what is still on its way.
            self.post.carry(rank, other, 0, partial(told, other))

    def kill(self, rank: int) -> None:
        was_alive = rank in self.alive
        if was_alive:
            self.workers.value(rank)  # what it descends now is over before it dies
        super().kill(rank)
        if was_alive:
            self.crew.kill(rank)
            self.consensus.gone(rank)
            self.calls.gone(rank)

    # ------------------------------------------------------------------ the output model

    def standing(self) -> list[int]:
        """Those of the living whose models count: of a synchronous method all but those who have
        left a whole period of steps before the others."""
        speaking = [rank for rank in self.speakers if rank in self.alive]
        if not self.budget.is_synchronous:
            return speaking
        loops = self.source.loops
        most = max((loops[rank].made for rank in speaking), default=0)
        return [
            rank for rank in speaking
            if not loops[rank].has_ended or most - loops[rank].made < self._period
        ]  # fmt: skip

    def contribution(self, rank: int) -> HeldByWorker:
        replica = self.replicas[rank]
        return HeldByWorker(
            replica.snapshot(), replica.weight, self.source.buffers[rank].clone(),
            self.source.counters[rank],
        )  # fmt: skip

    def put_output(self, rank: int, found: Sequence[HeldByWorker]) -> Tensor:
        """Into a worker's row of the memory: the output model of these."""
        if self.method.output == "ensemble":
            found = [self.contribution(rank)]
        values = torch.stack([one.value for one in found])
        servers = self.replicas[self.size :]
        held = [s.snapshot() if s.output is None else s.output for s in servers]
        kind = "mean" if self.method.output == "ensemble" else self.method.output
        output = output_parameters(kind, values, [one.weight for one in found], held)
        statistics = mean_of_models(torch.stack([one.buffers for one in found]), [1.0] * len(found))
        memory = self.memory
        memory.output[rank].copy_(output)
        memory.raw("output_statistics", rank).copy_(statistics.view(torch.uint8))
        memory.raw("output_counters", rank).copy_(found[0].counters)
        return output


class _NoSampler:
    """The loops have their own."""

    def give_back(self, worker: int, indices: object) -> None:
        """The process that is gone has given them back."""


def distance_of(values: Tensor) -> float:
    """How far the rows are apart, as a share of their mean's norm."""
    mean = values.mean(0)
    spread = (values - mean).pow(2).sum(1).mean().sqrt()
    return float(spread / mean.norm().clamp_min(1e-30))
