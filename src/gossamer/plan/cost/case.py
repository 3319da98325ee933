"""The input and the output of a closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.config.cluster import Compute, Wires
from gossamer.errors import ConfigurationError
from gossamer.plan.cost.alpha_beta import AlphaBeta, Machines, server_way_s
from gossamer.plan.cost.pace import ComputeTime
from gossamer.plan.cost.workload import Piece, Workload


class NoClosedForm(ConfigurationError):
    """The step of this method on this cluster has no closed form; the message says why."""


@dataclass(frozen=True)
class StepParts:
    """The parts of one step in seconds; their sum is the step."""

    compute_s: float
    """The mean compute time."""
    waiting_s: float = 0.0
    """Waiting for workers whose step takes longer than the mean."""
    exposed_s: float = 0.0
    """Communication that computing does not hide, without other users of the network cards."""
    queueing_s: float = 0.0
    """The delay by other transfers through the same card, such as a server's."""
    rate: float = 1.0
    """Gradients per step and worker; above 1 if some workers continue while others wait."""
    backlog: float = 0.0
    """Transfers begun over transfers that a card can finish; above 1 a queue builds up."""
    ignores_jitter: bool = False
    """Whether varying compute times make the step longer than this figure."""

    @property
    def total_s(self) -> float:
        """Seconds per gradient."""
        return (self.compute_s + self.waiting_s + self.exposed_s + self.queueing_s) / self.rate


@dataclass(frozen=True)
class Meetings:
    """What a closed form needs of a topology."""

    name: str
    degrees: tuple[int, ...]
    """The most messages that cross one card in each of its rounds; all get that card's pace."""
    active: int = 0
    """The workers that ask; 0 where the graph is not bipartite."""
    passive: int = 0
    """The workers that answer."""
    links: int = 0
    """The pairs of one that asks and one that answers."""


@dataclass(frozen=True)
class Arrangement:
    """What does not depend on speeds and sizes: who takes part where, and the options."""

    ends: int
    """The number of workers, or of groups of workers."""
    members: int
    """The workers of one end."""
    machines: Machines
    leaves_rack: bool
    """Whether messages between ends leave their rack."""
    inside: Machines | None
    """The machines of one group; None without groups."""
    inside_leaves_rack: bool
    shares: tuple[float, ...]
    """The part of the model that each server holds."""
    servers_on_workers: bool
    meetings: Meetings | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """The input of a closed form."""

    ends: int
    """The number of workers, or of groups of workers."""
    pace: ComputeTime
    link: AlphaBeta
    machines: Machines
    wires: Wires
    workload: Workload
    pieces: tuple[Piece, ...]
    shards: tuple[float, ...]
    servers_on_workers: bool
    meetings: Meetings | None
    options: Mapping[str, Any]

    @property
    def model_bytes(self) -> float:
        return self.workload.model_bytes

    @property
    def server_seconds_per_byte(self) -> float:
        return 1 / (self.wires.server_bandwidth or self.wires.bandwidth)

    @property
    def model_s(self) -> float:
        """The transfer of a model through one card."""
        return self.model_bytes * self.link.seconds_per_byte

    def all_reduce_s(self, size_bytes: float) -> float:
        return self.machines.all_reduce_s(self.link, self.wires.collective, size_bytes)

    def lone_way_s(self) -> float:
        """The transfer of a model between the servers and one worker, without other transfers."""
        return server_way_s(self.link, self.server_seconds_per_byte, 1, self.shards)

    def crowded_way_s(self) -> float:
        """The same transfer for all workers at once."""
        return server_way_s(
            self.link, self.server_seconds_per_byte, self.ends, self.shards,
            on_workers=self.servers_on_workers,
        )  # fmt: skip

    @property
    def server_s(self) -> float:
        """The transfer of the largest range of the parameters through its server's card."""
        return max(self.shards) * self.server_seconds_per_byte


def case_of(at: Arrangement, compute: Compute, wires: Wires, workload: Workload) -> Case:
    """The case of an arrangement at these speeds and sizes; `compute` is for the batch."""
    link = _link(wires, at.leaves_rack)
    pace, pieces = ComputeTime(compute), workload.pieces
    if at.inside is not None:
        near = _link(wires, at.inside_leaves_rack)
        spread_s = at.inside.broadcast_s(near, workload.model_bytes)
        averaged_s = at.inside.all_reduce_s(near, wires.collective, workload.model_bytes)
        pace = ComputeTime(compute, at.members, spread_s + averaged_s)
        pieces = (Piece(workload.model_bytes, 1.0, 1.0),)
    return Case(
        ends=at.ends, pace=pace, link=link, machines=at.machines, wires=wires, workload=workload,
        pieces=pieces, shards=tuple(share * workload.model_bytes for share in at.shares),
        servers_on_workers=at.servers_on_workers, meetings=at.meetings, options=at.options,
    )  # fmt: skip


def _link(wires: Wires, leaves_rack: bool) -> AlphaBeta:
    """The link between machines; the slower one between racks."""
    per_byte = 1 / wires.bandwidth
    if not leaves_rack:
        return AlphaBeta(wires.latency, per_byte)
    return AlphaBeta(wires.latency + wires.rack_latency, per_byte * wires.oversubscription)


def split(
    compute_s: float,
    latest_s: float,
    alone_s: float,
    step_s: float,
    rate: float = 1.0,
    ignores_jitter: bool = False,
) -> StepParts:
    """The parts of a step of `step_s`: computing, waiting for the latest, exposed and queueing."""
    rest = max(0.0, step_s - latest_s)
    exposed = min(rest, alone_s)
    return StepParts(
        compute_s, latest_s - compute_s, exposed, rest - exposed, rate,
        ignores_jitter=ignores_jitter,
    )  # fmt: skip


def notes_of(name: str, parts: StepParts, case: Case) -> list[str]:
    """What a reader of the figures must know."""
    notes: list[str] = []
    if parts.backlog > 1:
        notes.append(
            f"{name} sends {parts.backlog:.1f} times what the cards carry: messages pile up, "
            "and models arrive ever later"
        )
    if parts.ignores_jitter and not case.pace.is_constant:
        notes.append(
            f"{name}: compute times that vary make steps longer than this by waits that have "
            "no closed form"
        )
    return notes
