"""Means by Gloo's own all-reduce: added in the engine's order, not in order of rank.

A death breaks such a group for good; `Reduction` then does the open sums again by messages and
stays with those.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.real.sums import key_of
from gossamer.real.torch_transport.rendezvous import Meeting, make_group

Finished = Callable[[BaseException | None], None]
_GRACE_S = 2.0  # a death is known through the pairs long before


class GlooEngine:
    """One thread and one Gloo group for each set of members."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._queues: dict[tuple[int, ...], SimpleQueue[tuple[Tensor, Finished]]] = {}
        self._lock = threading.Lock()

    def __call__(self, members: tuple[int, ...], value: Tensor, finished: Finished) -> None:
        with self._lock:
            queue = self._queues.get(members)
            if queue is None:
                queue = self._queues[members] = SimpleQueue()
                threading.Thread(
                    target=self._work, args=(members, queue), name="gossamer adds", daemon=True
                ).start()
        queue.put((value, finished))

    def _work(self, members: tuple[int, ...], queue: SimpleQueue[tuple[Tensor, Finished]]) -> None:
        group: Any = None
        while True:
            value, finished = queue.get()
            try:
                if group is None:
                    name = f"sum/{key_of(members)}"
                    group = make_group(self._meeting, self._meeting.connect_again(), name, members)
                group.allreduce([value]).wait()
            except RuntimeError as error:
                time.sleep(_GRACE_S)
                finished(PeerLost(members[0], f"Gloo's all-reduce failed: {error}"))
            else:
                value.div_(len(members))
                finished(None)
