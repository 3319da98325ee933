"""Means over processes: by MPI's own all-reduce, or in a fixed order of addition.

*Fixed* is bit for bit `rules.mean_in_order`. Short values go whole to every member, who adds them
all. Of long ones each member adds up its share of the vector, which the others send it, and sends
the result back: the traffic of a ring, in two rounds.

Several reductions may be under way, awaited in any order and by any thread; so whoever waits
advances all of them, and the receiving thread does so now and then.

A process that leaves the sums says how many of each group it has begun; those it still finishes.
MPI cannot begin the others again without it, so they fail with a sentence.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.transports.mpi.backoff import Patience
from gossamer.real.transports.mpi.engine import MPI
from gossamer.real.transports.mpi.pool import Pool
from gossamer.real.transports.transport import Scattered, StopToken, Store

ENGINE, FIXED = "engine", "fixed"
REDUCTIONS = (ENGINE, FIXED)
_SHORT = 1 << 20
"""Bytes to receive up to which a second round costs more than everybody's whole value."""
_PIECE = 1 << 16
_LEFT = 32767
"""The tag of the word that a process has left the sums: the largest that every MPI has."""
_SUMMED = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}


def name_of(members: Sequence[int]) -> str:
    return ",".join(map(str, members))


class Group:
    """The members of a kind of reduction, in order of rank, with their tags."""

    def __init__(self, members: tuple[int, ...], rank: int, number: int) -> None:
        self.members = members
        self.index = members.index(rank)
        self.others = [index for index in range(len(members)) if index != self.index]
        # Two reductions of a group pass each round in the order in which they were started, so
        # that one tag for each round is enough.
        self.first_tag, self.second_tag = 2 * number, 2 * number + 1
        self.waiting: deque[FixedReduction] = deque()
        """Started, and not yet in the second round."""
        self.name = name_of(members)
        self.started = 0


class Reduction(ABC):
    """One all-reduce under way."""

    def __init__(self, value: Tensor | Scattered, pool: Pool) -> None:
        """The result's memory holds the value at first."""
        self.ended = False
        self.group: Group
        self.number = 0
        """Among those of its group."""
        self._scattered = value if isinstance(value, Scattered) else None
        if isinstance(value, Scattered):
            self._edition = value.edition
            self._shape = torch.Size((value.count,))
            self.result, self.raw = pool.pair(value.count, value.kind)
            value.write_into(value.cut(self.result), 1.0)
        else:
            self._shape = value.shape
            self.result, self.raw = pool.pair(value.numel(), value.dtype)
            self.result.copy_(value.detach().reshape(-1))
        self.is_settling = False
        """Somebody waits for it, and does nothing else meanwhile."""
        self._pending: Pending[Tensor] | None = Pending("all_reduce")

    @property
    def pending(self) -> Pending[Tensor]:
        assert self._pending is not None
        return self._pending

    @abstractmethod
    def advance(self) -> bool:
        """Do what can be done at once; whether the result is there."""

    def end(self) -> None:
        """Hand the result over."""
        scattered = self._put_in_place()
        self.pending.resolve(self.result.view(self._shape) if scattered is None else scattered)
        # The pending knows this object in order to settle; a circle would keep its memory.
        self._pending = None
        self.ended = True

    def fail(self, error: PeerLost) -> None:
        self.pending.fail(error)
        self._pending = None
        self.ended = True

    def _put_in_place(self) -> Scattered | None:
        """Where the value lay in pieces the result is put there, if who owns them stands still."""
        if self._scattered is None or not self.is_settling:
            return None
        places = self._scattered.places(self._edition)
        if places is None:
            return None
        for place, piece in zip(places, self._scattered.cut(self.result), strict=True):
            place.copy_(piece)
        return self._scattered


class EngineReduction(Reduction):
    """MPI's own sum over all processes, then divided."""

    def __init__(self, communicator: MPI.Intracomm, value: Tensor | Scattered, pool: Pool) -> None:
        super().__init__(value, pool)
        self._size = communicator.size
        target = [self.result.numpy(), _SUMMED[self.result.dtype]]
        self._request = communicator.Iallreduce(MPI.IN_PLACE, target, MPI.SUM)

    def advance(self) -> bool:
        if not self._request.Test():
            return False
        self.result.div_(self._size)
        return True


