"""The settings and the findings of a probe, as plain values that are sent as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Inquiry:
    """The settings of a probe, which are checked before a worker starts."""

    task: str
    data: str | None
    batch: int
    learning_rate: float
    optimiser: str
    threads: int
    seconds: float
    """The time for all phases together."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Inquiry:
        return Inquiry(**json.loads(text))


@dataclass(frozen=True)
class Steps:
    """The seconds of one worker's steps, without those of the warm-up."""

    count: int
    compute: list[float]
    """The forward and the backward pass; a few thousand samples at most, evenly chosen."""
    other: list[float]
    """The time between two gradients: copying the parameters and applying the optimiser."""
    by_batch: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """The median gradient at other sizes of the batch, from small to large."""


@dataclass(frozen=True)
class MeasuredLink:
    """The link from one worker to another, while their hosts sent nothing else."""

    source: int
    target: int
    latency: float
    """Half of the median round trip."""
    bandwidth: float
    """The median of the bytes per second of large messages."""
    trips: int
    messages: int
    shortest: float = 0.0
    """Half of the shortest round trip."""

    def __post_init__(self) -> None:
        if not self.shortest:
            object.__setattr__(self, "shortest", self.latency)


@dataclass(frozen=True)
class Crowd:
    """A measurement with many senders at once."""

    pattern: str
    """inside (a ring in each host), between (a ring of hosts), to_one, or from each group of near
    hosts to the next: one_across (one flow) and across (all hosts)."""
    senders: int
    target: int | None
    """The only receiver, if there was one."""
    rates: dict[int, float]
    """The bytes per second of each sender."""


@dataclass(frozen=True)
class ProbeFindings:
    """Everything that a probe has found."""

    inquiry: Inquiry
    transport: str
    hosts: list[str]
    """The host of each worker."""
    steps: list[Steps]
    links: list[MeasuredLink]
    crowds: list[Crowd]
    pairs: int
    """The number of pairs of workers; `links` may cover fewer."""
    began: float
    seconds: float

    @property
    def workers(self) -> int:
        return len(self.hosts)

    @property
    def host_names(self) -> list[str]:
        return list(dict.fromkeys(self.hosts))

    def are_together(self, one: int, other: int) -> bool:
        return self.hosts[one] == self.hosts[other]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(told: dict[str, Any]) -> ProbeFindings:
        crowds = [
            Crowd(**one | {"rates": {int(rank): rate for rank, rate in one["rates"].items()}})
            for one in told["crowds"]
        ]
        parts: dict[str, Any] = {
            "inquiry": Inquiry(**told["inquiry"]),
            "steps": [Steps(**one) for one in told["steps"]],
            "links": [MeasuredLink(**one) for one in told["links"]],
            "crowds": crowds,
        }
        return ProbeFindings(**told | parts)
