"""Replicas of several machines among the candidates: where the model does not fit on one, or where
closed forms say that the cluster gets through more samples that way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec, parse_method
from gossamer.pipeline.schedule import chunks_per_machine
from gossamer.pipeline.shape import ReplicaShape
from gossamer.plan.hardware.room import copies_of
from gossamer.plan.hardware.sheet import SheetChoices
from gossamer.plan.parallel.plan import Division, DivisionCost, ParallelCase
from gossamer.plan.parallel.question import question_of_task
from gossamer.quantities import show_bytes

_METHODS = ("all_reduce", "ad_psgd", "local_sgd:period=8")
"""One for each way to couple replicas: every step, in pairs, now and then."""
_CLEARLY = 1.1
"""How many times the samples per second make a split worth a search."""


class Splits:
    """The shapes of replicas that may be worth trying on a cluster, for a task and its batch."""

    def __init__(self, base: Settings) -> None:
        self._base = base
        cluster, compute = base.cluster, base.cluster.compute
        # Closed forms know machines that are alike; the search itself plays the others.
        alike = dataclasses.replace(cluster, faults=())
        self._case: ParallelCase | None = None
        if cluster.workers > 1 and not cluster.sites.names:
            try:
                chosen = SheetChoices(optimiser=base.optimiser)
                self._case = question_of_task(base.task, alike, base.batch, chosen).case
            except ConfigurationError:
                self._case = None  # a model that nobody can cut
        self._knows_batches = bool(compute.per_sample)

    def rows(self, refusal: str) -> list[str]:
        """The best shape with several methods, or nothing: `refusal` says why a whole model does
        not fit on a machine, if it does not."""
        case = self._case
        if case is None or not (refusal or self._knows_batches):
            return []
        priced = [self._priced(one) for one in self._divisions(case)]
        has = case.cluster.compute.memory
        fitting = [one for one in priced if not has or one.memory.total <= has]
        if not fitting:
            return []
        best = max(fitting, key=lambda one: one.samples_per_second)
        plain = self._priced(Division(case.cluster.workers))
        if not refusal and best.samples_per_second < _CLEARLY * plain.samples_per_second:
            return []
        found: list[str] = []
        for method in _METHODS:
            if method == "all_reduce" or best.division.data > 1:
                shaped = dataclasses.replace(parse_method(method), shape=best.division.shape)
                found.append(str(shaped))
        return found

    def _divisions(self, case: ParallelCase) -> Iterator[Division]:
        """1F1B with its usual micro-batches on every shape that divides the workers."""
        workers, batch = case.cluster.workers, self._base.batch or 1
        for machines in range(2, workers + 1):
            for stages in range(1, machines + 1):
                if workers % machines or machines % stages or stages > len(case.blocks):
                    continue
                shape = ReplicaShape(stages, machines // stages)
                many = shape.microbatches_of(batch) if stages > 1 else 1
                yield Division(workers // machines, stages, shape.tensor, "1f1b", many)

    def _priced(self, division: Division) -> DivisionCost:
        """Every replica keeps the batch of the settings."""
        assert self._case is not None
        batch = (self._base.batch or 1) * division.data
        return dataclasses.replace(self._case, batch=batch).cost(division)

    def refusal(self, spec: MethodSpec) -> str:
        """Why a method with such a shape does not fit; empty if it does, or if nobody can say."""
        case, shape = self._case, spec.shape
        has = self._base.cluster.compute.memory
        if case is None or not has:
            return ""
        batch, data = self._base.batch or 1, self._base.cluster.workers // shape.machines
        chunks = shape.chunks or chunks_per_machine(shape.pipeline)
        division = Division(
            data, shape.stages, shape.tensor, shape.pipeline, shape.microbatches_of(batch), chunks
        )
        memory = self._priced(division).memory
        replicas = dataclasses.replace(self._base.cluster, workers=data, faults=())
        held = memory.states * 4 / case.state_bytes
        need = memory.total + held * copies_of(spec, replicas, case.slots)
        if need <= has:
            return ""
        return f"a worker needs {show_bytes(need)} and has {show_bytes(has)} ({memory})"
