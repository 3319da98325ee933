"""What the laws of a transport use: a table of laws, a listener, waits, and deaths.

A group of processes opens the transport once with `windows_of(size)`. All its processes run the
same laws one after the other (`run_laws`). A process prints "passed NAME" for each law. A process
that fails prints its traceback and ends with 1, and one that a law kills ends by SIGKILL.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.pending import Pending
from gossamer.real.transports.transport import StopToken, Transport, Window

PATIENCE_S = 20.0
WIDTH = 4096
SERVER_WIDTH = 100_003
Run = Callable[[Transport, int, int, "Tools"], None]
"""A law is a function of the transport, the rank of this process, the size of the group, and tools.
It raises an `AssertionError` if it is broken."""


@dataclass(frozen=True)
class Scenario:
    """One law, and the group of processes that it needs."""

    run: Run
    size: int
    victims: frozenset[int]
    apart: bool
    """Whether processes die or stop in it, so that no other law can run in its group."""

    @property
    def name(self) -> str:
        return self.run.__name__


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *, size: int = 3, victims: Iterable[int] = (), apart: bool = False
) -> Callable[[Run], Run]:
    """Enter a function `(transport, rank, size, tools)` into the table, under its name."""

    def enter(function: Run) -> Run:
        dying = frozenset(victims)
        SCENARIOS[function.__name__] = Scenario(function, size, dying, apart or bool(dying))
        return function

    return enter


def windows_of(size: int) -> dict[int, Window]:
    """Ends 0..size-1 are workers; ends size..2*size-1 are servers, one in each process."""
    workers = {rank: Window(WIDTH, torch.float32, rank) for rank in range(size)}
    servers = {size + rank: Window(SERVER_WIDTH, torch.float64, rank) for rank in range(size)}
    return workers | servers


def values_of(rank: int, count: int, operation: int = 0) -> Tensor:
    """Return the contribution of a process to an operation, which all processes can compute."""
    generator = torch.Generator().manual_seed(1000 * operation + rank)
    return torch.randn(count, generator=generator)


def mean_of(transport: Transport, value: Tensor, members: Sequence[int]) -> Pending[Tensor]:
    """Start the all-reduce of a copy; the result is that copy, once it is the mean."""
    own = value.clone()
    reduced = transport.all_reduce([own], members)
    mean: Pending[Tensor] = Pending(reduced.label, reduced.peer)
    mean.settle, mean.on_cancel = reduced.settle, reduced.cancel

    def ended() -> None:
        try:
            reduced.result()
            mean.resolve(own)
        except Exception as error:
            mean.fail(error)

    reduced.when_done(ended)
    return mean


@contextlib.contextmanager
def raises(kind: type[BaseException]) -> Generator[None]:
    """The body of the `with` statement must raise that exception."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


class FrameRecorder:
    """A listener that keeps frames by their source, and the time of each death."""

    def __init__(self) -> None:
        self.lost_at: dict[int, float] = {}
        self.reports: list[int] = []
        self.answer: Callable[[int, bytes], bool] | None = None
        """Called inside `frame`; it returns True if it has handled the frame."""
        self._frames: dict[int, deque[bytes]] = defaultdict(deque)
        self._changed = threading.Condition()

    def frame(self, source: int, data: memoryview) -> None:
        answer = self.answer
        content = bytes(data)
        if answer is not None and answer(source, content):
            return
        with self._changed:
            self._frames[source].append(content)
            self._changed.notify_all()

    def lost(self, process: int) -> None:
        self.reports.append(process)
        self.lost_at[process] = time.monotonic()

    def joined(self, process: int) -> None:
        pass

    def closed(self, process: int) -> None:
        pass

    def take(self, source: int) -> bytes:
        """Return the next frame of that process."""
        with self._changed:
            there = self._changed.wait_for(lambda: len(self._frames[source]) > 0, PATIENCE_S)
            assert there, f"no frame of process {source} arrived"
            return self._frames[source].popleft()


