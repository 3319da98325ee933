"""The order of events of a real run: how it is recorded, and how it is executed again.

While a run is recorded, what its workers do between two waits happens one at a time: each such turn
holds a lock that all processes share, and gets the next number. Gradients are computed outside of
it, so workers still overlap where it matters. In a turn a worker's own coroutine goes on, or a
frame is delivered. The numbers are all that a replay needs, because everything else in a turn
follows from the turns before it.

In a replay all workers are in one process and take their turns in the recorded order. They run the
same code as on real processes; only the transport is another. So if the record is whole and the
machine computes alike, the same parameters come out, bit for bit.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from gossamer.errors import ConfigurationError, ProtocolError
from gossamer.pending import Pending
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.training import Training
from gossamer.real.transports.local import LocalStore, LocalTransport
from gossamer.real.transports.transport import Listener, Parts, Stopped, StopToken, Window
from gossamer.rules import mean_in_order

Turn = tuple[int, str, int, int]
"""The number of a turn, its kind, its source, and the worker that takes it."""
_NUMBER = struct.Struct("<q")


class EventOrder:
    """One process's part of a record: `order/RANK.jsonl`, and the number that all share."""

    def __init__(self, folder: Path, rank: int) -> None:
        place = folder / "order"
        place.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(place / ".turn", os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self._descriptor).st_size < _NUMBER.size:
            os.ftruncate(self._descriptor, _NUMBER.size)
        self._shared = mmap.mmap(self._descriptor, _NUMBER.size)
        # The file's lock excludes processes and is freed with them; threads need one of their own.
        self._lock = threading.Lock()
        self._file = (place / f"{rank}.jsonl").open("w", encoding="utf-8")

    def enter(self, kind: str, source: int = -1) -> None:
        self._lock.acquire()
        if self._file.closed:
            self._lock.release()
            raise Stopped
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        (number,) = _NUMBER.unpack_from(self._shared)
        _NUMBER.pack_into(self._shared, 0, number + 1)
        self._file.write(json.dumps([number, kind, source]) + "\n")

    def leave(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._lock.release()

    def close(self) -> None:
        """Close the record; a side loop that still asks for a turn is stopped."""
        with self._lock:
            self._file.close()


class Switch:
    """What the workers of a replay share instead of a network."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = LocalStore()
        self.windows: dict[int, Tensor] = {}
        self.listeners: dict[int, Listener] = {}
        self._frames: dict[tuple[int, int], deque[bytearray]] = {}
        self._sums: dict[int, dict[int, list[Tensor]]] = {}

    def send(self, source: int, to: int, parts: Parts) -> None:
        frame = bytearray().join(parts)
        self._frames.setdefault((source, to), deque()).append(frame)

    def deliver(self, source: int, to: int) -> None:
        waiting = self._frames.get((source, to))
        if not waiting:
            raise ProtocolError(
                f"the record delivers a frame from {source} to {to} that was not sent"
            )
        self.listeners[to].frame(source, memoryview(waiting.popleft()))

    def contribute(self, rank: int, number: int, tensors: Sequence[Tensor]) -> Pending[None]:
        """The n-th reduction of each worker is the n-th of all.

        As on real workers, it ends in the turn after the one that awaits it, never earlier.
        """
        if self.size == 1:
            return Pending.resolved("all_reduce", None)
        pending: Pending[None] = Pending("all_reduce")
        here = self._sums.setdefault(number, {})
        here[rank] = [tensor.clone() for tensor in tensors]

        def settle() -> None:
            if len(here) == self.size:
                values = zip(*(here[member] for member in sorted(here)), strict=True)
                for tensor, theirs in zip(tensors, values, strict=True):
                    tensor.copy_(mean_in_order(theirs))
                pending.resolve(None)
                self._sums.pop(number, None)

        pending.settle = settle
        return pending


class ReplayTransport(LocalTransport):
    """One worker's connection to the switch; the windows of all lie in this one process."""

    name = "replay"

    def __init__(self, switch: Switch, rank: int) -> None:
        self.rank, self.size, self.store = rank, switch.size, switch.store
        self._switch = switch
        self._windows = switch.windows
        self._reductions = 0

    def open(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], listener: Listener,
        stop: StopToken,
    ) -> None:  # fmt: skip
        self._switch.listeners[self.rank] = listener
        self._windows.update({end: value.clone() for end, value in initial.items()})

    def send(self, to: int, parts: Parts) -> None:
        self._switch.send(self.rank, to, parts)

    def average(self, own: int, peer: int) -> Pending[None]:
        mine, theirs = self._windows[own], self._windows[peer]
        mine.lerp_(theirs, 0.5)
        theirs.copy_(mine)
        return Pending.resolved("average", None)

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        self._reductions += 1
        return self._switch.contribute(self.rank, self._reductions, tensors)


def read_order(folder: Path, workers: int) -> list[Turn]:
    """The turns of all workers in order; a record with a gap is refused."""
    turns: list[Turn] = []
    for rank in range(workers):
        path = folder / "order" / f"{rank}.jsonl"
        if not path.exists():
            raise ConfigurationError(
                f"{folder} holds no order of events of worker {rank}; record a run with "
                "`gossamer train --record`"
            )
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                number, kind, source = json.loads(line)
            except ValueError:
                raise ConfigurationError(
                    f"{path} ends in the middle of a line: the run was cut short and cannot be "
                    "replayed to its end"
                ) from None
            turns.append((number, kind, source, rank))
    turns.sort()
    for expected, (number, *_) in enumerate(turns):
        if number != expected:
            raise ConfigurationError(
                f"the record in {folder} lacks turn {expected}; the run was cut short"
            )
    return turns


def replay(
    request: TrainRequest, workers: int, turns: Sequence[Turn],
    progress: Callable[[int], None] = lambda done: None,
) -> Tensor:  # fmt: skip
    """Execute a recorded run again. Returns its output parameters."""
    switch = Switch(workers)
    trainings = [Training(request, ReplayTransport(switch, rank)) for rank in range(workers)]
    for training in trainings:
        training.session.driver.is_replayed = True
        training.open()
    for number, kind, source, rank in turns:
        match kind:
            case "start":
                trainings[rank].start()
            case "run":
                trainings[rank].take_turn()
            case "free":
                trainings[rank].session.driver.go_on_freely(source)
            case "deliver":
                switch.deliver(source, rank)
            case _:
                raise ConfigurationError(
                    f"worker {source} died in the recorded run; a run with a death cannot be "
                    "replayed, because the moment in which memory was left is not known"
                )
        progress(number + 1)
    if not all(training.has_ended for training in trainings):
        raise ConfigurationError("the record ends before its workers do; the run was cut short")
    return trainings[0].output_of(trainings)
