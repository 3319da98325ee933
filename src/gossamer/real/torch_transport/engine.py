"""Means by the engines' own all-reduces: added in their order, not in order of rank.

A death breaks such a group for good; `Reduction` then does the open sums again by messages and
stays with those. A group of NCCL does not notice the death of a member, its kernels wait for ever:
so whoever waits for them looks at who was lost, and has them aborted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import PeerLost
from gossamer.real.sums import key_of
from gossamer.real.torch_transport.rendezvous import FOR_EVER, Meeting, make_group
from gossamer.real.wire import finish_stream

Finished = Callable[[BaseException | None], None]
Members = tuple[int, ...]
_GRACE_S = 2.0  # a death is known through the pairs long before
_PAUSE_S = 2e-5
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class GroupEngine:
    """One thread and one group for each set of members."""

    def __init__(
        self, name: str, make: Callable[[Members], Any],
        add: Callable[[Any, Tensor, Members], None], *, is_on_gpu: bool,
    ) -> None:  # fmt: skip
        """`add` replaces a value by the sum; it raises RuntimeError where that failed."""
        self.is_on_gpu = is_on_gpu
        self._name = name
        self._make = make
        self._add = add
        self._queues: dict[Members, SimpleQueue[tuple[Tensor, Finished]]] = {}
        self._lock = threading.Lock()

    def __call__(self, members: Members, value: Tensor, finished: Finished) -> None:
        with self._lock:
            queue = self._queues.get(members)
            if queue is None:
                queue = self._queues[members] = SimpleQueue()
                threading.Thread(
                    target=self._work, args=(members, queue), name="gossamer adds", daemon=True
                ).start()
        queue.put((value, finished))

    def _work(self, members: Members, queue: SimpleQueue[tuple[Tensor, Finished]]) -> None:
        group: Any = None
        while True:
            value, finished = queue.get()
            try:
                if group is None:
                    group = self._make(members)
                self._add(group, value, members)
            except RuntimeError as error:
                time.sleep(_GRACE_S)
                reason = f"{self._name}'s all-reduce failed: {error}"
                finished(PeerLost(members[0], reason))
            else:
                finished(None)


def gloo_engine(meeting: Meeting) -> GroupEngine:
    """On the host."""

    def make(members: Members) -> Any:
        return make_group(meeting, meeting.connect_again(), f"sum/{key_of(members)}", members)

    def add(group: Any, value: Tensor, members: Members) -> None:
        group.allreduce([value]).wait()
        value.div_(len(members))

    return GroupEngine("Gloo", make, add, is_on_gpu=False)


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

    def add(group: Any, value: Tensor, members: Members) -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            work = group.allreduce([value])
            while not work.is_completed():
                if lost().intersection(members):
                    group.abort()
                    raise RuntimeError("a member has died")
                time.sleep(_PAUSE_S)
            work.wait()
            value.div_(len(members))
            finish_stream(value)

    return GroupEngine("NCCL", make, add, is_on_gpu=True)
