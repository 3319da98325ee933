"""What a method may touch on real workers: its words one by one, over transports made up here."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Coroutine, Generator
from typing import Any, cast

import pytest
import torch

from gossamer.errors import Late, PeerLost
from gossamer.observe.observer import Observer
from gossamer.pending import Pending, gather
from gossamer.real.addresses import Addresses
from gossamer.real.driver import Driver
from gossamer.real.router import Router
from gossamer.real.transports.local import LocalTransport
from gossamer.real.transports.transport import StopToken
from gossamer.real.worker import RealWorker
from gossamer.worker import Gradient, Message

LONG_S = 30.0
SHORT_S = 0.02


class Silent(LocalTransport):
    """Of worker 0 of two; what it sends goes nowhere."""

    size = 2

    def send(self, to: int, parts: Any) -> None:
        pass


class SlowToAdd(Silent):
    """Adds that end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.adds: list[Pending[None]] = []

    def accumulate(self, end: int, delta: torch.Tensor, start: int = 0) -> Pending[None]:
        self.adds.append(Pending("accumulate", end))
        return self.adds[-1]


def worker_over(transport: LocalTransport, driver: Driver | None = None) -> RealWorker:
    """Two servers: that of 0 in this process, that of 1 in the other."""
    slices = (slice(0, 5), slice(5, 10)) if transport.size == 2 else ()
    router = Router(transport, Addresses(transport.size, slices), driver or Driver(StopToken()))
    return RealWorker(router, 0, seed=0, pace=cast(Any, None), observer=Observer())


