"""Means by the engines themselves: Gloo's exchanges on the host, NCCL's all-reduces on GPUs.

A death breaks such a group for good; `Reduction` then does the open sums again by messages and
stays with those. A group of NCCL does not notice the death of a member, its kernels wait for ever:
so whoever waits for them looks at who was lost, and has them aborted; likewise where a member has
left the sums without its connections being closed. Gloo's exchanges wait for it until it closes,
which keeps nobody: the sums are made by messages meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from gossamer.real.transports.torch.exchange import Exchange
from gossamer.real.transports.torch.pipeline import Making, MakingGroup, Members
from gossamer.real.transports.torch.reduction_state import Order, key_of
from gossamer.real.transports.torch.rendezvous import FOR_EVER, Meeting, leave_store, make_lanes
from gossamer.real.transports.torch.wire import finish_stream

_PAUSE_S = 2e-5
# What NCCL does about errors by itself is to end the process; that is for us to decide. And its
# monitor asks the store from a thread of its own, also while the interpreter ends.
_QUIET_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class GroupEngine:
    """One group for each set of members."""

    def __init__(
        self, name: str, make: Callable[[Members], Any], fulfil: Callable[[Any, Order], Making], *,
        is_on_gpu: bool, leave: Callable[[Members], None] = lambda members: None,
    ) -> None:  # fmt: skip
        """`fulfil` does what a group is asked for; it raises RuntimeError where that failed.
        `leave` ends the waiting of a group in the making for its members."""
        self.is_on_gpu = is_on_gpu
        self._name = name
        self._make = make
        self._fulfil = fulfil
        self._leave = leave
        self._groups: dict[Members, MakingGroup] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def __call__(self, order: Order) -> None:
        members = order.members
        with self._lock:
            if self._is_closed:
                return  # nobody awaits it any more
            group = self._groups.get(members)
            if group is None:
                group = MakingGroup(self._name, members, self._make, self._fulfil)
                self._groups[members] = group
        group.ask(order)

    def lost(self, process: int) -> None:
        """It died, and what it took part in has been begun again by messages.

        Letting go of a group closes its connections, once what has been added up is collected or
        has failed. Members whose engines still wait for this one wake up by that; they would
        otherwise do so when it ends, perhaps at their own end.
        """
        for members, group in self._of(lambda members: process in members):
            self._leave(members)
            group.let_go(is_closing=False)

    def close(self, seconds: float) -> None:
        """A thread that wakes inside Gloo while the interpreter ends would abort the process."""
        until = time.monotonic() + seconds
        with self._lock:
            self._is_closed = True
        groups = self._of(lambda members: True)
        for members, group in groups:
            self._leave(members)
            group.let_go(is_closing=True)
        for _, group in groups:
            group.join(until)

    def _of(self, concerns: Callable[[Members], bool]) -> list[tuple[Members, MakingGroup]]:
        if self.is_on_gpu:
            return []  # nobody waits inside of NCCL: those who wait look at who was lost
        with self._lock:
            return [pair for pair in self._groups.items() if concerns(pair[0])]


def gloo_engine(meeting: Meeting) -> GroupEngine:
    """On the host, in order of rank."""

    stores: dict[Members, Store] = {}
    left: set[Members] = set()

    def make(members: Members) -> Any:
        store = stores[members] = meeting.connect_again()
        if members in left:
            leave_store(store)
        lanes = make_lanes(meeting, store, f"sum/{key_of(members)}", members)
        return Exchange(lanes, members.index(meeting.rank), len(members))

    def leave(members: Members) -> None:
        left.add(members)
        if members in stores:
            leave_store(stores[members])

    return GroupEngine("Gloo", make, Exchange.fulfil, is_on_gpu=False, leave=leave)


def nccl_engine(
    meeting: Meeting, device: torch.device, lost: Callable[[], frozenset[int]]
) -> GroupEngine:
    """On GPUs of which each process has its own; `lost` are those known to have died."""
    # A stream of its own: one that others use would stand still with it when a member dies.
    stream = torch.cuda.Stream(device)
    kept: list[Store] = []
    """The groups hold on to them, but not to what is Python's in them."""

    def make(members: Members) -> Any:
        nccl = cast(Any, distributed).ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = FOR_EVER
        name = f"{meeting.prefix}/nccl/{key_of(members)}"
        connection = meeting.connect_again()
        kept.append(connection)
        store = PrefixStore(name, connection)
        before = {variable: os.environ.get(variable) for variable in _QUIET_NCCL}
        os.environ.update(_QUIET_NCCL)
        try:
            return nccl(store, members.index(meeting.rank), len(members), options)
        finally:
            for variable, text in before.items():
                if text is None:
                    del os.environ[variable]
                else:
                    os.environ[variable] = text

    def fulfil(group: Any, order: Order) -> Making:
        yield  # one after the other: its kernels would not run at once
        target, members = order.target, order.members
        with torch.cuda.device(device), torch.cuda.stream(stream):
            target.copy_(order.value)
            work = group.allreduce([target])
            while not work.is_completed():
                if lost().intersection(members) or not order.is_wanted():
                    group.abort()
                    raise RuntimeError("a member has died, or has left the sums")
                time.sleep(_PAUSE_S)
            work.wait()
            target.div_(len(members))
            finish_stream(target)
            order.landed(slice(0, target.numel()))
        return None

    return GroupEngine("NCCL", make, fulfil, is_on_gpu=True)
