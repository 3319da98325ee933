"""What several test files need: small tasks and clusters, and runs that a test can look into."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import KINDS, Fault
from gossamer.config.settings import make_settings
from gossamer.mailbox import Mailbox, Receive
from gossamer.methods import METHODS, Method, MethodSpec
from gossamer.methods.shards import Push
from gossamer.runs.result import Result
from gossamer.sim.engine import Engine, Evaluated
from gossamer.sim.replica_matrix import SimulatedReplica
from gossamer.sim.simulation import Simulation
from gossamer.tasks import Task, make_sampler, make_task
from gossamer.tasks.keyed import key_of
from gossamer.worker import Message, Tag

Role = Callable[..., Coroutine[Any, Any, None]]


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


def unequal(workers: int, seed: int, *faults: Fault) -> Cluster:
    """Workers whose speeds differ up to tenfold."""
    factors = np.random.default_rng(seed).uniform(1.0, 10.0, workers)
    slow = [Fault("slow", worker=rank, amount=float(f)) for rank, f in enumerate(factors)]
    return cluster_of(workers, distribution="lognormal", jitter=0.4, faults=[*slow, *faults])


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


def random_faults(seed: int, workers: int, horizon_s: float, *, kills: int = 1) -> list[Fault]:
    """Faults drawn from a seed. All but deaths heal before three quarters of the horizon."""
    rng = random.Random(f"{seed}/faults")
    plan: list[Fault] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice([kind for kind in KINDS if kind != "kill"])
        at = rng.uniform(0.0, 0.5 * horizon_s)
        lasts = rng.uniform(0.02, 0.25) * horizon_s
        worker = rng.randrange(workers)
        if kind in ("slow", "slow-link"):
            plan.append(Fault(kind, at, lasts, worker, amount=rng.choice([2.0, 10.0, 100.0])))
        elif kind == "drop":
            plan.append(Fault(kind, at, lasts, amount=rng.uniform(0.01, 0.3)))
        elif kind == "delay":
            plan.append(Fault(kind, at, lasts, amount=rng.uniform(0.0, 0.05) * horizon_s))
        elif kind == "pause":
            plan.append(Fault(kind, at, lasts, worker))
        elif workers > 1:
            ranks = list(range(workers))
            rng.shuffle(ranks)
            cut = rng.randint(1, workers - 1)
            plan.append(
                Fault(kind, at, lasts, sides=(frozenset(ranks[:cut]), frozenset(ranks[cut:])))
            )
    for worker in rng.sample(range(workers), rng.randint(0, min(kills, workers - 2))):
        plan.append(Fault("kill", rng.uniform(0.0, horizon_s), worker=worker))
    return plan


def rows(simulation: Simulation) -> Tensor:
    """The workers' replicas, up to date, in double precision."""
    store = simulation.world.workers
    store.flush()
    return store.parameters.double()


def centre(simulation: Simulation) -> Tensor:
    """The replica that the servers hold together, likewise."""
    servers = simulation.world.replicas[simulation.world.size :]
    return torch.cat([replica.snapshot() for replica in servers]).double()


def total(simulation: Simulation) -> Tensor:
    """The sum of all replicas, with the server's where there is one."""
    whole = rows(simulation).sum(0)
    return whole + centre(simulation) if simulation.world.servers else whole


def scatter(simulation: Simulation, seed: int = 0) -> None:
    """Start every replica from a value of its own, all of them far from zero."""
    generator = torch.Generator().manual_seed(seed)
    for store in (simulation.world.workers, *simulation.world.servers):
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


def batches(task: Task, workers: int, batch: int, seed: int) -> Callable[[int], Tensor]:
    """The same batches that a synchronous run of that seed gives to its workers."""
    sampler = make_sampler(task.train.targets, workers, batch, "shuffled", seed, True)
    return lambda rank: torch.from_numpy(sampler.next(rank))


def bowl_gradient(task: Task, theta: Tensor, batch: Tensor) -> Tensor:
    """The quadratic's gradient, written out: h (theta - mean of the points)."""
    curvatures = torch.logspace(0.0, 1.0, len(theta), base=0.1, dtype=torch.float64)
    return curvatures * (theta - task.train.inputs[batch].double().mean(0))


class Ones:
    """An engine whose every gradient is one; it keeps the points at which they were asked for."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.points: list[Tensor] = []

    def evaluate(self, points: Tensor, buffers: Tensor, batches: Tensor, keys: Tensor) -> Evaluated:
        self.points.extend(points.clone())
        return Evaluated(torch.ones_like(points), points.new_zeros(points.shape[0]), buffers)


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
