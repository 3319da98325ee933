"""A worker whose exchanges are written down among the first moments of its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gossamer.pending import Pending
from gossamer.real.moments import Moments
from gossamer.real.router import Router
from gossamer.real.worker import RealWorker
from gossamer.worker import Message, Tag


class WatchedWorker(RealWorker):
    """Each word that moves a model or a message, and how long its call takes this thread."""

    def __init__(self, hub: Router, end: int, moments: Moments, **parts: Any) -> None:
        super().__init__(hub, end, **parts)
        self._moments = moments

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        with self._moments.exchanging("send", "to", to):
            return super().send(to, payload, tag=tag)

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        with self._moments.exchanging("request", "to", to):
            return super().request(to, payload, tag=tag)

    def reply(self, message: Message, payload: Any) -> Pending[None]:
        with self._moments.exchanging("reply", "to", message.source):
            return super().reply(message, payload)

    def broadcast(self, value: Tensor | None, *, root: int, over: Sequence[int]) -> Pending[Tensor]:
        with self._moments.exchanging("broadcast", "from", root):
            return super().broadcast(value, root=root, over=over)

    def all_gather(
        self, value: Tensor, *, over: Sequence[int] | None = None
    ) -> Pending[dict[int, Tensor]]:
        with self._moments.exchanging("all_gather", "", None):
            return super().all_gather(value, over=over)

    def all_reduce(self, value: Tensor, *, over: Sequence[int] | None = None) -> Pending[Tensor]:
        with self._moments.exchanging("all_reduce", "", None):
            return super().all_reduce(value, over=over)

    def read(self, peer: int) -> Pending[Tensor]:
        with self._moments.exchanging("read", "from", peer):
            return super().read(peer)

    def accumulate(self, peer: int, delta: Tensor, *, start: int = 0) -> Pending[None]:
        with self._moments.exchanging("accumulate", "to", peer):
            return super().accumulate(peer, delta, start=start)

    def average(self, peer: int) -> Pending[None]:
        with self._moments.exchanging("average", "with", peer):
            return super().average(peer)
