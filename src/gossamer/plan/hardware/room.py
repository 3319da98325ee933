"""Whether a method fits into the memory of a worker, and by how much it does not."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.config.cluster import Cluster
from gossamer.config.settings import split_groups
from gossamer.methods import MethodSpec, parse_method
from gossamer.plan.hardware.operators import step_work
from gossamer.quantities import show_bytes
from gossamer.tasks import Task
from gossamer.tasks.flat_model import ModelSize

_LONG_RUN = 1_000_000
"""Steps per worker from which options that depend on the length of a run are derived."""


@dataclass(frozen=True)
class WorkerMemory:
    """The bytes that one worker needs at most, by what needs them."""

    size: ModelSize
    activation_bytes: float
    copies: float
    """The models that the method holds besides, its share of the servers among them."""
    workspace: float = 0.0

    @property
    def total(self) -> float:
        held = self.copies * self.size.model_bytes
        return self.size.worker_bytes + self.activation_bytes + held + self.workspace

    def __str__(self) -> str:
        parts = {
            "model": self.size.model_bytes + self.size.fixed_bytes,
            "gradient": self.size.model_bytes, "optimiser": self.size.optimiser_bytes,
            "activations": self.activation_bytes,
            "the method's own copies": self.copies * self.size.model_bytes,
        }  # fmt: skip
        return ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)


def copies_of(spec: MethodSpec, cluster: Cluster, slots: int) -> float:
    """The models that a worker of this method holds besides its replica, gradient and optimiser;
    with a server on the worker's machine also what that holds."""
    workers = len(split_groups(spec.groups, cluster)) or cluster.workers
    options = spec.resolve(workers, _LONG_RUN)
    own = spec.method.promises.memory(workers, options)
    if spec.method.has_server and spec.placement == "workers":
        own += (1 + slots) * -(-spec.servers // cluster.workers) / spec.servers
    return own


@dataclass(frozen=True)
class Room:
    """The memory of the workers of a cluster, for one task and batch."""

    cluster: Cluster
    size: ModelSize
    activation_bytes: float

    @staticmethod
    def of(
        task: Task, cluster: Cluster, batch: int, *, optimiser: str | None = None,
        precision: str = "fp32",
    ) -> Room:  # fmt: skip
        """The room for a task, whose activations are measured on fake tensors."""
        work = step_work(task, batch, optimiser=optimiser, precision=precision)
        return Room(cluster, work.size, work.activation_bytes)

    def need(self, method: str | MethodSpec, cluster: Cluster | None = None) -> WorkerMemory:
        where = self.cluster if cluster is None else cluster
        copies = copies_of(parse_method(method), where, self.size.slots)
        return WorkerMemory(self.size, self.activation_bytes, copies)

    def refusal(self, method: str | MethodSpec, cluster: Cluster | None = None) -> str:
        """Why the method does not fit, on this cluster or on one with other workers; empty if it
        does, or if nobody has said what there is."""
        has = self.cluster.compute.memory
        if not has or (need := self.need(method, cluster)).total <= has:
            return ""
        return (
            f"a worker needs {show_bytes(need.total)} and has {show_bytes(has)}, "
            f"{show_bytes(need.total - has)} too few ({need})"
        )
