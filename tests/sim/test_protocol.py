"""What the simulator demands of a method's text, and how it says that nobody can go on."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from gossamer.config.faults import Fault
from gossamer.errors import Late, PeerLost, ProtocolError, RunFailed, Stalled
from gossamer.replica import Replica
from gossamer.rules import pair_delta
from gossamer.runs.result import Result
from gossamer.sim.simulation import Simulation
from gossamer.worker import Worker
from support import Role, bowl, bowl_gradient, build, cluster_of, only_here, rows, scatter, spread


def prepared(role: Role, workers: int = 3, *faults: Fault, **cluster: Any) -> Simulation:
    """A run of a method that exists in one test only, with zero gradients."""
    shape = cluster_of(workers, faults=faults, **cluster)
    return build(bowl(), only_here(role), shape, steps=6, engine="none")


def run(role: Role, workers: int = 3, *faults: Fault, **cluster: Any) -> Result:
    return prepared(role, workers, *faults, **cluster).run()


# ---------------------------------------------------------------------- deadlock


async def single_loop(w: Worker, x: Replica) -> None:
    """Pairwise averaging in one loop: offers are answered only between the own exchanges."""
    for _ in w.steps():
        x.descend_(await w.gradient(x))
        for message in w.collect("offer"):
            mine = x.snapshot()
            w.reply(message, mine)
            x.add_(pair_delta(mine, message.payload))
        mine = x.snapshot()
        theirs = await w.request((w.rank + 1) % w.size, mine, tag="offer")
        x.add_(pair_delta(mine, theirs))


def test_three_who_offer_around_a_ring_in_one_loop_deadlock() -> None:
    """Everybody waits for the next one's answer, and the report says exactly that."""
    with pytest.raises(Stalled) as stalled:
        run(single_loop, 3, distribution="constant")
    report = str(stalled.value)
    for rank in range(3):
        assert f"worker {rank} waits for reply of worker {(rank + 1) % 3} since 0.01" in report
    assert "nobody can go on at 0.01" in report


@pytest.mark.parametrize(
    ("topology", "workers"), [("bipartite_ring", 4), ("bipartite_ring", 2), ("ring", 3)]
)
def test_ad_psgd_does_not_deadlock(topology: str, workers: int) -> None:
    """Active workers offer and passive ones answer, or everyone answers in a loop of its own."""
    for seed, distribution in enumerate(["constant", "normal", "exponential"]):
        cluster = cluster_of(workers, distribution=distribution)
        method = f"ad_psgd:topology={topology}"
        simulation = build(bowl(), method, cluster, steps=20, seed=seed, engine="none")
        scatter(simulation)
        before = spread(rows(simulation))
        result = simulation.run()
        assert result.steps >= 20 * workers
        assert spread(rows(simulation)) < 1e-3 * before


def test_a_receive_that_nobody_serves_is_reported_with_its_time() -> None:
    """A stall names the worker, the operation, the peer and since when."""

    async def waits(w: Worker, x: Replica) -> None:
        await w.sleep(0.25 * (w.rank + 1))
        if w.rank == 1:
            await w.receive("never", source=2)

    with pytest.raises(Stalled, match=r"worker 1 waits for receive of worker 2 since 0\.500000 s"):
        run(waits)


def test_waiting_for_the_dead_is_an_error_not_a_stall() -> None:
    """An operation that names a peer fails when the others learn of its death."""

    async def waits(w: Worker, x: Replica) -> None:
        if w.rank == 0:
            await w.receive("never", source=2)
        await w.sleep(1.0)

    with pytest.raises(PeerLost, match="worker 2 is lost: it died"):
        run(waits, 3, Fault("kill", at=0.1, worker=2))


@pytest.mark.parametrize(
    ("one_side", "other_side", "losers"),
    [({0, 1}, {3, 4}, {0, 2, 3}), ({1}, {0, 2, 3, 4}, set[int]())],
)
def test_a_collective_that_a_partition_breaks_fails_for_all_who_wait(
    one_side: set[int], other_side: set[int], losers: set[int]
) -> None:
    """For worker 2, too, who can reach everybody: the gathering will not come about. But where the
    partition cuts off nobody except the dead, it does come about."""
    lost: dict[int, str] = {}

    async def meets(w: Worker, x: Replica) -> None:
        await w.sleep(0.5 if w.rank == 4 else 0.0)
        try:
            await w.all_reduce(x.snapshot())
        except PeerLost as error:
            lost[w.rank] = str(error)

    sides = (frozenset(one_side), frozenset(other_side))
    apart = Fault("partition", at=0.01, lasts=5.0, sides=sides)
    run(meets, 5, apart, Fault("kill", at=0.05, worker=1), deadline=0.2)
    assert lost.keys() == losers
    assert all("unreachable for longer than the deadline" in text for text in lost.values())


# ---------------------------------------------------------------------- the Worker's words


