"""The transport of a run with one worker: it has no peers, and its windows are plain memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.transports.transport import Listener, Parts, StopToken, Window


class LocalStore:
    """The store of a run that is one process."""

    def __init__(self) -> None:
        self._facts: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def agree(self, key: str, value: str) -> str:
        return self._facts.setdefault(key, value)

    def add(self, key: str, amount: int) -> int:
        self._counts[key] = self._counts.get(key, 0) + amount
        return self._counts[key]

    def get(self, key: str) -> str | None:
        return self._facts.get(key)


class LocalTransport:
    """One process, perhaps with servers inside."""

    name = "alone"
    reduces_meanwhile = False
    rank = 0
    size = 1
    life = 0
    absent: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    torn_updates = 0

    def __init__(self) -> None:
        self.store = LocalStore()
        self._windows: dict[int, Tensor] = {}

    def open(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], listener: Listener,
        stop: StopToken,
    ) -> None:  # fmt: skip
        self._windows = {end: value.clone() for end, value in initial.items()}

    def send(self, to: int, parts: Parts) -> None:
        raise PeerLost(to, "there is only one worker")

    def window(self, end: int) -> Tensor:
        return self._windows[end]

    def guard(self, end: int) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, end: int) -> Pending[Tensor]:
        return Pending.resolved("read", self._windows[end])

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        self._windows[end][start : start + delta.numel()].add_(delta)
        return Pending.resolved("accumulate", None)

    def average(self, own: int, peer: int) -> Pending[None]:
        return Pending.resolved("average", None)

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        return Pending.resolved("all_reduce", None)

    def leave_sums(self) -> None:
        """No other process exists that could wait."""

    def close(self) -> None:
        self._windows = {}
