"""Means by NCCL, for processes of which each has a GPU of its own.

A group of NCCL does not notice the death of a member: its kernels wait for ever. So whoever waits
for them looks whether the mean still stands as it was begun, and has them aborted if not. The
mean is then made by messages (`reduce`), and so are all that follow in that group.
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
_GRACE_S = 2.0  # a death is known through the links long before
_LOOK_S = 5e-3
# What NCCL does about errors by itself is to end the process; that is for us to decide. And its
# monitor asks the store from a thread of its own, also while the interpreter ends.
_QUIET_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class _Request(NamedTuple):
    """A mean that NCCL is to make."""

    reduction: MessageAllReduce
    mean: Mean
    attempt: Attempt

    def is_current(self) -> bool:
        return self.reduction.is_current(self.mean, self.attempt)


class NcclMeans:
    """One thread, and one group of NCCL's, for each set of members: it makes one mean after the
    other, as their kernels would not run at once."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self._meeting = meeting
        self._device = device
        # A stream of its own: one that others use would stand still with it when a member dies.
        self._stream = torch.cuda.Stream(device)
        self._queues: dict[tuple[int, ...], SimpleQueue[_Request]] = {}
        self._lock = threading.Lock()
        self._stores: list[Store] = []
        """The groups hold on to them, but not to what is Python's in them."""

    def start(self, reduction: MessageAllReduce, mean: Mean, attempt: Attempt) -> None:
        members = mean.group.members
        finish_stream(attempt.value)  # every stream may use it now
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
                # Where a member has departed the mean is made by messages.
                if request.is_current():
                    group = group or self._make_group(members)
                    self._reduce(group, request)
            except RuntimeError as error:
                self._fail(request, error)
            del request  # its tensors are not to be kept until the next one comes

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
        """Perhaps of a death, of which this process will hear; then it is done by messages."""
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
