"""The deliberate faults of the workers of one run, and the bandwidth and latency of their links.

The launcher kills and pauses workers by signals. It gives the plan to all workers in the variable
GOSSAMER_FAULTS, and each of them slows itself and its links down. Every worker has a network card
of its own, with a bandwidth in each direction. A message takes the latency and then the time of its
bytes; a dropped one is sent again, and one that meets a partition waits until that heals. Times of
kills and pauses count from the start of the workers, and times of links from the moment when all
workers are connected.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gossamer.config.collective_costs import all_reduce_seconds
from gossamer.config.faults import Fault, check_lives, read_fault
from gossamer.errors import ConfigurationError

FAULTS_VARIABLE = "GOSSAMER_FAULTS"
RETRANSMISSION_S = 0.2
"""How long it takes until a dropped message is sent again, as in the simulator."""


@dataclass(frozen=True)
class FaultPlan:
    """All faults of one run; by default there are none."""

    faults: tuple[Fault, ...] = ()
    bandwidth: float = math.inf
    """Bytes per second of a card in each direction."""
    latency: float = 0.0

    def __post_init__(self) -> None:
        for fault in self.faults:
            if fault.kind == "kill-server":
                raise ConfigurationError(
                    "--kill-server is simulated only: real servers live in the processes of "
                    "workers; use --kill with the worker of the same number"
                )
            if fault.kind == "partition" and fault.lasts == math.inf:
                raise ConfigurationError(
                    f"a partition of real workers must heal, got --{fault}; say how long it lasts, "
                    "as in --partition '0,1|2-7@1s+2s'"
                )
            if fault.kind == "kill-server":
                raise ConfigurationError(
                    f"--{fault}: real servers live in the processes of workers; use --kill with "
                    "the worker of the same number, or gossamer simulate"
                )
            if fault.kind == "slow" and not fault.is_trait:
                raise ConfigurationError(
                    f"a real worker is slow from the start to the end, got --{fault}; write it as "
                    f"{fault.worker}={fault.amount:g}"
                )

    def of(self, *kinds: str) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind in kinds]

    def check(self, workers: int, *, is_elastic: bool = False) -> None:
        """Refuse faults of workers that do not exist, and faults that would have no effect."""
        for fault in [] if is_elastic else self.of("arrive", "return"):
            raise ConfigurationError(
                f"--{fault.kind} needs a run to which workers may come; give it --elastic too, as "
                f"in --elastic 2:{max(2, fault.worker + 1)}"
            )
        check_lives(self.faults)
        for fault in self.faults:
            named = max([fault.worker, *(rank for side in fault.sides for rank in side)])
            if named >= workers:
                raise ConfigurationError(
                    f"a fault names worker {named}, but the {workers} workers are 0 to "
                    f"{workers - 1}"
                )
        for fault in self.of("slow"):
            if fault.amount < 1:
                raise ConfigurationError(
                    f"a real worker cannot compute faster than it does: --{fault} must be at "
                    "least 1"
                )
        for fault in self.of("slow-link"):
            if self.bandwidth == math.inf:
                raise ConfigurationError(
                    f"the links of real workers have no limit that --slow-link {fault.worker}="
                    f"{fault.amount:g} could divide; say what the others carry with --bandwidth, "
                    "such as --bandwidth 100Mbit"
                )

    # ------------------------------------------------------------------ workers

    def signals(self) -> list[tuple[float, int, int]]:
        """Return (time, worker, signal) for each signal to send, in order of time."""
        found = [(kill.at, kill.worker, int(signal.SIGKILL)) for kill in self.of("kill")]
        for pause in self.of("pause"):
            found.append((pause.at, pause.worker, int(signal.SIGSTOP)))
            found.append((pause.at + pause.lasts, pause.worker, int(signal.SIGCONT)))
        return sorted(found)

    def slow_factor(self, worker: int) -> float:
        """Return how many times slower a worker computes. The last option for it counts."""
        return next((f.amount for f in self.of("slow")[::-1] if f.worker == worker), 1.0)

    # ------------------------------------------------------------------ links

    @property
    def shapes_links(self) -> bool:
        is_limited = self.bandwidth != math.inf or self.latency > 0
        return is_limited or bool(self.of("slow-link", "delay", "drop", "partition"))

    def rate(self, worker: int, time_s: float) -> float:
        """Return the bytes per second of a worker's card."""
        slow = (f for f in self.of("slow-link") if f.worker == worker and f.is_on(time_s))
        return self.bandwidth / math.prod(fault.amount for fault in slow)

    def latency_at(self, time_s: float) -> float:
        return self.latency + sum(f.amount for f in self.of("delay") if f.is_on(time_s))

    def retransmissions(self, time_s: float, draw: random.Random) -> float:
        """Return how much later a message arrives because it is lost, perhaps more than once."""
        seconds = 0.0
        for fault in self.of("drop"):
            while fault.is_on(time_s) and draw.random() < fault.amount:
                seconds += RETRANSMISSION_S
        return seconds

    def heals_at(self, members: Iterable[int], time_s: float) -> float:
        """Return the time from which on these workers reach each other: now, or when all partitions
        between them have healed."""
        ranks, healed = frozenset(members), time_s
        for fault in sorted(self.of("partition"), key=lambda fault: fault.at):
            # Who is named on no side is on none, and reaches everybody.
            sides = sum(bool(side & ranks) for side in fault.sides)
            if sides > 1 and fault.is_on(healed):
                healed = fault.at + fault.lasts
        return healed

    def all_reduce_seconds(self, members: Sequence[int], size_bytes: int, time_s: float) -> float:
        """Return the time of an all-reduce around a ring, which the slowest card determines."""
        waits = self.heals_at(members, time_s) - time_s
        slowest = min(self.rate(rank, time_s) for rank in members)
        latency = self.latency_at(time_s)
        return waits + all_reduce_seconds("ring", len(members), size_bytes, latency, 1 / slowest)

    # ------------------------------------------------------------------ for the workers

    def to_json(self) -> str:
        links = {"bandwidth": self.bandwidth, "latency": self.latency}
        return json.dumps({"faults": [str(fault) for fault in self.faults], **links})

    @staticmethod
    def from_json(text: str) -> FaultPlan:
        told = json.loads(text)
        faults = tuple(read_fault(line) for line in told["faults"])
        return FaultPlan(faults, told["bandwidth"], told["latency"])


def own_fault_plan() -> FaultPlan:
    """Return the plan that the launcher gave to this process."""
    text = os.environ.get(FAULTS_VARIABLE)
    return FaultPlan.from_json(text) if text else FaultPlan()
