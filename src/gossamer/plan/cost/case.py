"""One question to the closed forms, and the shape of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.plan.cost.alpha_beta import AlphaBeta, Machines, server_way_s
from gossamer.plan.cost.pace import ComputeTime
from gossamer.plan.cost.workload import Piece


class NoClosedForm(ConfigurationError):
    """The step of this method on this cluster has none; the message says why."""


@dataclass(frozen=True)
class StepParts:
    """Where the seconds of one step go; their sum is the step."""

    compute_s: float
    """Computing, as on average."""
    waiting_s: float = 0.0
    """For those whose step took longer than the average."""
    exposed_s: float = 0.0
    """Communication that computing does not hide, if nobody else used the cards."""
    queueing_s: float = 0.0
    """What others' transfers through the same card add, such as everybody's at a server."""
    rate: float = 1.0
    """Gradients per step and worker: above 1 where some workers go on while others wait."""
    backlog: float = 0.0
    """Transfers begun over transfers that a card could end: above 1 they pile up."""
    ignores_jitter: bool = False
    """Whether compute times that vary would make the step longer than this."""

    @property
    def total_s(self) -> float:
        """Per gradient."""
        return (self.compute_s + self.waiting_s + self.exposed_s + self.queueing_s) / self.rate


@dataclass(frozen=True)
class Case:
    """What a form may look at."""

    ends: int
    """Workers, or groups of them."""
    pace: ComputeTime
    link: AlphaBeta
    machines: Machines
    collective: str
    server_seconds_per_byte: float
    model_bytes: float
    pieces: tuple[Piece, ...]
    shards: tuple[float, ...]
    servers_on_workers: bool
    scalar_bytes: float
    optimiser_slots: int
    options: Mapping[str, Any]

    @property
    def model_s(self) -> float:
        """A model through one card."""
        return self.model_bytes * self.link.seconds_per_byte

    def all_reduce_s(self, size_bytes: float) -> float:
        return self.machines.all_reduce_s(self.link, self.collective, size_bytes)

    def lone_way_s(self) -> float:
        """A model between one worker and the servers while nobody else speaks to them."""
        return server_way_s(self.link, self.server_seconds_per_byte, 1, self.shards)

    def crowded_way_s(self) -> float:
        """The same for all workers at once."""
        return server_way_s(
            self.link, self.server_seconds_per_byte, self.ends, self.shards,
            on_workers=self.servers_on_workers,
        )  # fmt: skip

    @property
    def server_s(self) -> float:
        """A range of the parameters through the busiest server's card."""
        return max(self.shards) * self.server_seconds_per_byte


def split(
    compute_s: float, latest_s: float, alone_s: float, step_s: float, **more: Any
) -> StepParts:
    """The parts of a step: computing, waiting for the latest, what stays of `alone_s`, the rest."""
    rest = max(0.0, step_s - latest_s)
    exposed = min(rest, alone_s)
    return StepParts(compute_s, latest_s - compute_s, exposed, rest - exposed, **more)
