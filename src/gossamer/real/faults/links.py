"""What the links between real workers are made to carry: the simulator's words for them.

Every worker has a card of its own, with a bandwidth each way; a message takes the latency and then
the time of its bytes. A card may be slower than the others, and all messages later, for a while.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.errors import ConfigurationError

FOREVER = math.inf
SMALL_BYTES = 256
"""As in the simulator: requests and acknowledgements take no time on a card."""


@dataclass(frozen=True)
class Spell:
    """Something that is so for a while, counted from the moment when all workers have met."""

    amount: float
    at: float = 0.0
    lasts: float = FOREVER
    worker: int = -1
    """Whose card it is about; -1 where it is about everybody's."""

    def is_on(self, time_s: float) -> bool:
        return self.at <= time_s < self.at + self.lasts


@dataclass(frozen=True)
class Links:
    """All that is asked of the links of one run; by default nothing."""

    bandwidth: float = math.inf
    """Bytes per second of a card, each way."""
    latency: float = 0.0
    slow: tuple[Spell, ...] = ()
    """Cards that are so many times slower."""
    delays: tuple[Spell, ...] = ()
    """Seconds by which every message is later."""

    @property
    def is_shaped(self) -> bool:
        return self != Links()

    def check(self, workers: int) -> None:
        """Refuse what would silently not happen."""
        for spell in self.slow:
            if not 0 <= spell.worker < workers:
                raise ConfigurationError(
                    f"a fault names worker {spell.worker}, but the {workers} workers are 0 to "
                    f"{workers - 1}"
                )
        if self.slow and self.bandwidth == math.inf:
            spell = self.slow[0]
            raise ConfigurationError(
                f"the links of real workers have no limit that --slow-link {spell.worker}="
                f"{spell.amount:g} could divide; say what the others carry with --bandwidth, such "
                "as --bandwidth 100Mbit"
            )

    def rate(self, worker: int, time_s: float) -> float:
        """Bytes per second of a worker's card."""
        factors = (s.amount for s in self.slow if s.worker == worker and s.is_on(time_s))
        return self.bandwidth / math.prod(factors)

    def latency_at(self, time_s: float) -> float:
        return self.latency + sum(spell.amount for spell in self.delays if spell.is_on(time_s))

    def all_reduce_seconds(self, members: Sequence[int], size_bytes: int, time_s: float) -> float:
        """Around a ring: every member sends two shares of the vector to each of the others."""
        share_s = size_bytes / len(members) / min(self.rate(rank, time_s) for rank in members)
        return 2 * (len(members) - 1) * (self.latency_at(time_s) + share_s)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(described: Mapping[str, Any]) -> Links:
        spells = {
            key: tuple(Spell(**spell) for spell in described[key]) for key in ("slow", "delays")
        }
        return Links(described["bandwidth"], described["latency"], **spells)


def own_links() -> Links:
    """What the launcher of this process asks for."""
    faults = json.loads(os.environ.get("GOSSAMER_FAULTS") or "{}")
    return Links.from_dict(faults["links"]) if "links" in faults else Links()