class Tools:
    """What a law may use besides the transport."""

    def __init__(self, transport: Transport) -> None:
        self.stop = StopToken()
        self.recorder = FrameRecorder()
        self._transport = transport
        self._scope = ""

    def begin(self, name: str) -> None:
        """A law begins, to which keys of the store belong from now on."""
        self._scope = name

    def key(self, label: str) -> str:
        return f"{self._scope}/{label}"

    def wait(self, pending: Pending[Any]) -> Any:
        """Await as a driver does: finish the operation here if possible, else wait for its end."""
        if not pending.done and pending.settle is not None:
            pending.settle()
            assert pending.done, f"settle left {pending.label!r} open"
        ended = threading.Event()
        pending.when_done(ended.set)
        self.until(ended.is_set, f"the end of {pending.label!r}", ended.wait)
        return pending.result()

    def until(
        self, condition: Callable[[], bool], what: str, pause: Callable[[float], Any] = time.sleep
    ) -> None:
        """Wait until a condition holds; fail after a generous time, and obey the stop token."""
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            self.stop.check()
            assert time.monotonic() < limit, f"waited in vain for {what}"
            pause(0.002)

    def arrive(self, label: str) -> None:
        """Say that this process has arrived at a place."""
        self._transport.store.add(self.key(label), 1)

    def wait_for_arrivals(self, label: str, count: int) -> None:
        key, store = self.key(label), self._transport.store
        self.until(lambda: store.add(key, 0) >= count, f"{count} arrivals at {label!r}")

    def barrier(self, label: str, count: int | None = None) -> None:
        """Wait for all processes, or for `count` of them, through the store."""
        self.arrive(label)
        self.wait_for_arrivals(label, self._transport.size if count is None else count)

    def everybody_agrees(self, label: str, value: Tensor) -> None:
        """All processes that call this must have the same bits."""
        digest = hashlib.sha256(value.numpy().tobytes()).hexdigest()
        agreed = self._transport.store.agree(self.key(label), digest)
        assert agreed == digest, f"processes disagree about {label!r}"

    def exchange(self, label: str, rank: int, number: int, among: Iterable[int]) -> list[int]:
        """Return the numbers of the processes `among`, in their order, through the store."""
        store = self._transport.store
        store.agree(self.key(f"{label} of {rank}"), str(number))
        numbers: list[int] = []
        for member in among:
            key = self.key(f"{label} of {member}")
            self.until(lambda key=key: store.get(key) is not None, key)
            numbers.append(int(store.get(key) or 0))
        return numbers

    def die(self) -> None:
        """Write the time into the store, and end this process by SIGKILL."""
        self._transport.store.agree(self.key("death"), repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def notices_death(self, victim: int) -> None:
        """The listener must hear of a death once, within two seconds."""
        self.until(lambda: victim in self.recorder.lost_at, f"the loss of process {victim}")
        assert victim in self._transport.lost
        assert self.recorder.reports.count(victim) == 1
        died = self._transport.store.get(self.key("death"))
        assert died is not None
        assert self.recorder.lost_at[victim] - float(died) < 2.0


def run_laws(transport: Transport, names: Sequence[str]) -> None:
    """Open the transport, run the laws in order, and close it; all processes call this."""
    torch.set_num_threads(1)
    tools = Tools(transport)
    rank, size = transport.rank, transport.size
    windows = windows_of(size)
    initial = {
        end: torch.zeros(window.numel, dtype=window.dtype)
        for end, window in windows.items()
        if window.process == rank
    }
    transport.open(windows, initial, tools.recorder, tools.stop)
    for name in names:
        law = SCENARIOS[name]
        tools.begin(name)
        law.run(transport, rank, size, tools)
        if not law.apart:
            tools.barrier("end")
        print(f"passed {name}", flush=True)
    transport.close()
