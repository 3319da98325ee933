"""Who begins together, where processes may come to a run that goes on.

The launcher of an elastic run has places for more workers than it starts. It says to each which of
them begin the run together; who comes later, or comes back, is told which life of its rank it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.errors import ConfigurationError

PRESENT = "GOSSAMER_PRESENT"
LIFE = "GOSSAMER_LIFE"


@dataclass(frozen=True)
class Beginning:
    """How this process comes to its run."""

    present: frozenset[int] | None = None
    """The ranks that begin the run; None means all."""
    life: int = 0
    """How often a process has come as this rank before."""

    @staticmethod
    def from_environment(variables: Mapping[str, str] | None = None) -> Beginning:
        found = os.environ if variables is None else variables
        present, life = found.get(PRESENT), found.get(LIFE, "0")
        try:
            ranks = None if present is None else frozenset(map(int, present.split(",")))
            return Beginning(ranks, int(life))
        except ValueError:
            raise ConfigurationError(
                f"{PRESENT} must be ranks and {LIFE} a number, got {present!r} and {life!r}; let "
                "`gossamer run` set them"
            ) from None

    @property
    def is_elastic(self) -> bool:
        """Whether others may come during the run."""
        return self.present is not None

    def absent(self, rank: int, size: int) -> frozenset[int]:
        """The processes that do not begin together with this one."""
        everybody = frozenset(range(size))
        if self.life:
            return everybody - {rank}
        return frozenset() if self.present is None else everybody - self.present - {rank}


ALL = Beginning()
