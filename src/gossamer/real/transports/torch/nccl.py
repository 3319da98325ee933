"""Means by NCCL, for processes that each have a GPU of their own.

A group of NCCL does not notice the death of a member: its kernels wait for ever. So the thread that
waits for them checks whether a departure has changed the mean, and aborts them if so. This mean and
all later ones of that group are then computed by messages (`reduce`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import torch
from torch import distributed
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from gossamer.errors import PeerLost
from gossamer.real.transports.torch.reduce import MessageAllReduce
from gossamer.real.transports.torch.reduce_state import Attempt, Mean, key_of
from gossamer.real.transports.torch.rendezvous import FOR_EVER, Meeting
from gossamer.real.transports.torch.wire import finish_stream

_PAUSE_S = 2e-5
_GRACE_S = 2.0  # the links report a death much sooner
_LOOK_S = 5e-3
# By itself NCCL ends the process after an error, which is our decision. Its monitor uses the store
# in a thread of its own, even while the interpreter ends.
_QUIET_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class _Request(NamedTuple):
    """A mean that NCCL is to compute."""

    reduction: MessageAllReduce
    mean: Mean
    attempt: Attempt

    def is_current(self) -> bool:
        return self.reduction.is_current(self.mean, self.attempt)


class NcclMeans:
    """One thread and one NCCL group for each set of members. The thread computes one mean after the
    other, because kernels of one group do not run at the same time."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self._meeting = meeting
        self._device = device
        # A stream that others use too would stop with this one when a member dies.
        self._stream = torch.cuda.Stream(device)
        self._queues: dict[tuple[int, ...], SimpleQueue[_Request]] = {}
        self._lock = threading.Lock()
        self._stores: list[Store] = []
        """Kept alive here, because the groups keep only the C++ side of a store alive."""

    def start(self, reduction: MessageAllReduce, mean: Mean, attempt: Attempt) -> None:
        members = mean.group.members
        finish_stream(attempt.value)  # then every stream may use the value
        with self._lock:
            if members not in self._queues:
                self._queues[members] = SimpleQueue()
                threading.Thread(
                    target=self._work, args=(members, self._queues[members]),
                    name="gossamer reduces by NCCL", daemon=True,
                ).start()  # fmt: skip
        self._queues[members].put(_Request(reduction, mean, attempt))

    def _work(self, members: tuple[int, ...], queue: SimpleQueue[_Request]) -> None:
        group: Any = None
        while True:
            request = queue.get()
            try:
                # After a departure the mean is computed by messages.
                if request.is_current():
                    group = group or self._make_group(members)
                    self._reduce(group, request)
            except RuntimeError as error:
                self._fail(request, error)
            del request  # else its tensors would be kept until the next request

    def _reduce(self, group: Any, request: _Request) -> None:
        target = request.attempt.mean
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            target.copy_(request.attempt.value)
            work = group.allreduce([target])
            while not work.is_completed():
                if not request.is_current():
                    group.abort()
                    raise RuntimeError("a member has died, or has left the sums")
                time.sleep(_PAUSE_S)
            work.wait()
            target.div_(len(request.attempt.contributors))
            finish_stream(target)
        request.reduction.finish(request.mean, request.attempt, is_by_nccl=True)

    def _fail(self, request: _Request, error: RuntimeError) -> None:
        """Fail the mean, unless this process hears of a departure soon: then messages take over."""
        until = time.monotonic() + _GRACE_S
        while request.is_current() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if request.is_current():
            first = request.attempt.contributors[0]
            request.mean.result.fail(PeerLost(first, f"NCCL's all-reduce failed: {error}"))

    def _make_group(self, members: tuple[int, ...]) -> Any:
        nccl = cast(Any, distributed).ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = FOR_EVER
        connection = self._meeting.connect_again()
        self._stores.append(connection)
        store = PrefixStore(f"{self._meeting.prefix}/nccl/{key_of(members)}", connection)
        with _quiet_nccl():
            return nccl(store, members.index(self._meeting.rank), len(members), options)


@contextmanager
def _quiet_nccl() -> Generator[None]:
    before = {variable: os.environ.get(variable) for variable in _QUIET_NCCL}
    os.environ.update(_QUIET_NCCL)
    try:
        yield
    finally:
        for variable, text in before.items():
            if text is None:
                del os.environ[variable]
            else:
                os.environ[variable] = text