def drive(worker: RealWorker, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return worker._router.driver.drive(coroutine, "main", lambda: None)


@pytest.fixture
def without_collector() -> Generator[None]:
    """What is let go must go at once: models are too large to wait for cycles to be found."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_a_worker_keeps_no_model_that_its_method_has_let_go() -> None:
    """Neither a server's answer nor a neighbour's message lives longer than its last user."""
    worker = worker_over(Silent())
    worker._router.window_bytes = {0: 40}
    mailbox = worker._router.mailboxes[0]
    models: list[weakref.ref[torch.Tensor]] = []
    for number in range(1, 4):
        answer, message = worker.request(3, None, tag="inbox"), worker.receive("x", source=1)
        for tag, sender in ((("reply", number), 3), ("x", 1)):
            model = torch.zeros(10)
            models.append(weakref.ref(model))
            mailbox.deliver(tag, Message(sender, model))
            del model
        assert answer.result().numel() == message.result().payload.numel() == 10
    del answer, message
    assert [model() for model in models] == [None] * 6


def test_a_death_fails_what_waits_for_that_process() -> None:
    """A receive from its worker, a request to its server, what is asked of it afterwards."""
    worker = worker_over(Silent())
    waiting = [worker.receive("x", source=1), worker.request(3, None, tag="inbox")]
    anybody = worker.receive("x")
    worker._router.lost(1)
    waiting += [worker.receive("x", source=1), worker.request(3, None, tag="inbox")]
    for pending, peer in zip(waiting, [1, 3, 1, 3], strict=True):
        with pytest.raises(PeerLost) as lost:
            pending.result()
        assert lost.value.peer == peer
    assert not anybody.done


def test_a_worker_ends_when_its_adds_have_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that its method did not await: what is read afterwards has all of them."""
    transport, driver = SlowToAdd(), Driver(StopToken())
    worker = worker_over(transport, driver)
    for _ in range(3):
        worker.accumulate(2, torch.ones(5))
    transport.adds[1].resolve(None)
    waited: list[Pending[Any]] = []
    monkeypatch.setattr(driver, "wait", lambda pending, task: waited.append(pending))
    worker.finish()
    assert [one for one in waited if not one.done] == [transport.adds[0], transport.adds[2]]


class AveragesAtOnce(Silent):
    """Counts the averages, and which threads made them."""

    def __init__(self) -> None:
        super().__init__()
        self.averages: list[threading.Thread] = []

    def average(self, own: int, peer: int) -> Pending[None]:
        self.averages.append(threading.current_thread())
        return Pending.resolved("average", None)


def test_a_loop_that_waits_for_nobody_keeps_nobody_from_going_on() -> None:
    """The averaging of AD-PSGD as in its paper, beside one that trains."""
    transport, driver = AveragesAtOnce(), Driver(StopToken())
    worker = worker_over(transport, driver)
    worker._router.window_bytes = {1: 40}
    is_over = False

    async def average() -> None:
        while not is_over:
            await worker.average(1)

    async def train() -> int:
        """Until the other loop has gone on for a while in a thread of its own."""
        here = threading.current_thread()
        while sum(thread is not here for thread in transport.averages) < 3:
            await worker.sleep(SHORT_S)
        return len(transport.averages)

    assert drive(worker, worker.together(train(), average())) > 3
    is_over = True
    assert len(set(transport.averages)) == 2


def test_a_side_loop_that_sleeps_keeps_nobody_from_going_on() -> None:
    """It sleeps again and again until the other loop, beside it, has seen that."""
    worker = worker_over(Silent())
    ticks, is_over = 0, False

    async def tick() -> None:
        nonlocal ticks
        while not is_over:
            await worker.sleep(SHORT_S)
            ticks += 1

    async def train() -> None:
        nonlocal is_over
        while ticks < 3:
            await worker.sleep(SHORT_S / 10)
        is_over = True

    drive(worker, worker.together(train(), tick()))
    assert ticks >= 3


def test_a_loop_that_receives_goes_on_where_it_was_woken() -> None:
    """However much has come: its messages were waited for, and a server is such a loop."""
    worker = worker_over(Silent())
    threads: set[threading.Thread] = set()

    async def serve() -> None:
        for _ in range(1000):
            await worker.receive("x")
            threads.add(threading.current_thread())

    async def send() -> None:
        for number in range(1000):
            worker.send(0, number, tag="x")

    async def both() -> None:
        await send()
        await worker.start(serve())

    drive(worker, both())
    assert threads == {threading.current_thread()}


def test_what_its_awaiter_has_to_finish_may_end_in_time() -> None:
    """A sleep, a sum, reads put together: as in the simulator they give their results."""

    async def bounded(worker: RealWorker) -> None:
        await worker.within(LONG_S, worker.sleep(SHORT_S))
        unsettled = [sum_of(3.0), sum_of(4.0)]
        assert await worker.within(LONG_S, gather(unsettled)) == [3.0, 4.0]

    worker = worker_over(LocalTransport())
    drive(worker, bounded(worker))


def sum_of(value: float) -> Pending[float]:
    """One that whoever awaits it makes."""
    pending: Pending[float] = Pending("all_reduce")
    pending.settle = lambda: pending.resolve(value)
    return pending


def test_within_is_late_for_what_lasts_longer() -> None:
    """It ends at its time and not with the operation; a failure passes on as it is."""

    async def bounded(worker: RealWorker) -> None:
        with pytest.raises(Late, match=r"sleep did not end within 0\.02 s"):
            await worker.within(SHORT_S, worker.sleep(LONG_S))
        broken: Pending[None] = Pending("read")

        def settle() -> None:
            raise OSError("no such window")

        broken.settle = settle
        with pytest.raises(OSError, match="no such window"):
            await worker.within(LONG_S, broken)

    worker = worker_over(LocalTransport())
    drive(worker, bounded(worker))


def test_a_message_that_comes_too_late_goes_to_the_next_receive() -> None:
    """The receive that gave up has not taken it."""

    async def bounded(worker: RealWorker) -> Any:
        with pytest.raises(Late):
            await worker.within(SHORT_S, worker.receive("x"))
        worker.send(0, 7, tag="x")
        return (await worker.receive("x")).payload

    worker = worker_over(LocalTransport())
    assert drive(worker, bounded(worker)) == 7


def test_a_gradient_is_computed_by_its_awaiter_whatever_its_limit() -> None:
    """Nothing interrupts it, so it is late, or there, when it has been computed."""

    def gradient() -> Gradient:
        pending = Gradient("gradient")

        def compute() -> None:
            computed_by.append(threading.current_thread())
            pending.resolve(torch.ones(2))

        pending.settle = compute
        return pending

    async def bounded(worker: RealWorker) -> None:
        assert (await worker.within(LONG_S, gradient())).sum() == 2.0
        with pytest.raises(Late, match="gradient did not end within 0 s"):
            await worker.within(0.0, gradient())

    computed_by: list[threading.Thread] = []
    worker = worker_over(LocalTransport())
    drive(worker, bounded(worker))
    assert computed_by == [threading.current_thread()] * 2
