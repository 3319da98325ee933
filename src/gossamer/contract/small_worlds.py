"""Small tasks and clusters, and runs that one can look into: what the laws are checked in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import Fault
from gossamer.config.settings import make_settings
from gossamer.methods import MethodSpec
from gossamer.sim.engine import Engine, Evaluated
from gossamer.sim.simulation import Simulation
from gossamer.tasks import Task, make_task


@cache
def digits() -> Task:
    return make_task("digits-mlp")


@cache
def bowl(dimension: int = 6) -> Task:
    """A quadratic whose gradient is known in closed form."""
    return make_task(f"quadratic:dimension={dimension}")


class Pieces(nn.Module):
    """A vector that is kept as several parameters, so that servers can share it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, points: Tensor) -> Tensor:
        return torch.cat(list(self.parts)) - points


@cache
def pieces(*sizes: int) -> Task:
    """The quadratic over several parameter tensors."""
    return dataclasses.replace(bowl(sum(sizes)), make_model=lambda: Pieces(sizes))


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
    store = simulation.world.workers
    store.flush()
    return store.parameters.double()


def centre(simulation: Simulation) -> Tensor:
    """The replica that the servers hold together, likewise."""
    servers = simulation.world.mortal.acting
    return torch.cat([replica.snapshot() for replica in servers]).double()


def total(simulation: Simulation) -> Tensor:
    """The sum of all replicas, with the server's where there is one."""
    whole = rows(simulation).sum(0)
    return whole + centre(simulation) if simulation.world.servers else whole


def scatter(simulation: Simulation, seed: int = 0) -> None:
    """Start every replica from a value of its own, all of them far from zero."""
    generator = torch.Generator().manual_seed(seed)
    world = simulation.world
    servers = len(world.slices)
    for store in (world.workers, *world.servers[:servers]):
        store.parameters.normal_(mean=2.0, std=1.0, generator=generator)
    for server, standby in zip(world.servers[:servers], world.servers[servers:], strict=False):
        standby.parameters.copy_(server.parameters)


def watch_end(simulation: Simulation) -> tuple[list[int], list[int], list[int]]:
    """The times, filled as the run goes, at which a replica was changed, a gradient begun and a
    gradient delivered."""
    world = simulation.world
    changed, begun, delivered = [0], [0], [0]

    def watch(holder: Any, name: str, times: list[int]) -> None:
        usual = getattr(holder, name)

        def watched(*arguments: Any) -> Any:
            times.append(world.kernel.now)
            return usual(*arguments)

        setattr(holder, name, watched)

    for store in (world.workers, *world.servers):
        watch(store, "writable", changed)
    watch(world.batcher, "start", begun)
    watch(world.observer, "computed", delivered)
    return changed, begun, delivered


class Ones:
    """An engine whose every gradient is one; it keeps the points at which they were asked for."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.points: list[Tensor] = []

    def evaluate(self, points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor) -> Evaluated:
        self.points.extend(points.clone())
        return Evaluated(torch.ones_like(points), points.new_zeros(points.shape[0]), buffers)
