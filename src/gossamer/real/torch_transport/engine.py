"""Means by the engines themselves: Gloo's exchanges on the host, NCCL's all-reduces on GPUs.

A death breaks such a group for good; `Reduction` then does the open sums again by messages and
stays with those. A group of NCCL does not notice the death of a member, its kernels wait for ever:
so whoever waits for them looks at who was lost, and has them aborted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import PeerLost
from gossamer.real.memory import take_elements
from gossamer.real.sums import Order, is_by_each, key_of, mean_into
from gossamer.real.torch_transport.rendezvous import FOR_EVER, Meeting, make_group
from gossamer.real.wire import finish_stream, raw

Members = tuple[int, ...]
_GRACE_S = 2.0  # a death is known through the pairs long before
_LOOK_S = 5e-3
_PAUSE_S = 2e-5
_PIECE_BYTES = 2 << 20
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class GroupEngine:
    """One thread and one group for each set of members."""

    def __init__(
        self, name: str, make: Callable[[Members], Any], fulfil: Callable[[Any, Order], None], *,
        is_on_gpu: bool,
    ) -> None:  # fmt: skip
        """`fulfil` does what a group is asked for; it raises RuntimeError where that failed."""
        self.is_on_gpu = is_on_gpu
        self._name = name
        self._make = make
        self._fulfil = fulfil
        self._queues: dict[Members, SimpleQueue[Order | None]] = {}
        self._threads: dict[Members, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_closing = False

    def __call__(self, order: Order) -> None:
        members = order.members
        with self._lock:
            queue = self._queues.get(members)
            if queue is None:
                queue = self._queues[members] = SimpleQueue()
                thread = self._threads[members] = threading.Thread(
                    target=self._work, args=(members, queue), name="gossamer adds", daemon=True
                )
                thread.start()
        queue.put(order)

    def lost(self, process: int) -> None:
        """It died, and what it took part in has been begun again by messages.

        Letting go of a group closes its connections. Members whose engines still wait for this one
        wake up by that; they would otherwise do so when it ends, perhaps at their own end.
        """
        self._let_go(lambda members: process in members)

    def close(self, seconds: float) -> None:
        """A thread that wakes inside Gloo while the interpreter ends would abort the process."""
        self._is_closing = True
        until = time.monotonic() + seconds
        for thread in self._let_go(lambda members: True):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _let_go(self, concerns: Callable[[Members], bool]) -> list[threading.Thread]:
        if self.is_on_gpu:
            return []  # nobody waits inside of NCCL: those who wait look at who was lost
        with self._lock:
            groups = [members for members in self._queues if concerns(members)]
            for members in groups:
                self._queues[members].put(None)
            return [self._threads[members] for members in groups]

    def _work(self, members: Members, queue: SimpleQueue[Order | None]) -> None:
        group: Any = None
        while (order := queue.get()) is not None:
            if self._is_closing:
                continue  # nobody awaits it any more
            try:
                if order.is_wanted():
                    if group is None:
                        group = self._make(members)
                    self._fulfil(group, order)
            except RuntimeError as error:
                until = time.monotonic() + _GRACE_S
                while self._may_be_a_death(order) and time.monotonic() < until:
                    time.sleep(_LOOK_S)
                reason = f"{self._name}'s all-reduce failed: {error}"
                order.finished(PeerLost(members[0], reason))
            else:
                order.finished(None)
            del order  # its tensors are not to be kept until the next one comes

    def _may_be_a_death(self, order: Order) -> bool:
        """Of which this process will hear, and begin the sum again without this engine."""
        return order.is_wanted() and not self._is_closing


def gloo_engine(meeting: Meeting) -> GroupEngine:
    """On the host, in order of rank."""

    def make(members: Members) -> Any:
        name = f"sum/{key_of(members)}"
        group = make_group(meeting, meeting.connect_again(), name, members)
        return Exchange(group, members.index(meeting.rank), len(members))

    return GroupEngine("Gloo", make, Exchange.fulfil, is_on_gpu=False)


class Exchange:
    """Means from Gloo's sends and receives.

    Of what Gloo's own all-reduce takes for 0.8 MB between two processes, 2.2 ms, its sends and
    receives need 0.4; and so it can be added in order of rank. Long values go in pieces: one is
    added up while the next is under way.
    """

    def __init__(self, group: Any, own: int, size: int) -> None:
        """`own` is this process's place among the members."""
        self._group = group
        self._own = own
        self._size = size
        self._others = [place for place in range(size) if place != own]

    def fulfil(self, order: Order) -> None:
        value, target = order.value, order.target
        is_by_all = is_by_each(value.nbytes, self._size)
        shares = self._shares(value, is_whole=is_by_all)
        # What is about to be sent is announced first: it then starts as soon as it is asked for.
        sends = [self._send(value[piece], to, 0) for to in self._others for piece in shares[to]]
        mine = shares[self._own]
        ahead = self._ask_for(value, mine[0])
        for piece, following in zip_longest(mine, mine[1:]):
            values, receives = ahead
            if following is not None:
                ahead = self._ask_for(value, following)
            _wait_for(receives)
            values.insert(self._own, value[piece])
            mean_into(target[piece], values)
            if not is_by_all:
                sends += [self._send(target[piece], to, 1) for to in self._others]
            order.landed(piece)
        if not is_by_all:
            self._receive_the_rest(order, shares)
        _wait_for(sends)

    def _receive_the_rest(self, order: Order, shares: Sequence[Sequence[slice]]) -> None:
        pieces = [(place, piece) for place in self._others for piece in shares[place]]
        works = [self._receive(order.target[piece], place, 1) for place, piece in pieces]
        for work, (_, piece) in zip(works, pieces, strict=True):
            work.wait()
            order.landed(piece)

    def _shares(self, value: Tensor, *, is_whole: bool) -> list[list[slice]]:
        """What each place adds up, in pieces."""
        count, size = value.numel(), self._size
        if is_whole:
            return [_pieces(0, count, value.element_size())] * size
        cuts = [count * place // size for place in range(size + 1)]
        return [_pieces(start, end, value.element_size()) for start, end in pairwise(cuts)]

    def _ask_for(self, value: Tensor, piece: slice) -> tuple[list[Tensor], list[Any]]:
        values = [take_elements(piece.stop - piece.start, value.dtype) for _ in self._others]
        asked = zip(values, self._others, strict=True)
        return values, [self._receive(value, place, 0) for value, place in asked]

    def _send(self, value: Tensor, to: int, tag: int) -> Any:
        return self._group.send([raw(value)], to, tag)

    def _receive(self, value: Tensor, source: int, tag: int) -> Any:
        return self._group.recv([raw(value)], source, tag)


def _pieces(start: int, end: int, element_size: int) -> list[slice]:
    length = _PIECE_BYTES // element_size
    return [slice(at, min(at + length, end)) for at in range(start, end, length)] or [
        slice(start, end)
    ]


def _wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()


def nccl_engine(
    meeting: Meeting, device: torch.device, lost: Callable[[], frozenset[int]]
) -> GroupEngine:
    """On GPUs of which each process has its own; `lost` are those known to have died."""
    # A stream of its own: one that others use would stand still with it when a member dies.
    stream = torch.cuda.Stream(device)

    def make(members: Members) -> Any:
        nccl = cast(Any, distributed).ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = FOR_EVER
        name = f"{meeting.prefix}/nccl/{key_of(members)}"
        store = PrefixStore(name, meeting.connect_again())
        # What NCCL does about errors by itself is to end the process; that is for us to decide.
        before = os.environ.get(_NCCL_ERRORS)
        os.environ[_NCCL_ERRORS] = "0"
        try:
            return nccl(store, members.index(meeting.rank), len(members), options)
        finally:
            if before is None:
                del os.environ[_NCCL_ERRORS]
            else:
                os.environ[_NCCL_ERRORS] = before

    def fulfil(group: Any, order: Order) -> None:
        target, members = order.target, order.members
        with torch.cuda.device(device), torch.cuda.stream(stream):
            target.copy_(order.value)
            work = group.allreduce([target])
            while not work.is_completed():
                if lost().intersection(members):
                    group.abort()
                    raise RuntimeError("a member has died")
                time.sleep(_PAUSE_S)
            work.wait()
            target.div_(len(members))
            finish_stream(target)
            order.landed(slice(0, target.numel()))

    return GroupEngine("NCCL", make, fulfil, is_on_gpu=True)
