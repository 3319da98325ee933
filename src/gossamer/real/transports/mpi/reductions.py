"""All-reduces by MPI messages, added in order of rank.

Every member sends a short value to every other, and each adds up all values. Of a long value each
member adds up its share, which the others send to it, and sends the result back. That is the
traffic of a ring, in two rounds.

Several all-reduces may be open, and any threads may await them in any order. So a thread that waits
advances all of them, and the receiving thread does so from time to time.

A process that leaves the sums says how many all-reduces of each group it has begun. It finishes
these. MPI cannot repeat the others without it, so they fail with a sentence.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.transports.backoff import Backoff
from gossamer.real.transports.buffers import joined, take_elements
from gossamer.real.transports.mpi.engine import MPI, as_words
from gossamer.real.transports.transport import StopToken, Store
from gossamer.rules import mean_into

_SHORT = 1 << 20
"""Up to so many bytes to receive, a second round costs more than to send whole values."""
_LEFT = 32767
"""The tag of a message that its sender has left the sums; every MPI has tags up to this."""


def name_of(members: Sequence[int]) -> str:
    return ",".join(map(str, members))


class ReduceGroup:
    """A set of members, in order of rank, and the tags of their messages."""

    def __init__(self, members: tuple[int, ...], rank: int, number: int) -> None:
        self.members = members
        self.index = members.index(rank)
        self.others = [index for index in range(len(members)) if index != self.index]
        # All-reduces of a group pass each round in the order in which they were started, so one tag
        # for each round is enough.
        self.first_tag, self.second_tag = 2 * number, 2 * number + 1
        self.waiting: deque[MpiReduction] = deque()
        """All-reduces that are started and not yet in the second round."""
        self.name = name_of(members)
        self.started = 0


class MpiReduction:
    """One open all-reduce."""

    def __init__(
        self, communicator: MPI.Intracomm, group: ReduceGroup, tensors: Sequence[Tensor]
    ) -> None:
        self.group = group
        self.number = group.started
        """The number of this all-reduce in its group."""
        self.has_ended = False
        self.failure: PeerLost | None = None
        self._tensors = tensors
        self._communicator = communicator
        # At first the memory of the mean holds this process's own value.
        self._mean = joined([tensor.detach().reshape(-1).cpu() for tensor in tensors])
        raw = self._raw = as_words(self._mean)
        count, total = len(group.members), self._mean.numel()
        self._is_whole = (count - 1) * self._mean.nbytes <= _SHORT
        if self._is_whole:
            self._shares = [slice(0, total)] * count
        else:
            cuts = [total * index // count for index in range(count + 1)]
            self._shares = [slice(*ends) for ends in pairwise(cuts)]
        self._mine = self._mean[self._shares[group.index]]
        length = len(self._mine)
        theirs = take_elements((count - 1) * length, self._mean.dtype)
        places = [slice(length * index, length * (index + 1)) for index in range(count - 1)]
        self._values = [theirs[place] for place in places]
        into = [as_words(value) for value in self._values]
        self._values.insert(group.index, self._mine)
        from_here = [raw[self._shares[index]] for index in group.others]
        self._requests = self._exchange(into, from_here, group.first_tag)
        self._is_summed = False

    def advance(self) -> bool:
        """Do what can be done at once; return whether the mean is complete."""
        group, raw = self.group, self._raw
        if not self._is_summed:
            if group.waiting[0] is not self or not MPI.Request.Testall(self._requests):
                return False
            group.waiting.popleft()
            mean_into(self._mine, self._values, len(self._values))
            self._is_summed = True
            if self._is_whole:
                return True
            into = [raw[self._shares[index]] for index in group.others]
            from_here = [raw[self._shares[group.index]]] * len(group.others)
            self._requests = self._exchange(into, from_here, group.second_tag)
        return MPI.Request.Testall(self._requests)

    def write(self) -> None:
        """Write the mean into the tensors."""
        pieces = self._mean.split([tensor.numel() for tensor in self._tensors])
        for tensor, piece in zip(self._tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def _exchange(
        self, into: Sequence[NDArray[Any]], from_here: Sequence[NDArray[Any]], tag: int
    ) -> list[MPI.Request]:
        """Begin to receive from every other member and to send to it."""
        ranks = [self.group.members[index] for index in self.group.others]
        receive, send = self._communicator.Irecv, self._communicator.Isend
        requests = [receive(place, rank, tag) for place, rank in zip(into, ranks, strict=True)]
        requests += [send(part, rank, tag) for part, rank in zip(from_here, ranks, strict=True)]
        return requests


class Reductions:
    """All all-reduces of a process."""

    def __init__(
        self, communicator: MPI.Intracomm, store: Store, stop: StopToken, busy_s: float
    ) -> None:
        self._communicator = communicator
        self._store = store
        self._stop = stop
        self._busy_s = busy_s
        self._groups: dict[tuple[int, ...], ReduceGroup] = {}
        self._active: list[MpiReduction] = []
        self._left: dict[int, dict[str, int]] = {}
        """By process that has left the sums: how many all-reduces of each group it has begun."""
        self._vain: list[MpiReduction] = []
        """All-reduces that failed. They are kept because MPI may still write into their memory."""
        self._nothing = np.zeros(0, np.uint8)
        self._lock = threading.Lock()

    def start(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        chosen = tuple(sorted(members))
        if len(chosen) == 1 or not any(tensor.numel() for tensor in tensors):
            return Pending.resolved("all_reduce", None)
        group = self._group(chosen)
        with self._lock:
            operation = MpiReduction(self._communicator, group, tensors)
            group.waiting.append(operation)
            group.started += 1
            self._active.append(operation)
        pending: Pending[None] = Pending("all_reduce")
        pending.settle = partial(self._settle, operation, pending)
        pending.on_cancel = partial(setattr, pending, "settle", None)
        return pending

    def advance(self) -> bool:
        """Do what can be done at once; return whether an all-reduce is still open."""
        if not self._active or not self._lock.acquire(blocking=False):
            return bool(self._active)
        try:
            self._hear_who_left()
            for operation in list(self._active):
                if not operation.advance():
                    operation.failure = self._reason(operation)
                    if operation.failure is None:
                        continue
                    self._vain.append(operation)
                self._active.remove(operation)
                operation.has_ended = True
        finally:
            self._lock.release()
        return bool(self._active)

    def leave(self) -> None:
        """Tell the others; the receiving thread finishes the all-reduces that have begun."""
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

    def _reason(self, operation: MpiReduction) -> PeerLost | None:
        """Return why an all-reduce can never end: a member has left before it began this one."""
        name, number = operation.group.name, operation.number
        for member in operation.group.members:
            if member in self._left and self._left[member].get(name, 0) <= number:
                return PeerLost(
                    member,
                    "it has left its loop, and MPI's sums between hosts cannot go on without it; "
                    "give all workers the same number of steps, or start them with `gossamer run` "
                    "or torchrun",
                )
        return None

    def _settle(self, operation: MpiReduction, pending: Pending[None]) -> None:
        backoff = Backoff(self._stop, self._busy_s)
        self.advance()
        while not operation.has_ended:
            backoff.pause()
            self.advance()
        if pending.done:
            return  # cancelled
        if operation.failure is not None:
            pending.fail(operation.failure)
        else:
            operation.write()
            pending.resolve(None)
        # The operation refers to itself through these, and a cycle would keep the memory.
        pending.settle = pending.on_cancel = None

    def _group(self, members: tuple[int, ...]) -> ReduceGroup:
        known = self._groups.get(members)
        if known is None:
            number = 0
            if len(members) < self._communicator.size:
                # The first member proposes a number that no other group has; nobody waits.
                proposal = str(self._store.add("mpi/groups", 1))
                number = int(self._store.agree(f"mpi/group/{name_of(members)}", proposal))
            known = ReduceGroup(members, self._communicator.rank, number)
            known = self._groups.setdefault(members, known)
        return known
