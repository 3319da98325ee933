"""Workers that another launcher adds to an elastic run: `gossamer run --attach HOST:PORT`.

The launcher that began the run has written into its store how many places the run has and what its
workers are told. This one claims free places, starts its workers there as newcomers, restarts them
when they die, and gives the places back when all have ended.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError, Late
from gossamer.real.launch.hosts import BEAT_S, Hosts, reach, within
from gossamer.real.transports.beginning import PRESENT
from gossamer.real.transports.death_notices import tell_dead
from gossamer.real.transports.secret import secret_of_hosts
from gossamer.real.transports.store import TcpStore


class AttachedMeeting:
    """The connection of an attached launcher to the run; a `HostMeeting` for its launcher."""

    def __init__(self, store: TcpStore, secret: str, address: str, ranks: Sequence[int]) -> None:
        self.store, self.secret, self.address = store, secret, address
        self._ranks = ranks
        self._last_beat = 0.0
        self._number = 0

    def wait_for_all(self) -> None:
        """Say that these workers have come; nobody is waited for."""
        mine = f"{','.join(map(str, self._ranks))};{secrets.token_hex(8)}"
        while self.store.agree(f"attached/{self._number}", mine) != mine:
            self._number += 1

    def tell_dead(self, rank: int, how: str, life: int = 0) -> None:
        with suppress(RuntimeError):
            tell_dead(self.store, rank, how, life)

    def next_life(self, rank: int) -> int:
        return self.store.add(f"life/{rank}", 1)

    def tell_job(
        self, size: int, taken: Sequence[int], present: Sequence[int], told: Mapping[str, str]
    ) -> None:  # fmt: skip
        raise AssertionError("the run has begun elsewhere")

    def has_others(self) -> bool:
        return True

    def end_everywhere(self, status: int, why: str) -> None:
        """The others go on without these workers."""

    def beat(self) -> tuple[int, str] | None:
        if time.monotonic() - self._last_beat < BEAT_S:
            return None
        self._last_beat = time.monotonic()
        try:
            self.store.add(f"attached/{self._number}/beat", 1)
        except RuntimeError:
            return 1, f"the launcher at {self.address} is gone, and with it the run"
        return None

    def leave(self, status: int, is_interrupted: Callable[[], bool]) -> list[str]:
        with suppress(RuntimeError):
            for rank in self._ranks:
                self.store.add(f"place/{rank}/freed", 1)
            self.store.agree(f"attached/{self._number}/left", str(status))
        return []

    def close(self) -> str | None:
        return None


@dataclass(frozen=True)
class Attachment:
    """The places in a running job that this launcher has claimed."""

    size: int
    """How many places the job has."""
    ranks: Sequence[int]
    told: Mapping[str, str]
    """The variables that the job's own workers have."""
    meeting: AttachedMeeting

    @staticmethod
    def to(address: str, workers: int, patience_s: float, secret_file: Path | None) -> Attachment:
        """Claim places in the run whose launcher is at this address."""
        try:
            hosts = Hosts.parse(1, 0, address, patience_s, secret_file)
        except ConfigurationError:
            raise ConfigurationError(
                f"--attach must be HOST:PORT, the --rendezvous of the running job, got {address!r}"
            ) from None
        secret = secret_of_hosts(secret_file)
        store = reach(replace(hosts, rank=1), secret)
        job = _job(store, address, patience_s)
        if job["told"].get("GOSSAMER_TRANSPORT") == "shm":
            raise ConfigurationError(
                f"the workers of the run at {address} meet in shared memory, which another "
                "launcher's cannot reach; start it with --transport torch"
            )
        ranks = _claimed(store, int(job["size"]), workers, address)
        told = {PRESENT: ",".join(map(str, job["present"])), **job["told"]}
        meeting = AttachedMeeting(store, secret, address, ranks)
        return Attachment(int(job["size"]), ranks, told, meeting)


def _job(store: TcpStore, address: str, patience_s: float) -> dict[str, Any]:
    if not within(patience_s, lambda: store.get("job") is not None):
        raise Late(
            f"the run at {address} takes no further workers; start it with `gossamer run --elastic "
            "LEAST:MOST --rendezvous`"
        )
    return json.loads(store.get("job") or "{}")


def _claimed(store: TcpStore, size: int, workers: int, address: str) -> list[int]:
    """Ranks of free places; all or none."""
    mine, ranks = secrets.token_hex(8), list[int]()
    for rank in range(size):
        times = store.add(f"place/{rank}/freed", 0)
        if len(ranks) < workers and store.agree(f"place/{rank}/{times}", mine) == mine:
            ranks.append(rank)
    if len(ranks) < workers:
        for rank in ranks:
            store.add(f"place/{rank}/freed", 1)
        raise ConfigurationError(
            f"the run at {address} has places for {size} workers, of which {len(ranks)} are free, "
            f"got -n {workers}; ask for fewer, or begin the run with a larger --elastic"
        )
    return ranks