@pytest.mark.parametrize("word", ["sleep", "receive", "all_reduce", "read"])
def test_a_method_awaits_its_gradient_before_anything_else(word: str) -> None:
    """In a user's loop the loop is the gradient, so nothing else may be awaited meanwhile."""

    async def impatient(w: Worker, x: Replica) -> None:
        gradient = w.gradient(x)
        others = {
            "sleep": lambda: w.sleep(0.001),
            "receive": lambda: w.receive("model"),
            "all_reduce": lambda: w.all_reduce(x.snapshot()),
            "read": lambda: w.read((w.rank + 1) % w.size),
        }
        await others[word]()
        x.descend_(await gradient)

    with pytest.raises(ProtocolError, match=rf"awaits '{word}' while its gradient is outstanding"):
        run(impatient)


def test_what_was_started_may_stay_on_the_way_during_a_gradient() -> None:
    """Starting is free: only the await is ordered, and a gradient's own buckets may be awaited."""

    async def overlapping(w: Worker, x: Replica) -> None:
        for _ in w.steps():
            reading = w.read((w.rank + 1) % w.size)
            gradient = w.gradient(x)
            for bucket in gradient.buckets():
                await bucket
            x.descend_(await gradient)
            x.mix_(await reading, 0.5)

    assert run(overlapping).steps >= 18


def test_a_gradient_belongs_to_the_point_where_it_was_started() -> None:
    """What happens to the replica while it is computed does not reach it."""
    compared: list[float] = []

    async def moves(w: Worker, x: Replica) -> None:
        before = x.snapshot()
        gradient = w.gradient(x, torch.arange(4))
        x.add_(torch.ones_like(before))
        x.assign_(x.snapshot() * 2)
        expected = bowl_gradient(bowl(), before.double(), torch.arange(4))
        compared.append(float((await gradient - expected).abs().max()))

    simulation = build(bowl(), only_here(moves), cluster_of(3), steps=1, engine="loop")
    simulation.run()
    assert len(compared) == 3
    assert max(compared) < 1e-5


def test_no_grad_must_not_span_an_await() -> None:
    """It would leak into the other workers' code; autograd is on again after the error."""

    async def careless(w: Worker, x: Replica) -> None:
        with torch.no_grad():
            await w.gradient(x)

    with pytest.raises(ProtocolError, match="no_grad"):
        run(careless)
    assert torch.is_grad_enabled()


def test_only_the_workers_words_can_be_awaited() -> None:
    """No event loop exists, so an awaitable from elsewhere is refused."""

    class Foreign:
        def __await__(self) -> Generator[object, None, None]:
            yield "something else"

    async def lost(w: Worker, x: Replica) -> None:
        await Foreign()

    with pytest.raises(ProtocolError, match="not a Worker's word"):
        run(lost)


def test_an_error_in_a_methods_text_names_its_worker_and_time() -> None:
    """The original error is the cause."""

    async def fails(w: Worker, x: Replica) -> None:
        await w.sleep(0.5)
        if w.rank == 2:
            raise KeyError("weight")

    with pytest.raises(RunFailed, match=r"worker 2 failed at 0\.500000 s: KeyError") as failed:
        run(fails)
    assert isinstance(failed.value.__cause__, KeyError)


def test_within_is_late_exactly_when_the_time_is_up() -> None:
    """A bounded operation gives its result, or `Late` at the deadline."""
    seen: list[tuple[str, float]] = []

    async def bounded(w: Worker, x: Replica) -> None:
        await w.within(0.2, w.sleep(0.1))
        seen.append(("in time", w.now()))
        with pytest.raises(Late, match=r"receive did not end within 0\.2 s"):
            await w.within(0.2, w.receive("never"))
        seen.append(("late", w.now()))

    run(bounded, 1)
    assert seen == [("in time", 0.1), ("late", pytest.approx(0.3))]


def test_a_cancelled_receive_loses_no_message() -> None:
    """What arrives after the cancellation goes to the next receive."""
    got: list[int] = []

    async def talks(w: Worker, x: Replica) -> None:
        if w.rank == 0:
            await w.sleep(0.1)
            await w.send(1, 7, tag="number")
        elif w.rank == 1:
            w.receive("number").cancel()
            await w.sleep(0.2)
            got.append((await w.receive("number", source=0)).payload)

    run(talks)
    assert got == [7]


def test_messages_between_two_workers_arrive_in_order() -> None:
    """A connection is a stream: a small message does not overtake a large one."""
    got: list[float] = []

    async def talks(w: Worker, x: Replica) -> None:
        if w.rank == 0:
            w.send(1, torch.zeros(100_000), tag="any")
            w.send(1, 1.0, tag="any")
        elif w.rank == 1:
            for _ in range(2):
                payload = (await w.receive("any")).payload
                got.append(float(payload.numel()) if isinstance(payload, torch.Tensor) else payload)

    run(talks, 2)
    assert got == [100_000.0, 1.0]


def test_a_read_gives_what_the_memory_holds_when_the_request_arrives() -> None:
    """One-sided: the peer's own text is busy sleeping and takes no part."""
    got: list[float] = []

    async def reads(w: Worker, x: Replica) -> None:
        x.assign_(torch.full_like(x.snapshot(), float(w.rank)))
        if w.rank == 1:
            await w.sleep(0.2)
            x.assign_(torch.full_like(x.snapshot(), 5.0))
            await w.sleep(1.0)
        elif w.rank == 0:
            for _ in range(2):
                await w.sleep(0.15)
                got.append(float((await w.read(1))[0]))

    run(reads, 2)
    assert got == [1.0, 5.0]