class FixedReduction(Reduction):
    """The mean over a group, added in order of rank."""

    def __init__(
        self, communicator: MPI.Intracomm, group: Group, value: Tensor | Scattered, pool: Pool
    ) -> None:
        super().__init__(value, pool)
        self._communicator = communicator
        self._group = group
        count, total = len(group.members), self.result.numel()
        self._is_whole = (count - 1) * total * self.result.element_size() <= _SHORT
        if self._is_whole:
            self._shares = [slice(0, total)] * count
        else:
            cuts = [total * index // count for index in range(count + 1)]
            self._shares = [slice(*ends) for ends in pairwise(cuts)]
        share = self._shares[group.index]
        self._mine = self.result[share]
        length = len(self._mine)
        theirs, raw = pool.pair((count - 1) * length, self.result.dtype)
        places = [slice(length * index, length * (index + 1)) for index in range(count - 1)]
        self._values = [theirs[place] for place in places]
        self._values.insert(group.index, self._mine)
        self._requests = self._exchange(
            [raw[place] for place in places],
            [self.raw[self._shares[index]] for index in group.others],
            group.first_tag,
        )
        self._is_summed = False

    def advance(self) -> bool:
        group = self._group
        if not self._is_summed:
            if group.waiting[0] is not self or not MPI.Request.Testall(self._requests):
                return False
            group.waiting.popleft()
            self._sum()
            self._is_summed = True
            if self._is_whole:
                return True
            self._requests = self._exchange(
                [self.raw[self._shares[index]] for index in group.others],
                [self.raw[self._shares[group.index]]] * len(group.others),
                group.second_tag,
            )
        return MPI.Request.Testall(self._requests)

    def _sum(self) -> None:
        """`rules.mean_in_order` of one's share, in pieces that stay in the cache."""
        values, count = self._values, len(self._values)
        # a + b has the bits of b + a, so the first two may be added in place at home.
        home = values[self._group.index if self._group.index < 2 else 0]
        for start in range(0, len(self._mine), _PIECE):
            piece = slice(start, start + _PIECE)
            total = torch.add(values[0][piece], values[1][piece], out=home[piece])
            for value in values[2:]:
                total.add_(value[piece])
            torch.div(total, count, out=self._mine[piece])

    def _exchange(
        self, into: Sequence[NDArray[Any]], from_here: Sequence[NDArray[Any]], tag: int
    ) -> list[MPI.Request]:
        """With every other member, in their order."""
        ranks = [self._group.members[index] for index in self._group.others]
        receive, send = self._communicator.Irecv, self._communicator.Isend
        requests = [receive(place, rank, tag) for place, rank in zip(into, ranks, strict=True)]
        requests += [send(part, rank, tag) for part, rank in zip(from_here, ranks, strict=True)]
        return requests


class Reductions:
    """All reductions of a process."""

    def __init__(
        self, communicator: MPI.Intracomm, store: Store, pool: Pool, stop: StopToken, busy_s: float,
        reduction: str,
    ) -> None:  # fmt: skip
        self._communicator = communicator
        self._store = store
        self._pool = pool
        self._stop = stop
        self._busy_s = busy_s
        self._reduction = reduction
        self._groups: dict[tuple[int, ...], Group] = {}
        self._active: list[Reduction] = []
        self._left: dict[int, dict[str, int]] = {}
        """Of processes that have left the sums: how many of each group they have begun."""
        self._vain: list[Reduction] = []
        """Those that failed; MPI may still write into their memory."""
        self._nothing = np.zeros(0, np.uint8)
        self._lock = threading.Lock()

    def start(self, value: Tensor | Scattered, members: Sequence[int]) -> Pending[Tensor]:
        chosen = tuple(sorted(members))
        if len(chosen) == 1:
            return Pending.resolved("all_reduce", value.detach().clone())
        kind = value.kind if isinstance(value, Scattered) else value.dtype
        group = self._group(chosen)
        everybody = len(chosen) == self._communicator.size
        with self._lock:
            if everybody and self._reduction == ENGINE and kind in _SUMMED:
                operation = EngineReduction(self._communicator, value, self._pool)
            else:
                operation = FixedReduction(self._communicator, group, value, self._pool)
                group.waiting.append(operation)
            operation.group, operation.number = group, group.started
            group.started += 1
            # Taken while nobody knows the operation: another thread may end it at once.
            pending = operation.pending
            pending.settle = partial(self._settle, operation)
            self._active.append(operation)
        return pending

    def advance(self) -> bool:
        """Do what can be done at once; whether something is still under way."""
        if not self._active or not self._lock.acquire(blocking=False):
            return bool(self._active)
        try:
            self._hear_who_left()
            ended = [operation for operation in self._active if operation.advance()]
            vain = [operation for operation in self._active if operation not in ended]
            vain = [operation for operation in vain if self._missing(operation) is not None]
            self._vain += vain
            for operation in (*ended, *vain):
                self._active.remove(operation)
        finally:
            self._lock.release()
        # Outside of the lock: whoever waited may go on in this thread and start the next one.
        for operation in ended:
            operation.end()
        for operation in vain:
            operation.fail(self._reason(operation))
        return bool(self._active)

    def leave(self) -> None:
        """Tell the others; what has been begun is finished by the receiving thread."""
        rank, size = self._communicator.rank, self._communicator.size
        with self._lock:
            begun = {group.name: group.started for group in self._groups.values()}
            self._store.agree(f"mpi/left/{rank}", json.dumps(begun))
            for other in range(size):
                if other != rank:
                    self._communicator.Isend(self._nothing, other, _LEFT)

    def _hear_who_left(self) -> None:
        while self._communicator.Iprobe(MPI.ANY_SOURCE, _LEFT, status := MPI.Status()):
            process = status.Get_source()
            self._communicator.Recv(self._nothing, process, _LEFT)
            said = self._store.get(f"mpi/left/{process}")
            self._left[process] = {} if said is None else json.loads(said)

    def _missing(self, operation: Reduction) -> int | None:
        """A member that has left before it put anything into this one."""
        if not self._left:
            return None
        name, number = operation.group.name, operation.number
        members = operation.group.members
        gone = (m for m in members if m in self._left and self._left[m].get(name, 0) <= number)
        return next(gone, None)

    def _reason(self, operation: Reduction) -> PeerLost:
        missing = self._missing(operation)
        assert missing is not None
        return PeerLost(
            missing,
            "it has left its loop, and MPI's sums between hosts cannot go on without it; give all "
            "workers the same number of steps, or start them with `gossamer run` or torchrun",
        )

    def _settle(self, operation: Reduction) -> None:
        operation.is_settling = True
        patience = Patience(self._stop, self._busy_s)
        self.advance()
        while not operation.ended:
            patience.pause()
            self.advance()

    def _group(self, members: tuple[int, ...]) -> Group:
        known = self._groups.get(members)
        if known is None:
            number = 0
            if len(members) < self._communicator.size:
                # Whoever comes first proposes a number that nobody else has; nobody waits.
                proposal = str(self._store.add("mpi/groups", 1))
                number = int(self._store.agree(f"mpi/group/{name_of(members)}", proposal))
            known = Group(members, self._communicator.rank, number)
            known = self._groups.setdefault(members, known)
        return known
