"""What several test files need: small tasks and clusters, and runs that a test can look into.

Those that the shipped contract of a method needs as well are in `gossamer.contract.small_worlds`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.config.cluster import Cluster
from gossamer.config.faults import Fault
from gossamer.contract.small_worlds import (
    Ones,
    Pieces,
    bowl,
    build,
    centre,
    cluster_of,
    digits,
    pieces,
    racing,
    rows,
    scatter,
    total,
    watch_end,
)
from gossamer.contract.storms import random_faults
from gossamer.mailbox import Mailbox, Receive
from gossamer.methods import METHODS, Method, MethodSpec
from gossamer.methods.shards import Push
from gossamer.runs.result import Result
from gossamer.sim.engine import Evaluated
from gossamer.sim.replica_matrix import SimulatedReplica
from gossamer.sim.simulation import Simulation
from gossamer.tasks import Task, make_sampler
from gossamer.tasks.keyed import key_of
from gossamer.worker import Message, Tag

__all__ = [
    "Ones",
    "Pieces",
    "bowl",
    "build",
    "centre",
    "cluster_of",
    "digits",
    "pieces",
    "racing",
    "random_faults",
    "rows",
    "scatter",
    "total",
    "watch_end",
]

Role = Callable[..., Coroutine[Any, Any, None]]


def unequal(workers: int, seed: int, *faults: Fault) -> Cluster:
    """Workers whose speeds differ up to tenfold."""
    factors = np.random.default_rng(seed).uniform(1.0, 10.0, workers)
    slow = [Fault("slow", worker=rank, amount=float(f)) for rank, f in enumerate(factors)]
    return cluster_of(workers, distribution="lognormal", jitter=0.4, faults=[*slow, *faults])


def spread(values: Tensor) -> float:
    """How far the rows are apart: the norm of what separates them from their mean."""
    return float((values - values.mean(0)).norm())


def only_here(worker: Role, like: str = "ensemble") -> MethodSpec:
    """A method that exists in one test, with the promises and the server of a known one."""
    known = METHODS[like]
    row = Method(
        "only_here", "test", "none", known.output, worker, known.promises,
        has_server=known.has_server, is_synchronous=known.is_synchronous,
    )  # fmt: skip
    return MethodSpec(row, {})


def before_each_descent(
    simulation: Simulation, call: Callable[[SimulatedReplica, Sequence[int]], None]
) -> None:
    """Call back with the replica and the versions that its gradients were read at."""

    def watch(replica: SimulatedReplica) -> None:
        usual = replica._on_descend

        def watched(seen: SimulatedReplica, read: Sequence[int]) -> None:
            call(seen, read)
            usual(seen, read)

        replica._on_descend = watched

    for replica in simulation.world.replicas:
        watch(replica)


def batches(task: Task, workers: int, batch: int, seed: int) -> Callable[[int], Tensor]:
    """The same batches that a synchronous run of that seed gives to its workers."""
    sampler = make_sampler(task.train.targets, workers, batch, "shuffled", seed, True)
    return lambda rank: torch.from_numpy(sampler.next(rank))


def bowl_gradient(task: Task, theta: Tensor, batch: Tensor) -> Tensor:
    """The quadratic's gradient, written out: h (theta - mean of the points)."""
    curvatures = torch.logspace(0.0, 1.0, len(theta), base=0.1, dtype=torch.float64)
    return curvatures * (theta - task.train.inputs[batch].double().mean(0))


class Signed:
    """An engine that signs its gradients: the n-th one of worker r is 1 in coordinate (r, n) and 0
    elsewhere. Descended along from zero at rate 1, parameters tell whose gradients they contain and
    how much of each."""

    def __init__(self, workers: int, dimension: int, seed: int) -> None:
        self.notices: list[str] = []
        self.shape = (workers, dimension // workers)
        self.read: dict[tuple[int, int], Tensor] = {}
        """What each gradient's point contained."""
        self._signer = {key_of(seed, r, n): (r, n) for r, n in np.ndindex(*self.shape)}

    def contents(self, parameters: Tensor) -> Tensor:
        """How much of each gradient is in there, [workers, gradients]."""
        workers, most = self.shape
        return -parameters[: workers * most].double().view(workers, most)

    def evaluate(self, points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor) -> Evaluated:
        gradients = torch.zeros_like(points)
        for row, key in enumerate(keys.tolist()):
            rank, n = self._signer[key]
            gradients[row, rank * self.shape[1] + n] = 1.0
            self.read[rank, n] = self.contents(points[row])
        return Evaluated(gradients, points.new_zeros(len(points)), buffers)


SIGNATURES = (60, 100, 30, 50)


def signed(
    method: str, cluster: Cluster, *, steps: int, seed: int = 0, **choices: Any
) -> tuple[Simulation, Signed]:
    """A run whose gradients are signed; up to four servers can share its parameters."""
    engine = Signed(cluster.workers, sum(SIGNATURES), seed)
    simulation = build(
        pieces(*SIGNATURES), method, cluster, steps=steps, seed=seed, own_engine=engine,
        engine="none", optimiser="sgd", learning_rate=1.0, **choices,
    )  # fmt: skip
    for store in (simulation.world.workers, *simulation.world.servers):
        store.parameters.zero_()
    return simulation, engine


class Watched(Mailbox):
    """A server's mailbox that tells of every push as it arrives."""

    def __init__(self, call: Callable[[int, Push], None]) -> None:
        super().__init__()
        self.call = call

    def deliver(self, tag: Tag, message: Message) -> Receive | None:
        if isinstance(message.payload, Push):
            self.call(message.source, message.payload)
        return super().deliver(tag, message)


def on_each_push(simulation: Simulation, call: Callable[[int, int, Push], None]) -> None:
    """Call back with the server, the sender and what it pushed."""
    world = simulation.world
    for server in range(world.size, world.ends):
        world.mailboxes[server] = Watched(partial(call, server))


def trained(method: str, cluster: Cluster, **choices: object) -> Simulation:
    """A run of true gradients on the quadratic, by plain SGD, that has ended."""
    usual = {"learning_rate": 0.05, "optimiser": "sgd", "engine": "loop", "evaluations": 1}
    simulation = build(pieces(3, 2, 1), method, cluster, steps=8, **(usual | choices))
    simulation.run()
    return simulation


def run_signed(
    method: str, cluster: Cluster, *, steps: int, seed: int = 0, **choices: object
) -> tuple[Signed, Result, list[Tensor]]:
    """A signed run; also what the server contained after each of its updates, from none on."""
    simulation, engine = signed(method, cluster, steps=steps, seed=seed, **choices)
    contents: list[Tensor] = []

    def note(replica: object, _: object) -> None:
        if replica is simulation.world.replicas[-1]:
            contents.append(engine.contents(centre(simulation)))

    before_each_descent(simulation, note)
    result = simulation.run()
    return engine, result, [*contents, engine.contents(centre(simulation))]
