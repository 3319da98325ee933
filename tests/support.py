"""What several test files need: small tasks and clusters, and runs that a test can look into."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer.methods import METHODS, Method, MethodSpec
from gossamer.settings import make_settings
from gossamer.sim.cluster import Cluster, Compute, Wires
from gossamer.sim.engine import Engine
from gossamer.sim.faults import Fault
from gossamer.sim.simulation import Simulation
from gossamer.sim.store import SimulatedReplica
from gossamer.tasks import Task, make_sampler, make_task

Role = Callable[..., Coroutine[Any, Any, None]]


@cache
def digits() -> Task:
    return make_task("digits-mlp")


@cache
def bowl(dimension: int = 6) -> Task:
    """A quadratic whose gradient is known in closed form."""
    return make_task(f"quadratic:dimension={dimension}")


def cluster_of(
    workers: int,
    *,
    seconds: float = 0.01,
    distribution: str = "normal",
    jitter: float = 0.05,
    latency: float = 1e-4,
    faults: Sequence[Fault] = (),
    **rest: Any,
) -> Cluster:
    return Cluster(
        workers=workers,
        compute=Compute(seconds=seconds, distribution=distribution, jitter=jitter),
        network=Wires(latency=latency, retransmission=0.02),
        faults=tuple(faults),
        **rest,
    )


def racing(workers: int) -> Cluster:
    """A cluster on which exchanges overlap in every way: wild compute times, late messages."""
    late = Fault("drop", amount=0.3)
    return cluster_of(workers, distribution="exponential", latency=3e-3, faults=[late])


def build(
    task: Task,
    method: str | MethodSpec,
    cluster: Cluster,
    *,
    steps: int,
    batch: int = 4,
    own_engine: Engine | None = None,
    **choices: Any,
) -> Simulation:
    """A run of so many steps per worker, made and not yet started."""
    epochs = steps * batch * cluster.workers / len(task.train)
    settings = make_settings(task, method, cluster, batch=batch, epochs=epochs, **choices)
    return Simulation(settings, engine=own_engine)


def rows(simulation: Simulation) -> Tensor:
    """The workers' replicas, up to date, in double precision."""
    store = simulation.world.parts.workers
    store.flush()
    return store.parameters.double()


def centre(simulation: Simulation) -> Tensor:
    """The server's replica, likewise."""
    (store,) = simulation.world.parts.servers
    store.flush()
    return store.parameters[0].double()


def total(simulation: Simulation) -> Tensor:
    """The sum of all replicas, with the server's where there is one."""
    whole = rows(simulation).sum(0)
    return whole + centre(simulation) if simulation.world.parts.servers else whole


def scatter(simulation: Simulation, seed: int = 0) -> None:
    """Start every replica from a value of its own, all of them far from zero."""
    generator = torch.Generator().manual_seed(seed)
    for store in (simulation.world.parts.workers, *simulation.world.parts.servers):
        store.parameters.normal_(mean=2.0, std=1.0, generator=generator)


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
