"""Faults brought about on purpose in real workers: slow ones, slow links, pauses, deaths.

The launcher pauses and kills by signals. A slow worker slows itself and its links down, as told in
GOSSAMER_FAULTS.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.real.faults.links import Links


@dataclass(frozen=True)
class Pause:
    """It stands still from `at` on, counted from the start of the workers."""

    worker: int
    at: float
    lasts: float


@dataclass(frozen=True)
class Kill:
    """It dies at that time after the start of the workers."""

    worker: int
    at: float


@dataclass(frozen=True)
class Injection:
    """All faults of one run."""

    slow: Mapping[int, float] = field(default_factory=dict[int, float])
    """How many times slower a worker computes."""
    pauses: Sequence[Pause] = ()
    kills: Sequence[Kill] = ()
    links: Links = field(default_factory=Links)

    def check(self, workers: int) -> None:
        """Refuse faults of workers that do not exist, and workers faster than the machine."""
        named = [*self.slow, *(p.worker for p in self.pauses), *(k.worker for k in self.kills)]
        for worker in named:
            if not 0 <= worker < workers:
                raise ConfigurationError(
                    f"a fault names worker {worker}, but the {workers} workers are 0 to "
                    f"{workers - 1}"
                )
        for worker, factor in self.slow.items():
            if factor < 1:
                raise ConfigurationError(
                    f"a real worker cannot compute faster than it does: --slow {worker}={factor:g} "
                    "must be at least 1"
                )
        self.links.check(workers)

    def to_json(self) -> str:
        """As the workers read it."""
        told: dict[str, Any] = {
            "slow": {str(worker): factor for worker, factor in self.slow.items()},
            "pause": [{"worker": p.worker, "at": p.at, "lasts": p.lasts} for p in self.pauses],
            "kill": [{"worker": k.worker, "at": k.at} for k in self.kills],
        }
        if self.links.is_shaped:
            told["links"] = self.links.as_dict()
        return json.dumps(told)

    def signals(self) -> list[tuple[float, int, int]]:
        """When to send which worker which signal, in order of time."""
        found = [(kill.at, kill.worker, int(signal.SIGKILL)) for kill in self.kills]
        for pause in self.pauses:
            found.append((pause.at, pause.worker, int(signal.SIGSTOP)))
            found.append((pause.at + pause.lasts, pause.worker, int(signal.SIGCONT)))
        return sorted(found)
