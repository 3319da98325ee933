"""Which real workers form a group: consecutive ranks, or those of one host."""

from __future__ import annotations

import socket
import time

from gossamer.errors import Late
from gossamer.groups import Grouping, Groups, even_groups
from gossamer.real.launch.environment import Environment, discover
from gossamer.real.transports.transport import Store, Transport

_LOOK_S = 0.01
_PATIENCE_S = 300.0
"""For hosts that start late."""


def grouping_of(groups: int | str, transport: Transport) -> Grouping:
    """So many groups of consecutive ranks, or one per host; 0 means none."""
    rank, size = transport.rank, transport.size
    if groups == "host":
        return Grouping(rank, size, groups_by_host(transport.store, rank, size))
    return Grouping(rank, size, even_groups(size, int(groups)) if groups else ())


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
