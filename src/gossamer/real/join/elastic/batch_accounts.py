"""What becomes of every batch of an elastic run, also where its worker dies.

Workers lease a few batches at a time from one order. Each life of a worker writes down which leases
it takes, and counts those that it has trained, so the last one that a dead worker took is known:
once the order is used up, one of the living takes that lease again, and trains all of it. For each
pass over a loader the store counts

    read         batches that were leased for the first time
    trained      batches of leases that were trained to their ends, each counted once
    given again  batches that were leased again after a death
    lost         read and not trained: their worker died when nobody was left in the pass

so read = trained + lost. Of the batches that were given again the dead worker may have trained some
before it died, at most all but one of its lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gossamer.real.transports.checked_values import number_from
from gossamer.real.transports.transport import Store

LEASE = 4
"""How many batches are taken at a time: few, so that the last ones are shared fairly."""


class BatchAccounts:
    """This worker's leases, and what all of them add up to."""

    def __init__(
        self, store: Store, rank: int, size: int, live: Callable[[], frozenset[int]]
    ) -> None:
        """`live` is who is alive now."""
        self._store, self._rank, self._size, self._live = store, rank, size, live
        self._life = store.add(f"lives begun/{rank}", 1)
        self._passes: dict[str, int] = {}
        """The names of the passes so far, and how many batches each has."""

    def leased(self, name: str, batches: int) -> Iterator[int]:
        """The positions that this worker takes in a pass over so many batches."""
        self._passes[name] = batches
        store, taken = self._store, 0
        while True:
            first = store.add(name, LEASE) - LEASE
            if first >= batches:
                found = self._left_over(name)
                if found is None:
                    return
                first = found
                store.add(f"{name} again", min(LEASE, batches - first))
            mine = self._name(name, self._rank, self._life)
            store.agree(f"{mine} lease {taken}", str(first))
            last = min(first + LEASE, batches)
            yield from range(first, last)
            # Whoever asks for the next batch has trained the one before.
            taken = store.add(f"{mine} trained", 1)
            store.add(f"{name} trained", last - first)

    def _left_over(self, name: str) -> int | None:
        """The first position of a lease whose holder has died, and which nobody has taken again."""
        store, live = self._store, self._live()
        for rank in range(self._size):
            lives = store.add(f"lives begun/{rank}", 0)
            for life in range(1, lives + 1):
                if rank in live and life == lives:
                    continue
                holder = self._name(name, rank, life)
                trained = store.add(f"{holder} trained", 0)
                key, mine = f"{holder} lease {trained}", f"{self._rank}.{self._life}"
                lease = store.get(key)
                if lease is None or store.get(f"{holder} again") is not None:
                    continue
                if store.agree(f"{holder} again", mine) == mine:
                    return number_from(key, lease)
        return None

    @staticmethod
    def _name(name: str, rank: int, life: int) -> str:
        return f"{name} of {rank}.{life}"

    def summary(self) -> list[dict[str, Any]]:
        """For each pass, how many batches were read, trained, given again and lost."""
        store, found = self._store, list[dict[str, Any]]()
        for name, batches in self._passes.items():
            read = min(batches, store.add(name, 0))
            trained = store.add(f"{name} trained", 0)
            again = store.add(f"{name} again", 0)
            found.append(
                {"read": read, "trained": trained, "given_again": again, "lost": read - trained}
            )
        return found
