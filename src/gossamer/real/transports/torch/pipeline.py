"""The sums of one group of an engine: begun early, added up in order, finished in order.

What has been asked for is begun while the sums before it are still under way: its bytes follow
theirs without a gap. And while one thread waits for what others have added up of a sum, another
adds up this process's share of the next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import cache
from queue import SimpleQueue
from typing import Any, Protocol

from gossamer.errors import PeerLost
from gossamer.real.transports.torch.reduction_state import UNDER_WAY, Order, weight_of

_GRACE_S = 2.0  # a death is known through the pairs long before
_LOOK_S = 5e-3

Members = tuple[int, ...]


class Rest(Protocol):
    """What is left to wait for when this process has done its share of a sum."""

    def wait(self) -> None:
        """Raises RuntimeError where it does not come."""
        ...

    def give_up(self) -> None:
        """It is not waited for any more, or has failed."""
        ...


Making = Generator[None, None, Rest | None]
"""A sum in the making. It yields before it waits for others; RuntimeError says that it failed."""


class MakingGroup:
    """The two threads of a group."""

    def __init__(
        self, name: str, members: Members, make: Callable[[Members], Any],
        fulfil: Callable[[Any, Order], Making],
    ) -> None:  # fmt: skip
        self._name = name
        self._members = members
        self._make = make
        self._fulfil = fulfil
        self._asked: SimpleQueue[Order | None] = SimpleQueue()
        self._left: SimpleQueue[tuple[Order, Rest | None] | None] = SimpleQueue()
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._collected = 0
        """Sums handed to the second thread that are not known to have ended."""
        self._unfinished = 0
        """The weight of all that have been begun, and are not known to have ended."""
        self._is_closing = False
        self._threads = [
            threading.Thread(target=work, name=f"gossamer {what}", daemon=True)
            for what, work in (("adds", self._add), ("collects", self._collect))
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, order: Order) -> None:
        self._asked.put(order)

    def let_go(self, *, is_closing: bool) -> None:
        """Nothing comes any more; `is_closing`: and nobody awaits what has come."""
        self._is_closing = self._is_closing or is_closing
        self._asked.put(None)

    def join(self, until: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    # ------------------------------------------------------------------ the first thread

    def _add(self) -> None:
        group = cache(lambda: self._make(self._members))
        under_way: deque[tuple[Order, Making]] = deque()
        is_over = False
        while under_way or not is_over:
            has_room = self._has_room(wait=not under_way)
            if under_way and (is_over or not has_room or self._asked.empty()):
                if not self._goes_on(*under_way[0]):
                    under_way.popleft()
                continue
            order = self._asked.get()
            if order is None:
                is_over = True
            elif not self._is_closing:
                self._unfinished += weight_of(order.value.nbytes)
                making = self._making(group, order)
                if self._goes_on(order, making):
                    under_way.append((order, making))
                del making
            del order  # its tensors are not to be kept until the next one comes
        self._left.put(None)

    def _has_room(self, *, wait: bool) -> bool:
        while not self._ended.empty() or (wait and self._unfinished > UNDER_WAY):
            self._unfinished -= self._ended.get()
            self._collected -= 1
        return self._unfinished <= UNDER_WAY

    def _making(self, group: Callable[[], Any], order: Order) -> Making:
        return (yield from self._fulfil(group(), order))

    def _goes_on(self, order: Order, making: Making) -> bool:
        """Up to where it may wait the next time; False: it is added up, or over."""
        rest: Rest | None = None
        try:
            if order.is_wanted():
                next(making)
                return True
            making.close()
        except StopIteration as end:
            rest = end.value
        except RuntimeError as error:
            self._failed(order, error)
            self._unfinished -= weight_of(order.value.nbytes)
            return False
        if rest is None and not self._collected:
            order.finished(None)
            self._unfinished -= weight_of(order.value.nbytes)
        else:
            self._collected += 1
            self._left.put((order, rest))
        return False

    # ------------------------------------------------------------------ the second thread

    def _collect(self) -> None:
        while (left := self._left.get()) is not None:
            order, rest = left
            try:
                if rest is not None and order.is_wanted():
                    rest.wait()
                elif rest is not None:
                    rest.give_up()
            except RuntimeError as error:
                assert rest is not None
                rest.give_up()
                self._failed(order, error)
            else:
                order.finished(None)
            self._ended.put(weight_of(order.value.nbytes))
            del left, order, rest

    def _failed(self, order: Order, error: RuntimeError) -> None:
        until = time.monotonic() + _GRACE_S
        while self._may_be_a_death(order) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        reason = f"{self._name}'s all-reduce failed: {error}"
        order.finished(PeerLost(self._members[0], reason))

    def _may_be_a_death(self, order: Order) -> bool:
        """Of which this process will hear, and begin the sum again without this engine."""
        return order.is_wanted() and not self._is_closing
