"""What a probe was asked and what it found, as plain values that travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Inquiry:
    """Every choice made and checked before a worker starts."""

    task: str
    data: str | None
    batch: int
    learning_rate: float
    optimiser: str
    threads: int
    seconds: float
    """For all phases together."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Inquiry:
        return Inquiry(**json.loads(text))


@dataclass(frozen=True)
class Steps:
    """How long the steps of one worker took, in seconds, without those that warmed up."""

    count: int
    compute: list[float]
    """Forward and backward; at most a few thousand of them, evenly chosen."""
    other: list[float]
    """What lies between two gradients: copying the parameters and applying the optimiser."""


@dataclass(frozen=True)
class MeasuredLink:
    """From one worker to another while nothing else was sent, at least not by their hosts."""

    source: int
    target: int
    latency: float
    """Half of the median round trip."""
    bandwidth: float
    """Bytes per second of large messages, the median."""
    trips: int
    messages: int


@dataclass(frozen=True)
class Crowd:
    """Many senders at once."""

    pattern: str
    """inside (a ring in each host), between (a ring of hosts), or to_one."""
    senders: int
    target: int | None
    """Who received, where it was one."""
    rates: dict[int, float]
    """Bytes per second that each sender got through."""


@dataclass(frozen=True)
class ProbeFindings:
    """All of it."""

    inquiry: Inquiry
    transport: str
    hosts: list[str]
    """Where each worker is."""
    steps: list[Steps]
    links: list[MeasuredLink]
    crowds: list[Crowd]
    pairs: int
    """How many there are; `links` may speak of fewer."""
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
    def from_dict(told: Mapping[str, Any]) -> ProbeFindings:
        crowds = [
            Crowd(
                one["pattern"], one["senders"], one["target"],
                {int(rank): rate for rank, rate in one["rates"].items()},
            )
            for one in told["crowds"]
        ]  # fmt: skip
        return ProbeFindings(
            Inquiry(**told["inquiry"]), told["transport"], list(told["hosts"]),
            [Steps(**one) for one in told["steps"]], [MeasuredLink(**one) for one in told["links"]],
            crowds, told["pairs"], told["began"], told["seconds"],
        )  # fmt: skip
