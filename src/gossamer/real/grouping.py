"""Which workers form a group, and who speaks for it.

The first worker of each group runs the method; the others compute for it. See `gossamer.groups`.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from functools import cached_property

from gossamer.errors import Late, PeerLost
from gossamer.groups import Groups, even_groups
from gossamer.real.launch.environment import Environment, discover
from gossamer.real.transports.transport import Store, Transport

_LOOK_S = 0.01
_PATIENCE_S = 300.0
"""For hosts that start late."""


@dataclass(frozen=True)
class Grouping:
    """One worker's place among the groups; without groups everyone speaks for itself."""

    rank: int
    size: int
    groups: Groups = ()

    @staticmethod
    def of(groups: int | str, transport: Transport) -> Grouping:
        """So many groups of consecutive ranks, or one per host; 0 means none."""
        rank, size = transport.rank, transport.size
        if groups == "host":
            return Grouping(rank, size, groups_by_host(transport.store, rank, size))
        return Grouping(rank, size, even_groups(size, groups) if isinstance(groups, int) and groups
                        else ())  # fmt: skip

    @property
    def ends(self) -> int:
        """How many speak: workers of the method's own text."""
        return len(self.groups) or self.size

    @cached_property
    def speakers(self) -> frozenset[int]:
        """Those whose models count."""
        return frozenset(group[0] for group in self.groups) or frozenset(range(self.size))

    @cached_property
    def number(self) -> int:
        """Of this worker's group, which is its rank to the method."""
        found = [number for number, group in enumerate(self.groups) if self.rank in group]
        return found[0] if found else self.rank

    @property
    def group(self) -> tuple[int, ...]:
        """This worker and those it computes with."""
        return self.groups[self.number] if self.groups else (self.rank,)

    @property
    def follows(self) -> bool:
        """Whether another worker speaks for this one."""
        return self.rank != self.group[0]

    def speaking(self, live: frozenset[int]) -> frozenset[int]:
        """Those of the living whose models count."""
        return live & self.speakers if self.groups else live

    def working(self, live: frozenset[int]) -> frozenset[int]:
        """Those of the living whose gradients count: without its leader a group does nothing."""
        if not self.groups:
            return live
        return frozenset(rank for group in self.groups if group[0] in live for rank in group) & live

    def lost(self, live: frozenset[int]) -> PeerLost:
        """What is to be said when this worker's leader has died."""
        others = "the other groups go on" if self.speaking(live) else "no other group is left"
        members = ", ".join(map(str, self.group))
        return PeerLost(
            self.group[0], f"it led the group of workers {members}, which ends with it; {others}"
        )


def groups_by_host(store: Store, rank: int, size: int) -> Groups:
    """Every worker says where it is, and reads where the others are."""
    store.agree(f"host/{rank}", host_of(discover()))
    until = time.monotonic() + _PATIENCE_S
    members: dict[str, list[int]] = {}
    for other in range(size):
        while (host := store.get(f"host/{other}")) is None:
            if time.monotonic() > until:
                raise Late(
                    f"worker {other} did not say within {_PATIENCE_S:.0f} s which host it is on; "
                    "see why it did not start"
                )
            time.sleep(_LOOK_S)
        members.setdefault(host, []).append(other)
    return tuple(tuple(group) for group in members.values())


def host_of(here: Environment) -> str:
    """A name that the workers of one host have in common, and nobody else.

    Where ranks run through one host after the other, the first rank there is one. MPI and srun may
    deal them out in turn.
    """
    if here.kind in ("gossamer", "torchrun"):
        return str(here.rank - here.local_rank)
    return socket.gethostname()
